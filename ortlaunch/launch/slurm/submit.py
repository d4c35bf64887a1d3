"""The environment that sbatch, and by it a job, is given."""

from __future__ import annotations

import os

from ortlaunch.config.schema import Config
from ortlaunch.launch.queue import submission


def submission_environment(config: Config) -> dict[str, str]:
    """The environment that the job is given: this one, and the tracking URI where it holds a password."""
    kept = {name: value for name, value in os.environ.items() if not _would_interfere(name, config)}
    return submission.submission_environment(config, kept)


_OWN_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT")
_DEFAULTS = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_GPUS_PER_NODE": "gpus_per_node",
    "SBATCH_GRES": "gres",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_TIMELIMIT": "time",
}
"""A person's defaults for sbatch, which come before what a script says, and the keys that are to come before them."""


def _would_interfere(name: str, config: Config) -> bool:
    """Whether a variable of this shell would change what the script asks for."""
    if name.startswith(("SLURM_", "SRUN_")):
        # A shell inside another job has that job's.
        return name not in _OWN_VARIABLES
    if name in _DEFAULTS:
        return getattr(config.launcher, _DEFAULTS[name]) is not None
    return name.startswith("SBATCH_")
