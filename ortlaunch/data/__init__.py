"""Training data: sources by name (`sources/`), and their batches, which are divided among the ranks."""
