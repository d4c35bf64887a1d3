"""The index of the runs: what the list shows of each, so that no run folder is read for a page."""
