"""What is watched on a GPU: the allocator, and whether the host waits for the device between log steps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

from tests.gpu.proof.numbers import SMALL, TRAINERS
from tests.gpu.proof.proof import Check, Failed, NotPossible, Proof, Training
from tests.gpu.proof.report import Row

WATCHED = (*SMALL, "train.steps=40", "train.log_every=10", "model.imports=[tests.gpu.watched_syncs]")
"""A run of forty steps, of which 1, 3, 10, 20, 30 and 40 are log steps, with each wait of the host counted."""
PROFILED = (*SMALL, "trainer=ddp", "+profile=memory", "profile.start=5", "profile.steps=5")
_TRAINERS = ("DDP", "FSDP2", "DeepSpeed ZeRO 1")


def rows(proof: Proof) -> Iterator[Row]:
    """The profile of memory, and host syncs by trainer."""
    checks = [Check("+profile=memory", "a snapshot of the allocator for each worker", lambda: _profile(proof))]
    checks += [
        Check(f"host syncs off log steps, {name}", "none", lambda name=name: _syncs(proof, *TRAINERS[name]))
        for name in _TRAINERS
    ]
    yield from proof.judge(checks, together=True)


def _profile(proof: Proof) -> str:
    proof.needs_cuda("+profile=memory looks at the GPU")
    run = proof.train(*PROFILED)
    sizes = {path.name: path.stat().st_size for path in sorted(run.run_dir.glob("profile/memory-rank-*.pickle"))}
    if len(sizes) != proof.workers or not all(sizes.values()):
        raise Failed(f"snapshots: {sizes}")
    return ", ".join(f"{name} of {size / 2**20:.1f} MiB" for name, size in sizes.items())


def _syncs(proof: Proof, *trainer: str) -> str:
    if trainer != TRAINERS[_TRAINERS[0]]:
        proof.needs_cuda(f"the CPU has no such count; that the watch is in place, {_TRAINERS[0]} shows")
    seen = [syncs_of(proof.train(*WATCHED, *trainer), rank) for rank in range(proof.workers)]
    steps, lines = seen[0][0], sum((lines for _, lines in seen), Counter[str]())
    if not proof.is_cuda:
        raise NotPossible(f"the CPU has no such count; the watch was in place for {steps} steps")
    text = f"{lines.total()} in {steps} steps off log steps"
    if lines:
        raise Failed(f"{text}: " + ", ".join(f"{line} ({count})" for line, count in lines.most_common(5)))
    return f"{text}; a planted one was counted"


def syncs_of(run: Training, rank: int) -> tuple[int, Counter[str]]:
    """Reads what `tests.gpu.watched_syncs` counted in a worker.

    Returns:
        The number of steps that it watched, and how often which line of Python waited.

    Raises:
        Failed: it did not watch, or did not notice the wait that it made itself.
    """
    path = run.folder / f"syncs-rank-{rank}.json"
    if not path.is_file():
        raise Failed(f"worker {rank} was not watched")
    found = json.loads(path.read_text())
    if not found["steps"] or found["planted"] is False:
        raise Failed(f"the watch does not work: {found}")
    return found["steps"], Counter(found["lines"])
