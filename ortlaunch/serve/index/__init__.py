"""The runs and the jobs that the list shows, in memory, so that no run folder is read for a page."""
