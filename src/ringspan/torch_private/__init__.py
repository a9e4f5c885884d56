"""Everything that uses a private name of PyTorch, one file for each idea."""
