"""The environment that sbatch gets and passes on to the job."""

from __future__ import annotations

import os

from ortlaunch.config.schema import RunConfig, key_facts
from ortlaunch.tracking import trackers


def submission_environment(config: RunConfig) -> dict[str, str]:
    """Returns the job's environment: that of this process, and the tracking URI if it holds a password."""
    kept = {name: value for name, value in os.environ.items() if not _would_interfere(name, config)}
    return kept | trackers.environment(config)


_OWN_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT")


def _would_interfere(name: str, config: RunConfig) -> bool:
    """Returns whether a variable of this shell would change what the script asks for."""
    if name.startswith(("SLURM_", "SRUN_")):
        # In a shell inside another job, these variables describe that job.
        return name not in _OWN_VARIABLES
    for key, facts in key_facts(config.launcher).items():
        if facts.variable == name:
            # sbatch prefers the user's variable to the script, but a key that is set must take precedence.
            return getattr(config.launcher, key) is not None
    return name.startswith("SBATCH_")
