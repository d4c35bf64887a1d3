"""A backend's memory by two probes, which are kept: the peak of each phase as a line in the micro-batch.

ONNX Runtime and torch.compile decide themselves what they keep, so their memory cannot be traced.

Each probe is a process of its own (`ortlaunch.estimate.probe`) with a memory limit and a time limit. What it has
measured is kept in the user's cache for the model, all keys but the micro-batch, the machine and the versions.
"""

from __future__ import annotations

import hashlib
import json
import platform
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ortlaunch.base import files
from ortlaunch.base.errors import RequestError
from ortlaunch.base.free_memory import available
from ortlaunch.base.ownership import why_foreign
from ortlaunch.base.private_folder import PrivateFolder
from ortlaunch.base.programs import module_command
from ortlaunch.base.reading import parse_json, read_bytes
from ortlaunch.base.user import user_cache
from ortlaunch.config.load import save_config
from ortlaunch.config.schema import Config
from ortlaunch.estimate.band import MIB, Band
from ortlaunch.estimate.pretend import threads_of
from ortlaunch.estimate.probe import REQUEST, Peak
from ortlaunch.estimate.probe_key import key_of
from ortlaunch.launch.report_process import REFUSED, REPORT

Points = dict[int, dict[str, Peak]]
"""The peak of each phase, by the micro-batch."""

_SHARE = 0.7
"""Share of the free memory that a probe may take; other processes may need some meanwhile."""
_SECONDS = 240
"""The most processor time of one probe. An export of GPT-2 (124M) takes some half a minute."""
_WAIT = 900
"""The longest wait for one probe in seconds, on a machine with much other work."""
_HALVINGS = 3
"""How often a micro-batch that does not fit into the free memory is halved."""
_NEAR = 2
"""A micro-batch is near the probed ones from half of the smallest to this many times the largest."""
_SPREAD = 0.08
"""How far a run may be from its own probe; docs/estimate.md has what was measured."""
_CHANCE = 64 * MIB
"""How much more or less beside that, whatever the size: twelve runs of one small configuration took 578 to 700 MiB."""
_SPREAD_OF_SLOPE = 0.3
"""How far a line may be off per byte beyond a probe: ONNX Runtime's arena grows in powers of two."""
_LARGEST, _MOST_POINTS, _MOST_BYTES = 1 << 16, 8, 2**50


class Line:
    """The memory of a worker by the micro-batch."""

    def __init__(self, points: Points) -> None:
        """
        Args:
            points: at least two probed micro-batches, with the same phases.
        """
        self._points = points

    @property
    def sizes(self) -> tuple[int, ...]:
        """The probed micro-batches."""
        return tuple(sorted(self._points))

    def is_near(self, size: int) -> bool:
        """Whether a micro-batch is between the probed ones or not far from them."""
        return min(self._points) <= _NEAR * size and size <= _NEAR * max(self._points)

    def bands(self, size: int, beside: int) -> dict[str, Band]:
        """The memory of each phase with a micro-batch.

        Args:
            size: the micro-batch.
            beside: bytes that a worker holds and a probe does not.
        """
        return {phase: self._band(phase, size, beside) for phase in self._points[self.sizes[0]]}

    def _band(self, phase: str, size: int, beside: int) -> Band:
        peaks = {one: phases[phase] for one, phases in self._points.items()}
        least, below = self._at(size, {one: peak.least for one, peak in peaks.items()})
        middle, spread = self._at(size, {one: peak.likely for one, peak in peaks.items()})
        most, above = self._at(size, {one: peak.most for one, peak in peaks.items()})
        low, high = min(least - below, middle - spread), max(most + above, middle + spread)
        return Band(beside + max(0, low), beside + middle, beside + high)

    @staticmethod
    def _at(size: int, known: Mapping[int, int]) -> tuple[int, int]:
        """The bytes with a micro-batch by those with others, and how much more or less they may be."""
        first, second = sorted(known, key=lambda one: (abs(one - size), one))[:2]
        # A larger micro-batch does not need less; what is measured so is noise.
        slope = max(0.0, (known[second] - known[first]) / (second - first))
        found = max(0, int(known[first] + slope * (size - first)))
        return found, int(_SPREAD * found + _SPREAD_OF_SLOPE * abs(found - known[first])) + _CHANCE


def line_of(config: Config, workers: int, nodes: int, *, may_probe: bool) -> Line | None:
    """The line of a configuration by the probes that are kept; others are made where they are too far.

    Args:
        config: the run's configuration, with ``backend=ort`` or ``backend=compile``.
        workers: workers on each machine.
        nodes: machines.
        may_probe: whether to start probes.

    Returns:
        None if no probes are kept and none may be started.

    Raises:
        RequestError: a probe was refused, failed or took too long.
    """
    file = _file(config, workers, nodes)
    known = _points(_read(file))
    line = Line(known) if len(known) > 1 else None
    if not may_probe or (line is not None and line.is_near(config.train.batch_size)):
        return line
    known |= _probed_twice(config, workers * nodes, threads_of(config, workers))
    kept = {str(size): known[size] for size in sorted(known)[-_MOST_POINTS:]}
    with suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.replace(file, json.dumps(kept).encode(), files.PRIVATE)
    return Line(known)


