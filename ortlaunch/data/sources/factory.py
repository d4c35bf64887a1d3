"""A data set of the user's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from ortlaunch.config.options import option
from ortlaunch.config.schema import DataConfig

if TYPE_CHECKING:
    from ortlaunch.data.source import Share, Source


@option("data")
@dataclass
class FactoryConfig(DataConfig):
    """A torch data set of your own, by data.target."""

    name: str = "factory"
    target: str = MISSING
    """`package.module:callable` that returns a `torch.utils.data.Dataset`, or a mapping with `train`, `eval` and
    `collate`."""
    params: dict[str, Any] = field(default_factory=dict)
    """Arguments of the callable by name."""
    drop_last: bool = False
    shard: bool = False
    """Share out a stream that every worker and loader process would read whole."""

    def open(self, share: Share) -> Source:
        from ortlaunch.data.own import open_own

        return open_own(self, share)
