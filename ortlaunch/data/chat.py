"""Opens conversations: renders them by a chat template, marks the answers, and packs them into samples of one length.

Conversations in one sample do not see each other: positions begin anew with each, and a mask says for each token which
ones it sees. Its numbers are added to the attention's scores, so that every implementation of attention takes it.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jinja2 import TemplateError
from torch.utils.data import Dataset, default_collate

from ortlaunch.base.errors import RequestError
from ortlaunch.base.text import counted
from ortlaunch.data.batch import IDS, LABELS, Batch
from ortlaunch.data.encoding import load_tokenizer
from ortlaunch.data.files import find_files, read_bytes
from ortlaunch.data.hf_datasets import import_datasets, is_saved, load_saved
from ortlaunch.data.source import Source, Tokens, digest

if TYPE_CHECKING:
    from ortlaunch.data.sources.chat import ChatConfig

IGNORED = -100
MASK, POSITIONS = "attention_mask", "position_ids"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MESSAGES = "messages"
_OTHER_MESSAGES = "conversations"
_ROLES = {"human": "user", "gpt": "assistant"}
"""Names of roles in `conversations`, which have `from` and `value` in place of `role` and `content`."""
_LOWEST = float(torch.finfo(torch.float32).min)


def open_chat(cfg: ChatConfig) -> Source:
    """Reads, renders and tokenizes all conversations into memory, on every worker.

    Raises:
        RequestError: the tokenizer has no chat template, a conversation does not suit it, or nothing is left to learn.
    """
    renderer = Renderer(cfg.tokenizer)
    trained = list(_rendered(cfg.path, cfg, renderer))
    if cfg.eval_path is None:
        kept = len(trained) - int(len(trained) * cfg.eval_fraction)
        trained, held = trained[:kept], trained[kept:]
    else:
        held = list(_rendered(cfg.eval_path, cfg, renderer))
    notes = _notes([*trained, *held], cfg)
    data, held_out = (_Samples(rows, cfg, renderer.pad) for rows in (trained, held))
    if not len(data):
        raise RequestError(f"data.path={cfg.path}: no conversation has an answer within data.seq_len={cfg.seq_len}")
    return Source(
        data,
        "tokens",
        f"data.path={cfg.path}",
        digest(f"{cfg.seq_len} {cfg.packing}", *data.content),
        vocab_size=renderer.vocab_size,
        held_out=held_out if len(held_out) else None,
        collate=_packed if cfg.packing else _padded,
        notes=notes,
    )


class Renderer:
    """Turns conversations into token ids, and marks those of the answers."""

    def __init__(self, name: str) -> None:
        """Takes what `data.tokenizer` names."""
        self._where = f"data.tokenizer={name}"
        self._tokenizer: Any = load_tokenizer(name)
        if getattr(self._tokenizer, "chat_template", None) is None:
            raise RequestError(
                f"{self._where}: has no chat template: put one into the folder as chat_template.jinja, or take the "
                "tokenizer of a model for chats"
            )
        if not self._tokenizer.is_fast:
            raise RequestError(f"{self._where}: has no tokenizer.json, which is needed to find the answers' tokens")
        self._marks_answers = _GENERATION.search(self._tokenizer.get_chat_template()) is not None
        self._special = set(self._tokenizer.all_special_ids)
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1
        pads = (self._tokenizer.pad_token_id, self._tokenizer.eos_token_id, 0)
        self.pad = int(next(one for one in pads if one is not None))

    def render(self, messages: list[dict[str, Any]], where: str) -> tuple[Tokens, Tokens]:
        """The tokens of a conversation, and for each whether it is learnt.

        Raises:
            RequestError: the template refuses the conversation, or does not show which text is an answer.
        """
        try:
            if self._marks_answers:
                found = self._tokenizer.apply_chat_template(
                    messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
                )
                return np.array(found[IDS]), np.array(found["assistant_masks"], dtype=bool)
            return self._without_marks(messages, where)
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise RequestError(f"{where}: the chat template of {self._where} does not take it: {error}") from error

    def _without_marks(self, messages: list[dict[str, Any]], where: str) -> tuple[Tokens, Tokens]:
        """An answer is what the text has more with its message than with the prompt for it, up to its end token."""
        whole = self._text(messages)
        encoded = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, offsets = np.array(encoded[IDS], dtype=np.int64), encoded["offset_mapping"]
        learnt = np.zeros(len(ids), dtype=bool)
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            prompt = self._text(messages[:number], add_generation_prompt=True)
            answered = self._text(messages[: number + 1])
            if not (answered.startswith(prompt) and whole.startswith(answered)):
                raise RequestError(
                    f"{where}: the chat template of {self._where} writes a message otherwise when others follow, so "
                    "the answers are not found in its text: mark them in it by {% generation %} and {% endgeneration %}"
                )
            inside = [at for at, (begin, end) in enumerate(offsets) if len(prompt) <= begin < end <= len(answered)]
            ends = [at for at in inside if int(ids[at]) in self._special]
            learnt[[at for at in inside if not ends or at <= ends[-1]]] = True
        return ids, learnt

    def _text(self, messages: list[dict[str, Any]], **options: bool) -> str:
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **options)) if messages else ""


class _Samples(Dataset[dict[str, Any]]):
    """Conversations in samples of one length."""

    def __init__(self, rows: Sequence[tuple[Tokens, Tokens]], cfg: ChatConfig, pad: int) -> None:
        cut = [(ids[: cfg.seq_len], learnt[: cfg.seq_len]) for ids, learnt in rows]
        # The first token of a sample is predicted by none.
        cut = [(ids, learnt) for ids, learnt in cut if learnt[1:].any()]
        lengths = [len(ids) for ids, _ in cut]
        self._seq_len, self._pad = cfg.seq_len, pad
        self._ids = np.concatenate([ids for ids, _ in cut] or [np.empty(0)]).astype(np.int32)
        self._learnt = np.concatenate([learnt for _, learnt in cut] or [np.empty(0)]).astype(bool)
        self._starts = np.cumsum([0, *lengths])
        # No token of another conversation predicts the first one.
        self._learnt[self._starts[:-1]] = False
        self._bins = packed(lengths, cfg.seq_len) if cfg.packing else [[number] for number in range(len(lengths))]

    @property
    def content(self) -> tuple[Tokens, Tokens, Tokens]:
        """All that samples are made of."""
        return self._ids, self._learnt, self._starts

    def __len__(self) -> int:
        return len(self._bins)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.full((self._seq_len,), self._pad)
        labels = torch.full((self._seq_len,), IGNORED)
        positions, owner = torch.arange(self._seq_len), torch.zeros(self._seq_len, dtype=torch.int64)
        at = 0
        for place, number in enumerate(self._bins[index], start=1):
            part = slice(self._starts[number], self._starts[number + 1])
            mine = slice(at, at + part.stop - part.start)
            ids[mine] = torch.from_numpy(self._ids[part].astype(np.int64))
            labels[mine] = torch.where(torch.from_numpy(self._learnt[part]), ids[mine], IGNORED)
            positions[mine] -= at
            owner[mine] = place
            at = mine.stop
        positions[at:] -= at
        return {IDS: ids, "owner": owner, POSITIONS: positions, LABELS: labels}


def packed(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Numbers of conversations in bins: each, from the longest, goes where it leaves the least room (best fit)."""
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []
    for number in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        at = bisect.bisect_left(free, (lengths[number], -1))
        left, index = free.pop(at) if at < len(free) else (room, len(bins))
        if index == len(bins):
            bins.append([])
        bins[index].append(number)
        bisect.insort(free, (left - lengths[number], index))
    return bins


