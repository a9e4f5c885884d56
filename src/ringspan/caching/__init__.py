"""The two caches of ringspan: by digest (:mod:`.by_digest`) and by CUDA stream (:mod:`.by_stream`).

Both are bounded in number and, where results may be large, in bytes. Both may be used from several threads, and hold no
tensor of the user's. :func:`clear_caches` empties all of them.
"""

from ringspan.caching.registry import clear_caches

__all__ = ["clear_caches"]
