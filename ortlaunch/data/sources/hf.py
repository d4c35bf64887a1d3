"""Data sets of the `datasets` library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import MISSING

from ortlaunch.base.errors import RequestError
from ortlaunch.config.options import option
from ortlaunch.config.schema import TokenDataConfig
from ortlaunch.data.files import check_tokenizer

if TYPE_CHECKING:
    from ortlaunch.data.source import Share, Source


@option("data")
@dataclass
class HfDataConfig(TokenDataConfig):
    """A data set of the `datasets` library, by folder or id."""

    name: str = "hf"
    path: str = MISSING
    """Folder written by `save_to_disk`, a folder of data files, or an id on the hub."""
    config: str | None = None
    """Configuration of the data set, if it has several."""
    split: str = "train"
    """Split to train on."""
    eval_split: str | None = None
    """Split to evaluate on; null holds out a part of data.split."""
    column: str = "text"
    """Column that holds the text."""
    tokenizer: str | None = None
    """Folder of a transformers tokenizer, or a tokenizer.json; null reads bytes."""
    streaming: bool = False
    """Read samples during training instead of preparing the whole data set first."""

    def check(self) -> None:
        if self.path.startswith((".", "/", "~")) and not Path(self.path).expanduser().exists():
            raise RequestError(f"data.path={self.path}: no such folder")
        check_tokenizer(self.tokenizer)

    def open(self, share: Share) -> Source:
        from ortlaunch.data.hf_datasets import open_hf

        return open_hf(self, share)
