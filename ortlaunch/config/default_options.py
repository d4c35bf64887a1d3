"""The option of each group that a run has if nobody chooses another."""

from __future__ import annotations

import functools

import yaml

from ortlaunch.config.backends import DEFAULT, default_backend
from ortlaunch.config.paths import conf_dir


def default_options() -> dict[str, str]:
    """Returns the options by their groups, as ``conf/config.yaml`` chooses them on this machine."""
    return {group: default_backend() if option == DEFAULT else option for group, option in _listed().items()}


@functools.cache
def _listed() -> dict[str, str]:
    content = yaml.safe_load((conf_dir() / "config.yaml").read_text(encoding="utf-8"))
    named = [one for one in content["defaults"] if isinstance(one, dict)]
    return {str(group): str(option) for one in named for group, option in one.items() if " " not in group}
