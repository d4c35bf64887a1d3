"""torchrun, as ``python -m ortlaunch.launch.agent [--watch RUN_DIR] torch.distributed.run OPTIONS``.

It neither keeps nor copies output. With ``--watch`` the workers are a script, which `ortlaunch.launch.script_watch`
watches.

The workers write their logs themselves. torchrun without a folder for logs would read `/dev/null` for each worker's two
streams, in two threads that look ten times a second.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

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
        _stop_copying(torchrun)
        around.enter_context(socket_folder())
        torchrun.main()


def _stop_copying(torchrun: Any) -> None:
    """Takes from torchrun's settings the streams to copy. `--tee`, which is not given, is the option for them."""

    class Uncopied(torchrun.DefaultLogsSpecs):  # type: ignore[misc]
        def reify(self, envs: dict[int, dict[str, str]]) -> Any:
            return dataclasses.replace(super().reify(envs), tee_stdouts={}, tee_stderrs={})

    torchrun.DefaultLogsSpecs = Uncopied


if __name__ == "__main__":
    main()
