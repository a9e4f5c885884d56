"""Shared by the test suite and `ringspan check`: worker processes, random cases, dense references."""
