"""`ortlaunch tune`: finds the fastest configuration of a run that fits, by trials that are ordinary runs."""
