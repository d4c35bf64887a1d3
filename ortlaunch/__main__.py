"""``python -m ortlaunch``: the same as the ``ortlaunch`` command."""

from ortlaunch.cli import main

main()
