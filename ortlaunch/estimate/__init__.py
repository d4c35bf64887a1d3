"""`ortlaunch estimate`: how much memory a run needs, found without allocating it."""