def _packed(samples: list[dict[str, Any]]) -> Batch:
    batch = default_collate(samples)
    owner = batch["owner"]
    sees = torch.tril(owner[:, :, None] == owner[:, None, :])
    mask = torch.zeros(sees.shape).masked_fill_(~sees, _LOWEST)[:, None]
    return {IDS: batch[IDS], MASK: mask, POSITIONS: batch[POSITIONS], LABELS: batch[LABELS]}


def _padded(samples: list[dict[str, Any]]) -> Batch:
    batch = default_collate(samples)
    return {IDS: batch[IDS], MASK: batch["owner"], LABELS: batch[LABELS]}


def _rendered(path: str, cfg: ChatConfig, renderer: Renderer) -> Iterator[tuple[Tokens, Tokens]]:
    return (renderer.render(_messages(row, where), where) for where, row in _rows(path, cfg))


def _rows(path: str, cfg: ChatConfig) -> Iterator[tuple[str, Any]]:
    """The rows of the data, each with its place for messages."""
    folder = Path(path).expanduser()
    if is_saved(folder):
        data = load_saved(import_datasets("data=chat"), folder, cfg.split)
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(data))
        return
    for file in find_files(path):
        for number, line in enumerate(read_bytes(file).splitlines(), start=1):
            if line.strip():
                try:
                    yield f"{file}:{number}", json.loads(line)
                except ValueError as error:
                    raise RequestError(f"{file}:{number}: no JSON on this line: {error}") from error


def _messages(row: Any, where: str) -> list[dict[str, Any]]:
    found = row.get(_MESSAGES) if isinstance(row, dict) else None
    if found is None and isinstance(row, dict) and isinstance(other := row.get(_OTHER_MESSAGES), list):
        found = [
            {"role": _ROLES.get(str(one.get("from")), one.get("from")), "content": one.get("value")}
            for one in other
            if isinstance(one, dict)
        ]
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) and "role" in one for one in found):
        raise RequestError(f'{where}: has no messages: give {{"messages": [{{"role": "user", "content": "…"}}, …]}}')
    return found


def _notes(rows: Sequence[tuple[Tokens, Tokens]], cfg: ChatConfig) -> tuple[str, ...]:
    long = sum(len(ids) > cfg.seq_len for ids, _ in rows)
    silent = sum(not learnt[1 : cfg.seq_len].any() for _, learnt in rows)
    notes = []
    if long:
        notes.append(f"{long} of {counted(len(rows), 'conversation')} are cut at data.seq_len={cfg.seq_len} tokens")
    if silent:
        notes.append(f"{silent} of {counted(len(rows), 'conversation')} have no answer to learn and are left out")
    return tuple(notes)
