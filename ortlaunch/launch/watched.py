"""A process with a time-out and a limit of memory, which counts its descendants too."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from ortlaunch.base.processes import be_first_to_die, die_with_parent

_LOOK_SECONDS = 0.2
_FAMILY_SECONDS = 1.0
"""How often new descendants are looked for, which takes longer than to read the memory of those that are known."""
_GRACE_SECONDS = 10.0
"""How long the process may take to write down the end of what it started, after that was killed."""


End = Literal["by itself", "time-out", "out of memory", "enough"]


@dataclass(frozen=True)
class Watched:
    """How a process ended."""

    ended: End
    code: int
    seconds: float
    peak_bytes: int
    """The largest memory of the process and its descendants together, looked at five times a second."""
    others: float
    """Share of the cores that this process may use which others had meanwhile, from 0 to 1."""


def watch(
    command: Sequence[str],
    log: Path,
    variables: Mapping[str, str],
    limit: int | None,
    timeout: float,
    is_enough: Callable[[], bool] = lambda: False,
) -> Watched:
    """Runs a command to its end, or ends it with all its descendants.

    Args:
        command: the command.
        log: takes its output.
        variables: what is added to the environment.
        limit: bytes that it and its descendants may have together; None for no limit.
        timeout: seconds that it may take.
        is_enough: whether it may end because all that is wanted of it is there. It is then asked to end at once.
    """
    begun, cores, used = time.monotonic(), _core_seconds(), _of_children()
    ended: End = "by itself"
    peak, family, looked = 0, [], 0.0
    own: dict[psutil.Process, float] = {}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **variables},
            # A process group of its own: Ctrl-C in the terminal is for this process, which then ends it.
            start_new_session=True,
            preexec_fn=_prepare,
        )
        try:
            while _still_runs(process):
                if time.monotonic() - looked > _FAMILY_SECONDS:
                    family, looked = _family(process.pid), time.monotonic()
                    own |= _processor_seconds(family)
                    if is_enough():
                        ended = "enough"
                peak = max(peak, _memory(family))
                if limit is not None and peak > limit:
                    ended = "out of memory"
                elif time.monotonic() - begun > timeout:
                    ended = "time-out"
                if ended != "by itself":
                    break
        finally:
            own |= _processor_seconds(_family(process.pid))
            _end(process, in_order=ended == "enough")
    seconds = time.monotonic() - begun
    busy, total = (after - before for after, before in zip(_core_seconds(), cores, strict=True))
    # Who outlives its parent is no child that has ended: a launcher kills torchrun before its workers.
    ours = max(_of_children() - used, sum(own.values()))
    others = max(0.0, busy - ours) / total if total > 0 else 0.0
    return Watched(ended, process.returncode, seconds, peak, min(1.0, others))


def _memory(family: list[psutil.Process]) -> int:
    """Bytes that processes have together. Pages that several share, such as libraries, count once."""
    own, shared = 0, 0
    for one in family:
        with suppress(psutil.Error):
            info = one.memory_info()
            own += info.rss - info.shared
            shared = max(shared, info.shared)
    return own + shared


def _processor_seconds(family: list[psutil.Process]) -> dict[psutil.Process, float]:
    """What each of some processes has had of the processor so far, without its children."""
    found = {}
    for one in family:
        with suppress(psutil.Error):
            times = one.cpu_times()
            found[one] = times.user + times.system
    return found


def _prepare() -> None:
    die_with_parent()
    # The kernel ends a trial and not what else runs here.
    be_first_to_die()


def _still_runs(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_LOOK_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _end(process: subprocess.Popen[bytes], *, in_order: bool) -> None:
    """Ends what still runs.

    Args:
        process: the process.
        in_order: whether to ask it to end. Otherwise its descendants are killed first, so that it can write down how
            they ended.
    """
    if process.poll() is not None:
        return
    beneath = _family(process.pid)[1:]
    if in_order:
        # The second request makes a launcher end its workers at once, without a checkpoint.
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            time.sleep(_LOOK_SECONDS)
    else:
        _kill(beneath)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_SECONDS)
    if process.poll() is None:
        _kill(_family(process.pid))
        process.wait()
    _kill(beneath)


def _family(pid: int) -> list[psutil.Process]:
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.Error:
        return []


def _kill(processes: list[psutil.Process]) -> None:
    for one in processes:
        with suppress(psutil.Error):
            one.kill()


def _core_seconds() -> tuple[float, float]:
    """Busy seconds of the cores that this process may use, and all seconds, since the machine's start.

    Seconds that a hypervisor took count as busy.
    """
    cores, own = psutil.cpu_times(percpu=True), os.sched_getaffinity(0)
    busy = everything = 0.0
    # Where containers hide cores, their numbers do not tell which are there.
    for times in [cores[number] for number in own] if max(own) < len(cores) else cores:
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        busy += total - times.idle - getattr(times, "iowait", 0.0)
        everything += total
    return busy, everything


def _of_children() -> float:
    """Processor seconds of the ended descendants of this process."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
