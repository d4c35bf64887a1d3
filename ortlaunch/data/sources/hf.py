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
    """Column that holds the text, or a list of words for `label_column`."""
    pair_column: str | None = None
    """Column of a second text that is classified together with the first."""
    label_column: str | None = None
    """Column of the classes of texts, or of each of their words; null learns the text itself. Labels are whole numbers
    or names; other numbers are fitted."""
    tokenizer: str | None = None
    """Folder of a transformers tokenizer, or a tokenizer.json; null reads bytes."""
    streaming: bool = False
    """Read samples during training instead of preparing the whole data set first."""

    def check(self) -> None:
        if self.path.startswith((".", "/", "~")) and not Path(self.path).expanduser().exists():
            raise RequestError(f"data.path={self.path}: no such folder")
        check_tokenizer(self.tokenizer)
        if self.label_column is None and self.pair_column is not None:
            raise RequestError(f"data.pair_column={self.pair_column}: is for classes of texts: give data.label_column")
        if self.label_column is not None:
            if self.tokenizer is None:
                raise RequestError(f"data.label_column={self.label_column}: give data.tokenizer, that of the model")
            if self.streaming:
                raise RequestError(
                    f"data.label_column={self.label_column}: labelled texts are read whole: set data.streaming=false"
                )

    def open(self, share: Share) -> Source:
        from ortlaunch.data.hf_datasets import open_hf

        return open_hf(self, share)
