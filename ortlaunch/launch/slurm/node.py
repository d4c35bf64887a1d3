"""The program that srun starts on each node: ``python -m ortlaunch.launch.slurm.node preflight|train RUN_DIR``.

`preflight` checks whether the node is fit. `train` replaces this process by torchrun for the node's workers.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ortlaunch.config.load import load_run_config
from ortlaunch.launch.queue.node import train
from ortlaunch.launch.slurm.fitness import report
from ortlaunch.launch.slurm.launcher import SlurmLauncher
from ortlaunch.run.run import Run


def main() -> None:
    """Runs the command line."""
    verb, run_dir = sys.argv[1], Path(sys.argv[2])
    if verb == "preflight":
        sys.exit(report(run_dir))
    train(SlurmLauncher(), load_run_config(Run(run_dir).config_file), run_dir)


if __name__ == "__main__":
    main()
