"""Options in Hydra's ConfigStore that are built, and their modules imported, when Hydra loads them."""

from __future__ import annotations

from typing import Any

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import DictConfig, OmegaConf

from ortlaunch.config.options import MODULE_GROUPS


class OptionNode(ConfigNode):
    """A node of Hydra's store that is built from the option's dataclass when Hydra loads it.

    Hydra loads one option of a group and needs only the names of the others. To import all modules and build all nodes
    would take 30 ms, a tenth of a short command.
    """

    def __init__(self, group: str, name: str, schema: type[Any] | None = None) -> None:
        """
        Args:
            group: the config group.
            name: the option.
            schema: its dataclass; None for an option that is a module.
        """
        self.name = f"{name}.yaml"
        self.group = group
        self.package = None
        self.provider = None
        # The node keeps names instead of the options, because Hydra makes deep copies of its store.
        self._key = (group, name)
        self._schema = schema
        self._node: DictConfig | None = None

    @property
    def node(self) -> DictConfig:
        if self._node is None:
            group, name = self._key
            self._node = OmegaConf.structured(self._schema or MODULE_GROUPS[group][name])
        return self._node

    @node.setter
    def node(self, value: DictConfig) -> None:
        self._node = value


def store_schema(group: str, name: str, schema: type[Any]) -> None:
    """Registers an option's dataclass in Hydra's store as ``schema/<group>/<name>``, for files that build on it."""
    groups: dict[str, Any] = ConfigStore.instance().repo.setdefault("schema", {})
    node = OptionNode(f"schema/{group}", name, schema)
    groups.setdefault(group, {})[node.name] = node


def store_option(group: str, name: str) -> None:
    """Registers an option in Hydra's store: as ``<group>=<name>``, and as a schema for files that build on it."""
    repository: dict[str, Any] = ConfigStore.instance().repo
    node = OptionNode(group, name)
    for groups in (repository, repository.setdefault("schema", {})):
        groups.setdefault(group, {})[node.name] = node
