"""What the test suite and `ringspan check` share: worker processes, random cases, dense references."""
