"""The program that srun starts on each node: ``python -m ortlaunch.launch.slurm.node preflight|train RUN_DIR``.

`preflight` checks whether the node is fit. `train` replaces this process by torchrun for the node's workers.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ortlaunch.launch.planning import stored
from ortlaunch.launch.queue.node import train
from ortlaunch.launch.slurm.fitness import report
from ortlaunch.launch.slurm.launcher import SlurmLauncher


def main() -> None:
    """Runs the command line."""
    verb, run_dir = sys.argv[1], Path(sys.argv[2])
    if verb == "preflight":
        sys.exit(report(run_dir))
    train(SlurmLauncher(), stored(run_dir))


if __name__ == "__main__":
    main()
