"""Runs as SLURM jobs: the script, its submission, and what goes on beside it on the nodes."""
