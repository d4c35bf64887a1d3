"""Lets Hydra compose a configuration."""

from __future__ import annotations

from omegaconf import DictConfig

from ortlaunch.config.paths import conf_dir

CONFIG = "config"
"""The name of the root file in ``conf/``."""
SCRIPT = "script"
"""The name of the root file of a run whose workers are a script."""
VERSION_BASE = "1.3"
"""The version of Hydra whose defaults are used."""


def composed(overrides: list[str], root: str = CONFIG) -> DictConfig:
    """The composed tree, with Hydra's own part.

    Args:
        overrides: the words of the command line, which were checked; the schema is registered.
        root: the root file.

    Raises:
        Exception: whatever Hydra raises for what does not compose.
    """
    import hydra

    with hydra.initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE):
        return hydra.compose(root, overrides=overrides, return_hydra_config=True)
