"""Whether a run fits into the memory of its machine, asked before it starts. This package does not import torch."""
