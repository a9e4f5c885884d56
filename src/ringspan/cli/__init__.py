"""The command line: ``ringspan demo``, ``check``, ``bench``."""
