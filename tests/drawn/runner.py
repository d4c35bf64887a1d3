"""Judges drawn models, each in a process of its own that is forked from one with the libraries imported."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tests.drawn.generator import draw
from tests.drawn.verdict import Verdict

_SECONDS = 120
_ATTEMPTS = 20
_CONTEXT = multiprocessing.get_context("forkserver")
# What is imported before the fork must start no threads: it builds no session.
_CONTEXT.set_forkserver_preload(["tests.drawn.harness"])


def judged(seed: int) -> Verdict:
    """Draws the model of a seed and judges it."""
    return _in_a_process(seed, None, False)


def judged_source(source: str, seed: int, *, is_random: bool) -> Verdict:
    """Judges a model given by its source, on the data of a seed."""
    return _in_a_process(seed, source, is_random)


def judged_all(seeds: Iterable[int]) -> Iterator[tuple[int, Verdict]]:
    """Judges the models of several seeds, as many at a time as there are cores for this process; in order."""
    seeds = list(seeds)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield from zip(seeds, pool.map(judged, seeds), strict=True)


def _in_a_process(seed: int, source: str | None, is_random: bool) -> Verdict:
    folder = Path(tempfile.mkdtemp(prefix="drawn-"))
    ours, theirs = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_child, args=(theirs, folder, seed, source, is_random), daemon=True)
    try:
        process.start()
        theirs.close()
        verdict = Verdict("killed")
        try:
            while ours.poll(_SECONDS):
                verdict = ours.recv()
                if verdict.outcome != "killed":
                    return verdict
        except EOFError:
            process.join(10)
            code = process.exitcode or 0
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return replace(verdict, reason=f"{name}; {_last_line(folder / 'output.txt')}")
        return replace(verdict, reason=f"no answer in {_SECONDS} s")
    finally:
        if process.is_alive():
            process.kill()
        process.join(10)
        shutil.rmtree(folder, ignore_errors=True)


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()] if path.is_file() else []
    return lines[-1][:200] if lines else ""


def _child(answer: Connection, folder: Path, seed: int, source: str | None, is_random: bool) -> None:
    from tests.drawn.harness import judge

    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # As many as the session takes, which is told that the worker's share is one core.
    torch.set_num_threads(1)
    for attempt in range(_ATTEMPTS if source is None else 1):
        drawn = draw(seed, attempt) if source is None else None
        text = drawn.source() if drawn is not None else str(source)
        kinds = drawn.kinds() if drawn is not None else []
        is_random = drawn.is_random if drawn is not None else is_random
        # If this is the last message, the process was killed.
        answer.send(Verdict("killed").about(kinds, text, is_random))
        verdict = judge(text, folder, seed=seed, is_random=is_random)
        if verdict.outcome != "invalid":
            break
    answer.send(verdict.about(kinds, text, is_random))
    answer.close()
    # Sessions and their threads end in the order of the interpreter's choice otherwise.
    os._exit(0)
