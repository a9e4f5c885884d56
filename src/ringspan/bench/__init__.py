"""Benchmarks: each function measures something and returns its figures as rows. The caller prints them."""
