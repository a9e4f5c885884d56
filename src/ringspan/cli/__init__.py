"""The command line: ``ringspan demo``, ``plan``, ``check``, ``doctor`` and ``bench``. Needs the extra
``ringspan[cli]``."""
