"""Settles, checks and resolves a configuration, in this order. Every verb does this before it uses one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ortlaunch.compose.rules import check
from ortlaunch.config.schema import AnyRun, Config
from ortlaunch.launch.table import launcher_of
from ortlaunch.models import registry
from ortlaunch.tracking import trackers


def prepared(config: AnyRun, *, starts: bool = True) -> AnyRun:
    """Returns the configuration as it can be launched from this folder.

    Its launcher has decided the values that were open, all checks have passed, and its tracking paths are absolute.

    Args:
        config: the configuration as it was composed, or as a run folder has stored it.
        starts: whether a run may start from here. Otherwise this machine need not have its GPUs.

    Raises:
        RequestError: the first rule that the configuration breaks.
    """
    config = launcher_of(config).settle(config)
    check(config, starts=starts)
    return trackers.resolved(_with_classes(config), Path.cwd())


def _with_classes(config: AnyRun) -> AnyRun:
    """Gives a model that says no number of classes that of the data, so that the run folder holds it."""
    if not isinstance(config, Config) or not registry.takes_classes(config.model):
        return config
    classes = config.data.classes()
    if classes is None:
        return config
    return replace(config, model=replace(config.model, params=config.model.params | {registry.CLASSES: classes}))
