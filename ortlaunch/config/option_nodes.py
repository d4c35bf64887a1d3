"""Options in Hydra's ConfigStore that are built, and their modules imported, when Hydra loads them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import DictConfig, OmegaConf

from ortlaunch.config.options import MODULE_GROUPS


class _Unbuilt:
    """A node of which Hydra makes a deep copy, as of each node that it loads: the copy is the node, built then."""

    def __init__(self, build: Callable[[], DictConfig]) -> None:
        self._build = build

    def __deepcopy__(self, _: Any) -> DictConfig:
        return self._build()


class OptionNode(ConfigNode):
    """A node of Hydra's store that is built when Hydra loads it.

    Hydra loads one option of a group and needs only the names of the others. To import all modules and build all nodes
    would take 30 ms, a tenth of a short command.
    """

    def __init__(self, group: str | None, name: str, build: Callable[[], DictConfig], package: str | None) -> None:
        """
        Args:
            group: the config group; None for the root.
            name: the option.
            build: makes the node.
            package: where its keys are in the configuration; None for the place of its group.
        """
        self.name = f"{name}.yaml"
        self.group = group
        self.package = package
        self.provider = None
        self._build = build
        self._node: DictConfig | None = None

    @property
    def node(self) -> DictConfig:  # type: ignore[override]
        unbuilt: Any = _Unbuilt(self._build)
        return unbuilt if self._node is None else self._node

    @node.setter
    def node(self, value: DictConfig) -> None:
        self._node = value


def store(group: str | None, name: str, build: Callable[[], DictConfig], package: str | None = None) -> None:
    """Registers an option in Hydra's store; the arguments are those of `OptionNode`."""
    options: dict[str, Any] = ConfigStore.instance().repo
    for part in group.split("/") if group is not None else ():
        options = options.setdefault(part, {})
    node = OptionNode(group, name, build, package)
    options[node.name] = node


def store_option(group: str, name: str, build: Callable[[], DictConfig] | None = None) -> None:
    """Registers an option in Hydra's store: as ``<group>=<name>``, and as a schema for files that build on it.

    Args:
        group: the config group.
        name: the option.
        build: makes its node; None for an option of `MODULE_GROUPS`.
    """
    build = build or partial(_of_module, group, name)
    for place in (group, f"schema/{group}"):
        store(place, name, build)


def _of_module(group: str, name: str) -> DictConfig:
    """The node of an option of `MODULE_GROUPS`, whose `params` take any key."""
    node: DictConfig = OmegaConf.structured(MODULE_GROUPS[group][name])
    if "params" in node:
        OmegaConf.set_struct(node.params, False)
    return node
