"""Benchmarks: each function measures something and returns its figures as rows. Printing them is up to the caller."""
