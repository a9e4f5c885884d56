"""Inspection of user functions: the tensors they capture, the indices they read, digests, and copies with other
tensors."""
