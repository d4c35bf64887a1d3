"""``ortlaunch doctor``: what this environment and machine have, what they lack, and the command that mends it."""
