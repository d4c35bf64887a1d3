"""Training data: sources by name (`sources/`), read in batches that are shared out over the ranks."""
