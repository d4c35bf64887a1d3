"""torchrun, as ``python -m ortlaunch.launch.agent [--watch RUN_DIR] torch.distributed.run OPTIONS``.

It keeps no output: the workers write their logs themselves. With ``--watch`` they are a script, which
`ortlaunch.launch.script_watch` watches.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import ExitStack
from pathlib import Path

from ortlaunch.base.sockets import socket_folder


def main() -> None:
    """Runs torchrun with the arguments after its module's name."""
    with ExitStack() as around:
        if sys.argv[1] == "--watch":
            from ortlaunch.launch.script_watch import watched
            from ortlaunch.run.run import Run

            around.enter_context(watched(Run(Path(sys.argv[2]))))
            del sys.argv[1:3]
        torchrun = importlib.import_module(sys.argv.pop(1))
        around.enter_context(socket_folder())
        torchrun.main()


if __name__ == "__main__":
    main()
