"""What every verb does with a configuration before it is used: it is settled, checked and resolved, in this order."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ortlaunch.compose.rules import check
from ortlaunch.config.schema import Config, MlflowConfig
from ortlaunch.config.tracking_uri import resolve_tracking
from ortlaunch.launch.table import launcher_of


def prepared(config: Config) -> Config:
    """The configuration as it can be launched from this folder.

    Its launcher decides what it leaves open, the rules hold, and its tracking places are absolute.

    Args:
        config: as it was composed, or as a run folder has stored it.

    Raises:
        RequestError: the first rule that the configuration breaks.
    """
    config = launcher_of(config).settle(config)
    check(config)
    if isinstance(config.tracking, MlflowConfig):
        config = dataclasses.replace(config, tracking=resolve_tracking(config.tracking, Path.cwd()))
    return config
