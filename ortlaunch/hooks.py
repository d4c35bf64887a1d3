"""Hooks that come with ortlaunch: ``train.hooks=[{target: ortlaunch.hooks:SampleText, prompt: "def "}]``."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ortlaunch.base.errors import RequestError
from ortlaunch.data.batch import named
from ortlaunch.models.modes import evaluation
from ortlaunch.models.unwrapped import unwrapped


class SampleText:
    """Continues a prompt by the most likely tokens, and keeps the text as samples/step-N.txt."""

    def __init__(self, prompt: str, every: int = 100, length: int = 64, tokenizer: str = "") -> None:
        """
        Args:
            prompt: how the text begins.
            every: steps between two texts.
            length: tokens after the prompt.
            tokenizer: a folder or name for transformers' AutoTokenizer; empty for data whose tokens are bytes.
        """
        self._prompt, self._every, self._length = prompt, every, length
        self._tokenizer: Any = None
        if tokenizer:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(tokenizer)

    def start(self, run: Any) -> None:
        """Refuses a model whose weights the first worker does not hold."""
        weights = list(unwrapped(run.model).parameters())
        if any(isinstance(one, DTensor) or hasattr(one, "ds_id") for one in weights):
            raise RequestError("SampleText needs whole weights on the first worker: use trainer=ddp or ZeRO 0 to 2")

    def step(self, run: Any) -> None:
        """Writes a text where one is due."""
        if run.step % self._every:
            return
        model = unwrapped(run.model)
        device = next(model.parameters()).device
        start = self._tokenizer.encode(self._prompt) if self._tokenizer else list(self._prompt.encode())
        longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        ids = torch.tensor([start], device=device)
        with evaluation(model), torch.no_grad():
            for _ in range(self._length):
                seen = ids if longest is None else ids[:, -longest:]
                ids = torch.cat([ids, model(input_ids=seen).logits[:, -1:].argmax(-1)], dim=1)
        run.log_text(self._decoded(ids[0].tolist()), f"samples/step-{run.step}.txt")

    def _decoded(self, ids: list[int]) -> str:
        if self._tokenizer is not None:
            return str(self._tokenizer.decode(ids))
        return bytes(one % 256 for one in ids).decode(errors="replace")


class Unfreeze:
    """Trains parts of the model from a step of their own on: ``parts: [{match: "layers.0.*", steps: 200}]``."""

    everywhere = True

    def __init__(self, parts: list[dict[str, Any]]) -> None:
        """
        Args:
            parts: each a pattern of parameter names, `match`, and `steps`, the number of steps without them.
        """
        if any(set(part) != {"match", "steps"} for part in parts):
            raise RequestError(f"Unfreeze: parts={parts}: write [{{match: 'layers.0.*', steps: 200}}]")
        self._at = [(str(part["match"]), int(part["steps"])) for part in parts]

    def start(self, run: Any) -> None:
        """Freezes what is not yet due."""
        for match, step in self._at:
            if run.step < step:
                run.freeze(match)

    def step(self, run: Any) -> None:
        """Unfreezes what is due."""
        for match, step in self._at:
            if run.step == step:
                run.unfreeze(match)


class Pictures:
    """Keeps the first images of a micro-batch side by side, as pictures/step-N.png: what the model is really given."""

    def __init__(self, every: int = 100, count: int = 8) -> None:
        """
        Args:
            every: steps between two pictures.
            count: images of a picture.
        """
        self._every, self._count = every, count

    def step(self, run: Any) -> None:
        """Writes a picture where one is due."""
        if run.step % self._every:
            return
        images = next((one for one in named(run.batch).values() if one.ndim == 4 and one.is_floating_point()), None)
        if images is None:
            raise RequestError("Pictures needs batches with images, of the shape (samples, channels, height, width)")
        shown = images[: self._count].float()
        least, most = shown.amin(), shown.amax()
        shown = (shown - least) / (most - least).clamp(min=1e-12)
        run.log_image(torch.cat(list(shown), dim=-1), f"pictures/step-{run.step}.png")
