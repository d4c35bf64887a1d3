"""Options in Hydra's ConfigStore whose modules are imported when Hydra loads them."""

from __future__ import annotations

from typing import Any

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import DictConfig, OmegaConf

from ortlaunch.config.options import MODULE_GROUPS


class OptionNode(ConfigNode):
    """An option's node, made of its dataclass when it is loaded.

    Hydra asks for one option of a group and needs no more than the names of the others: to import all modules and to
    make all nodes takes 16 ms, a twentieth of a short command.
    """

    def __init__(self, group: str, name: str) -> None:
        self.name = f"{name}.yaml"
        self.group = group
        self.package = None
        self.provider = None
        # Names, not the options themselves: Hydra makes deep copies of its store.
        self._key = (group, name)
        self._node: DictConfig | None = None

    @property
    def node(self) -> DictConfig:
        if self._node is None:
            group, name = self._key
            self._node = OmegaConf.structured(MODULE_GROUPS[group][name])
        return self._node

    @node.setter
    def node(self, value: DictConfig) -> None:
        self._node = value


def store_option(group: str, name: str) -> None:
    """Makes an option known to Hydra, as ``<group>=<name>`` and, for files that build on it, as its schema."""
    repository: dict[str, Any] = ConfigStore.instance().repo
    node = OptionNode(group, name)
    for groups in (repository, repository.setdefault("schema", {})):
        groups.setdefault(group, {})[node.name] = node
