"""Runs as SLURM jobs: the batch script, its submission, and the programs that it starts on the nodes."""
