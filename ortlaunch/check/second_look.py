"""Repeats the first steps of a process that a signal has ended, and notes each operator before it is computed.

``python -m ortlaunch.check.second_look FOLDER`` reads ``FOLDER/config.yaml`` and notes in ``FOLDER/operator.json``.
First PyTorch computes outputs and gradients of some batches, then ONNX Runtime. If this process ends as the first one
has, the note says in which operator. `ortlaunch.launch.second_look` starts it and reads the note.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ortlaunch.base.errors import RequestError
from ortlaunch.base.modules import add_working_folder
from ortlaunch.base.note import Note
from ortlaunch.base.own_code import report_deaths
from ortlaunch.base.processes import die_with_parent
from ortlaunch.config.devices import resolve_device
from ortlaunch.config.load import load_config
from ortlaunch.config.schema import Config, Fallback, OrtConfig, OrtLogLevel
from ortlaunch.launch.second_look import EXPORT, NOTE, ORT, PYTORCH
from ortlaunch.models.task import Batch
from ortlaunch.ort import session
from ortlaunch.ort.verify.reference import TORCH_FOLDER, SourceLine
from ortlaunch.ort.verify.start import FRESH_BATCHES
from ortlaunch.ort.verify.state import copied
from ortlaunch.ort.verify.trace import location, statement_at
from ortlaunch.trainer.engines.torch_engine import TorchEngine
from ortlaunch.trainer.prepare import construct_seeded, first_batches, task_of
from ortlaunch.trainer.workers import single_worker

_OUR_FOLDER = str(Path(__file__).parents[1])
_Told = Callable[..., None]


class _Operators(TorchDispatchMode):
    """Tells of each operator of PyTorch before it is computed."""

    def __init__(self, tell: _Told) -> None:
        super().__init__()
        self._tell = tell
        self.is_backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The backward has no line in the model.
        place = ("", 0) if self.is_backward else _asking_place()
        where = {"location": location(place), "statement": statement_at(*place)} if place[0] else {}
        self._tell(operator=str(func.name()), **where)
        return func(*args, **(kwargs or {}))


def _asking_place() -> SourceLine:
    """Returns the innermost line outside torch and this package that leads to an operator, if there is one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((TORCH_FOLDER, _OUR_FOLDER)):
        frame = frame.f_back
    # Below are Python's own modules, which have started this one.
    if frame is None or frame.f_code.co_filename.startswith("<frozen"):
        return "", 0
    return frame.f_code.co_filename, frame.f_lineno


def look(config: Config, threads: int, write: Callable[[bytes], None]) -> None:
    """Trains a few batches in PyTorch and under ONNX Runtime, with notes.

    Args:
        config: of the run, with an OrtConfig as its backend.
        threads: number of threads of a worker.
        write: takes a line of JSON before each operator.
    """
    assert isinstance(config.backend, OrtConfig)
    worker = single_worker(resolve_device(config.device), threads)
    model = construct_seeded(config)
    batches = first_batches(config, config.train.batch_size, 1 + FRESH_BATCHES, model, worker.device)
    model.to(worker.device)
    task = task_of(config, model, batches[0])
    precision = TorchEngine(model, config, worker, task).precision_context

    def train(one: torch.nn.Module, batch: Batch, operators: _Operators | None) -> None:
        with precision():
            loss = task.loss(one, copied(batch))
        if operators is not None:
            operators.is_backward = True
        if loss.requires_grad:
            loss.backward()

    def tell_of(during: str) -> _Told:
        return lambda **facts: write(json.dumps({"during": during, **facts}).encode())

    plain = copy.deepcopy(model)
    for batch in batches:
        with _Operators(tell_of(PYTORCH)) as operators:
            train(plain, batch, operators)
    tell_of(EXPORT)()
    debug = dataclasses.replace(config.backend.debug, save_onnx=False, log_level=OrtLogLevel.info)
    # With this level the exporter keeps the line that each node comes from.
    backend = dataclasses.replace(config.backend, fallback=Fallback.error, export_cache=False, debug=debug)
    session.import_ortmodule()
    from ortlaunch.ort import marks

    with marks.noted(lambda line: write(line.replace(b"{", f'{{"during": "{ORT}", '.encode(), 1))):
        wrapped = session.wrap(model, backend, threads=threads, onnx_dir=None)
        for batch in batches:
            train(wrapped, batch, None)


def main() -> None:
    """Looks at the configuration in the folder."""
    die_with_parent()
    report_deaths()
    add_working_folder()
    folder = Path(sys.argv[1])
    note = Note(folder / NOTE)
    try:
        look(load_config(folder / "config.yaml"), int(os.environ["OMP_NUM_THREADS"]), note.write)
    except RequestError as error:
        print(error, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
