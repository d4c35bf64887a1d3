"""``ortlaunch doctor``: reports what this environment and machine have and lack, with a command for each problem."""
