"""Conversations, of which the answers are learnt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from omegaconf import MISSING

from ortlaunch.config.options import option
from ortlaunch.config.schema import TokenDataConfig
from ortlaunch.data.files import check_paths, check_tokenizer

if TYPE_CHECKING:
    from ortlaunch.data.source import Share, Source


@option("data")
@dataclass
class ChatConfig(TokenDataConfig):
    """Conversations by a tokenizer's chat template, with the loss on the answers alone."""

    name: str = "chat"
    path: str = MISSING
    """Files of JSON lines with `messages`, or a folder written by `save_to_disk`; as for data=text."""
    split: str = "train"
    """Split of a folder with several."""
    eval_path: str | None = None
    """Conversations to evaluate on; null holds out the last `data.eval_fraction` of data.path."""
    tokenizer: str = MISSING
    """Folder of a transformers tokenizer with a chat template."""
    packing: bool = True
    """Put several conversations into one sample, which do not see each other; false pads each to data.seq_len."""
    drop_last: bool = False

    def check(self) -> None:
        check_paths(self.path)
        if self.eval_path is not None:
            check_paths(self.eval_path, "data.eval_path")
        check_tokenizer(self.tokenizer)

    def open(self, share: Share) -> Source:
        from ortlaunch.data.chat import open_chat

        return open_chat(self)