def _probed_twice(config: Config, world_size: int, threads: int) -> Points:
    """The probes of the run's micro-batch and of another; both are halved while the larger one does not fit.

    Raises:
        RequestError: a probe was refused, failed or took too long.
    """
    size = config.train.batch_size
    for left in range(_HALVINGS, -1, -1):
        try:
            large = max(2, size)
            found = {large: _probed(config, large, world_size, threads)}
            return found | _probed_beside(config, large, world_size, threads)
        except NoMemoryError:
            if left == 0 or size < 2:
                raise
            size //= 2
    raise AssertionError("the last round returns or raises")


def _probed_beside(config: Config, large: int, world_size: int, threads: int) -> Points:
    """The probe of half of a micro-batch; of twice as much where one sample cannot train, as in batch normalization.

    Raises:
        RequestError: a probe was refused, failed or took too long.
    """
    half = large // 2
    try:
        return {half: _probed(config, half, world_size, threads)}
    except NoMemoryError:
        raise
    except RequestError:
        if half > 1:
            raise
    return {2 * large: _probed(config, 2 * large, world_size, threads)}


class NoMemoryError(RequestError):
    """A probe needs more memory than is free."""


def _probed(config: Config, size: int, world_size: int, threads: int) -> dict[str, Peak]:
    """The peak of each phase with a micro-batch, measured in a process of its own.

    Raises:
        NoMemoryError: the process needs more than its limit.
        RequestError: the probe was refused, failed or took too long.
    """
    most = int(_SHARE * available())
    config = replace(config, train=replace(config.train, batch_size=size))
    with PrivateFolder("probe") as folder:
        save_config(config, folder / "config.yaml")
        limits = {"most_bytes": most, "most_seconds": _SECONDS}
        request = {"world_size": world_size, "threads": threads, **limits}
        (folder / REQUEST).write_text(json.dumps(request))
        log = folder / "probe.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*module_command("ortlaunch.estimate.probe"), str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
            try:
                code = process.wait(_WAIT)
            except subprocess.TimeoutExpired:
                raise RequestError(f"micro-batch {size} was not done after {_WAIT} s") from None
            finally:
                process.kill()
                process.wait()
        if code == -signal.SIGXCPU:
            raise RequestError(f"micro-batch {size} takes more than {_SECONDS} s of processor time")
        with suppress(OSError, ValueError):
            return _phases(json.loads((folder / REPORT).read_text()))
        refused = folder / REFUSED
        reason = refused.read_text() if refused.is_file() else log.read_text(errors="replace")
    text = " ".join(reason.split())[-300:] or f"exit code {code}"
    if code < 0 or any(sign in text for sign in ("MemoryError", "allocate", "bad_alloc")):
        raise NoMemoryError(f"micro-batch {size} does not fit into {most / 2**30:.1f} GiB: {text}")
    raise RequestError(f"micro-batch {size}: {text}")


def _file(config: Config, workers: int, nodes: int) -> Path:
    """Where the probes of a configuration are kept, whatever its micro-batch."""
    one = replace(config, train=replace(config.train, batch_size=1))
    facts = [key_of(one, workers, nodes), platform.node(), platform.machine(), platform.libc_ver()]
    return user_cache() / "probes" / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]}.json"


def _read(path: Path) -> object:
    """The JSON in a file that only the user can have written; None if it is missing, foreign or damaged."""
    if why_foreign(path.parent) is not None or why_foreign(path) is not None:
        return None
    try:
        return parse_json(read_bytes(path, _LARGEST, follow=False))
    except (OSError, ValueError):
        return None


def _points(content: object) -> Points:
    """The probes in a file; none if it is damaged."""
    if not isinstance(content, Mapping):
        return {}
    found: Points = {}
    with suppress(TypeError, ValueError):
        found = {int(size): _phases(one) for size, one in content.items() if int(size) > 0}
    names = {tuple(sorted(one)) for one in found.values()}
    return found if len(names) == 1 else {}


def _phases(content: object) -> dict[str, Peak]:
    if not isinstance(content, Mapping) or not content:
        raise ValueError("these are no phases")
    return {str(name): Peak(*map(_count, sizes)) for name, sizes in content.items()}


def _count(value: object) -> int:
    if type(value) is not int or not 0 < value < _MOST_BYTES:
        raise ValueError(f"{value!r} is no number of bytes")
    return value
