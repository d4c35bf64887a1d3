"""The environment that sbatch, and by it a job, is given."""

from __future__ import annotations

import os

from ortlaunch.config.schema import Config, key_facts
from ortlaunch.tracking import trackers


def submission_environment(config: Config) -> dict[str, str]:
    """The environment that the job is given: this one, and the tracking URI where it holds a password."""
    kept = {name: value for name, value in os.environ.items() if not _would_interfere(name, config)}
    return kept | trackers.environment(config)


_OWN_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT")


def _would_interfere(name: str, config: Config) -> bool:
    """Whether a variable of this shell would change what the script asks for."""
    if name.startswith(("SLURM_", "SRUN_")):
        # A shell inside another job has that job's.
        return name not in _OWN_VARIABLES
    for key, facts in key_facts(config.launcher).items():
        if facts.variable == name:
            # A person's default for sbatch comes before what a script says, and a key is to come before it.
            return getattr(config.launcher, key) is not None
    return name.startswith("SBATCH_")
