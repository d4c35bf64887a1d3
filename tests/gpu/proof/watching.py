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
_NONE = "none"
_WATCHED = {
    "DDP": _NONE,
    "FSDP2": _NONE,
    "DeepSpeed ZeRO 1": "none but those of DeepSpeed itself, which decides on the host whether it steps",
}
"""The trainers, and what is expected of each."""


def rows(proof: Proof) -> Iterator[Row]:
    """The profile of memory, and host syncs by trainer."""
    checks = [Check("+profile=memory", "a snapshot of the allocator for each worker", lambda: _profile(proof))]
    checks += [
        Check(f"host syncs off log steps, {name}", expected, lambda name=name: _syncs(proof, name))
        for name, expected in _WATCHED.items()
    ]
    yield from proof.judge(checks, together=True)


def _profile(proof: Proof) -> str:
    proof.needs_cuda("+profile=memory looks at the GPU")
    run = proof.train(*PROFILED)
    sizes = {path.name: path.stat().st_size for path in sorted(run.run_dir.glob("profile/memory-rank-*.pickle"))}
    if len(sizes) != proof.workers or not all(sizes.values()):
        raise Failed(f"snapshots: {sizes}")
    return ", ".join(f"{name} of {size / 2**20:.1f} MiB" for name, size in sizes.items())


def _syncs(proof: Proof, trainer: str) -> str:
    first = next(iter(_WATCHED))
    if trainer != first:
        proof.needs_cuda(f"the CPU has no such count; that the watch is in place, {first} shows")
    run = proof.train(*WATCHED, *TRAINERS[trainer])
    seen = [syncs_of(run, rank) for rank in range(proof.workers)]
    steps, lines = seen[0][0], sum((lines for _, lines in seen), Counter[str]())
    if not proof.is_cuda:
        raise NotPossible(f"the CPU has no such count; the watch was in place for {steps} steps")
    return judged_syncs(steps, lines, may_be_deepspeeds=_WATCHED[trainer] is not _NONE)


def judged_syncs(steps: int, lines: Counter[str], *, may_be_deepspeeds: bool) -> str:
    """Says how often the host waited, and where.

    Args:
        steps: that were watched.
        lines: how often which line waited, as ``module:line``.
        may_be_deepspeeds: whether DeepSpeed's own lines may wait.

    Raises:
        Failed: another line waited.
    """
    where = ", ".join(f"{line} ({count})" for line, count in lines.most_common(5))
    text = f"{lines.total()} in {steps} steps off log steps" + (f": {where}" if where else "")
    if any(not (may_be_deepspeeds and line.startswith("deepspeed.")) for line in lines):
        raise Failed(text)
    return f"{text}; a planted one was counted"


def syncs_of(run: Training, rank: int) -> tuple[int, Counter[str]]:
    """Reads what `tests.gpu.watched_syncs` counted in a worker.

    Returns:
        The number of steps that it watched, and how often which line of Python waited, as ``module:line``.

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
