"""The queue of the service: which run starts next on this machine, and starting it exactly once."""
