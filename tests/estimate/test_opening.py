"""What a worker holds without a model: what opening the data takes, and threads."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.estimate import traces
from ortlaunch.estimate.band import OPENING
from ortlaunch.estimate.ledger import Use
from ortlaunch.estimate.pretend import threads_of
from ortlaunch.estimate.request import Request
from ortlaunch.estimate.trace import Parts, Trace

MIB = 2**20


@pytest.fixture(autouse=True)
def nothing_to_free() -> None:
    """What other tests have left in this process is given back before a test measures it, and not meanwhile."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


@pytest.mark.parametrize("size", [1, 160])
def test_what_opening_the_data_gives_back_is_counted_beside_what_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(traces, "trace", lambda *_, **__: Trace(Parts(0, 0, 0, 0, 0), {"step": Use(0, 0)}))

    def opened(folder: Path, length: int) -> Trace:
        folder.mkdir()
        for name in ("a.txt", "b.txt"):
            # Both are in memory when they are joined. The allocator gives such blocks back, unless other tests have
            # left a hole as large in the heap of this process.
            (folder / name).write_bytes(b"x" * length)
        # Few samples, whose order is in memory too.
        data = ("data=text", f"data.path={folder}", "data.seq_len=8192")
        words = ("model=gpt2_nano", *data, "trainer=single", "backend=eager", "device=cpu")
        traces._take_peak()
        try:
            return traces.Traces(to_config(compose(list(words))), Request(1, 1, None, "", True)).asked()
        finally:
            dist.destroy_process_group()

    opened(tmp_path / "small", MIB // 8)  # It imports what the data needs, which would count too.
    gc.collect()
    found = opened(tmp_path / "measured", size * MIB)
    assert list(found.phases) == [OPENING, "step"]
    assert 2 * size - 12 < found.phases[OPENING].tensors / MIB < 2 * size + 12


def asked() -> tuple[traces.Traces, int]:
    """Traces an mlp in this process; returns how much that has added to the process without tensors, in bytes."""
    words = ("model=mlp", "trainer=single", "backend=eager", "device=cpu")
    try:
        found = traces.Traces(to_config(compose(list(words))), Request(1, 1, None, "", True))
        before = found._process_base()
        found.asked()
    finally:
        dist.destroy_process_group()
    return found, found.base - before


def test_what_a_trace_has_freed_is_no_part_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
    malloc.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    size, block = 256, 2**16  # Much beside what this process may need meanwhile; blocks of the heap.

    def traced(*_: Any, **__: Any) -> Trace:
        blocks = [malloc(block) for _ in range(size * MIB // block)]
        for one in blocks:
            ctypes.memset(one, 1, block)
        above.append(malloc(2 * block))  # The heap's end, which glibc would give back, is above this one.
        for one in blocks:
            free(one)
        return Trace(Parts(0, 0, 0, 0, 0), {"step": Use(0, 0)})

    above: list[int] = []
    monkeypatch.setattr(traces, "trace", traced)
    try:
        _, added = asked()
    finally:
        for one in above:
            free(one)
    assert added < size // 2 * MIB


def test_a_model_that_cannot_be_traced_is_told_by_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def traced(*_: Any) -> Trace:
        raise ValueError("needs\ncontent")

    monkeypatch.setattr(traces, "trace", traced)
    with pytest.raises(traces.UntraceableError, match=r"^ValueError: needs content$"):
        asked()


@pytest.mark.parametrize(("workers", "threads"), [(1, 64), (3, 21), (100, 1)])
def test_a_worker_has_its_share_of_the_nodes_cores(workers: int, threads: int) -> None:
    words = ["model=mlp", "launcher=slurm", "launcher.cpus_per_node=64", "trainer=ddp", "device=cpu"]
    assert threads_of(to_config(compose(words)), workers) == threads
