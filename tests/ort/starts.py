"""Starts of a user's model under ORTModule, each in a process of its own that has the libraries imported already.

Imported by multiprocessing's fork server before it forks: a process then begins where the imports have ended.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ortlaunch.config.schema import OrtConfig
from ortlaunch.ort import session
from ortlaunch.ort.module import cache

session.import_ortmodule()
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])


class Start:
    """A process that has begun."""

    def __init__(self, folder: Path, **arguments: Any) -> None:
        """
        Args:
            folder: has the user's ``net.py`` and takes the exports.
            arguments: see `_train`.
        """
        self._answer, theirs = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(target=_run, args=(theirs, folder, arguments))
        self._process.start()
        theirs.close()

    def end(self) -> dict[str, Any]:
        """Where each export came from, the losses, and the gradients."""
        assert self._answer.poll(200), "no answer"
        answer: dict[str, Any] | str = self._answer.recv()
        self._process.join(20)
        assert isinstance(answer, dict), answer
        return answer


def _run(answer: Connection, folder: Path, arguments: dict[str, Any]) -> None:
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(folder))
    cache.folder = lambda: folder / "exports"  # type: ignore[assignment]
    try:
        with cache.reading():
            answer.send(_train(importlib.import_module("net").Net, folder, **arguments))
    except BaseException as error:
        answer.send(f"{type(error).__name__}: {error}")


def _train(
    net: Any,
    folder: Path,
    *,
    models: int = 1,
    seed: int = 0,
    model: dict[str, Any] | None = None,
    freeze: bool = False,
    cfg: dict[str, Any] | None = None,
    train: bool = True,
    batch: int = 3,
) -> dict[str, Any]:
    """Three forwards, and backwards in train mode, of `models` models one after the other; of the last its figures."""
    result: dict[str, Any] = {}
    for _ in range(models):
        torch.manual_seed(seed)
        made = net(**(model or {}))
        if freeze:
            made.linear.bias.requires_grad_(False)
        ort = session.wrap(made, OrtConfig(**(cfg or {})), threads=1, onnx_dir=folder)
        ort.train(train)
        x = torch.rand(batch, 4)
        losses = []
        for _ in range(3):
            loss = ort(x).sum()
            if ort.training:
                loss.backward()
            losses.append(loss.item())
        grad = [None if p.grad is None else p.grad.tolist() for p in made.parameters()]
        result = {"origins": session.export_origins(ort), "losses": losses, "grad": grad}
    return result
