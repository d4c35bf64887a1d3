"""Lets Hydra compose a configuration without work whose result nobody uses. All of it is a quarter of a short command.

Hydra's loader, its files and its rules are the same, and so are the composed trees.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from ortlaunch.config.paths import conf_dir

if TYPE_CHECKING:
    from hydra.core.default_element import InputDefault

CONFIG = "config"
"""The name of the root file in ``conf/``."""
SCRIPT = "script"
"""The name of the root file of a run whose workers are a script."""
VERSION_BASE = "1.3"
"""The version of Hydra whose defaults are used."""


def composed(overrides: list[str], *, sets_hydra: bool, root: str = CONFIG) -> DictConfig:
    """The composed tree, with Hydra's own part.

    Args:
        overrides: the words of the command line, which were checked; the schema is registered.
        sets_hydra: whether they may set or choose a part of Hydra.
        root: the root file.

    Raises:
        Exception: whatever Hydra raises for what does not compose.
    """
    if sets_hydra or importlib.util.find_spec("hydra_plugins") is not None:
        return _composed_with_plugins(overrides, root)
    return _composed_alone(overrides, root)


def _composed_with_plugins(overrides: list[str], root: str) -> DictConfig:
    """Composes as any program of Hydra's, with all that its installed plugins may add."""
    import hydra

    with hydra.initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE):
        return hydra.compose(root, overrides=overrides, return_hydra_config=True)


def _composed_alone(overrides: list[str], root: str) -> DictConfig:
    """Composes from ``conf/`` and the schema alone.

    Hydra would import its shell completions and other plugins, and look for each option among its own files first:
    10 ms. ``conf/config.yaml`` chooses none of these files.
    """
    from hydra import version
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.config_search_path_impl import ConfigSearchPathImpl

    # The first two register their default options when they are imported.
    from hydra._internal.core_plugins import basic_launcher, basic_sweeper  # noqa: F401
    from hydra._internal.core_plugins.file_config_source import FileConfigSource
    from hydra._internal.core_plugins.structured_config_source import StructuredConfigSource
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.utils import setup_globals
    from hydra.types import RunMode

    version.setbase(VERSION_BASE)
    setup_globals()
    for source in (FileConfigSource, StructuredConfigSource):
        SourcesRegistry.instance().register(source)
    path = ConfigSearchPathImpl()
    path.append("main", str(conf_dir()))
    path.append("schema", "structured://")
    return ConfigLoaderImpl(path).load_configuration(root, overrides, RunMode.RUN, from_shell=False)


@functools.cache
def spare_hydra() -> None:
    """Keeps Hydra from two computations that change nothing in what it composes."""
    from hydra._internal import defaults_list
    from hydra.core.config_store import ConfigStore

    # Hydra copies its repository for each composition, and with it the store: 4 ms. It never changes the copy, and
    # copies each node when it loads it.
    store: Any = ConfigStore.instance()
    store.__deepcopy__ = lambda _: store
    choices_so_far = defaults_list._create_interpolation_map

    def choices_for(overrides: Any, defaults: list[InputDefault], self_added: bool) -> DictConfig | None:
        # Hydra makes this tree for each of some twenty files and nodes, 8 ms, and reads it for interpolations alone.
        if not any(default.is_interpolation() for default in defaults):
            return None
        return choices_so_far(overrides, defaults, self_added)

    defaults_list._create_interpolation_map = choices_for  # type: ignore[assignment]
