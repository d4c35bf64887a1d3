"""`ortlaunch --server URL VERB`: the verbs that ask a service."""
