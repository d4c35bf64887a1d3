"""What every verb does with a configuration before it is used: it is settled, checked and resolved, in this order."""

from __future__ import annotations

from pathlib import Path

from ortlaunch.compose.rules import check
from ortlaunch.config.schema import Config
from ortlaunch.launch.table import launcher_of
from ortlaunch.tracking import trackers


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
    return trackers.resolved(config, Path.cwd())
