"""The benchmarks of `ringspan bench`."""
