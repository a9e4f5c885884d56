"""The two caches: by digest, and by CUDA stream."""
