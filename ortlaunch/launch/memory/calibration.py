"""What earlier runs on this machine have measured, beside what was estimated for them.

One file for the runs of a model, backend, trainer and precision: for each configuration the estimated and the largest
measured peak of a worker. A measurement outside a band widens the band at once. A band becomes narrower only after
runs of many configurations, and only for estimates of about the same size, so that a "fits" stays true.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortlaunch.base.user import user_cache
from ortlaunch.config.candidates import possible
from ortlaunch.config.schema import AutoConfig, Config
from ortlaunch.launch.memory.band import Band
from ortlaunch.launch.memory.cache import count, read_own, write_own
from ortlaunch.launch.memory.question import family_key
from ortlaunch.launch.memory.request import PROBED

ENOUGH = 10
"""Configurations of about the same size that were measured before a band becomes narrower."""
_NEAR = 2.0
"""Estimates are about the same size up to this factor."""
_MARGIN = 0.05
_LARGEST = 1 << 18
_MOST = 200
_FARTHEST = 4.0
"""A measurement that is farther from its estimate than this factor is not of that run."""


@dataclass(frozen=True)
class Correction:
    """What measurements say about one estimate, as factors on its middle figure."""

    runs: int = 0
    """Measured configurations."""
    likely: float = 1.0
    least: float = 1.0
    most: float = 1.0
    narrows: bool = False

    def apply(self, band: Band) -> Band:
        """The band with these measurements in it."""
        if not self.runs:
            return band
        least, most = band.middle * self.least, band.middle * self.most
        middle = int(band.middle * self.likely)
        if self.narrows:
            # The next configuration may be as far outside those measured as they are apart.
            spread = most - least
            low, high = (1 - _MARGIN) * (least - spread), (1 + _MARGIN) * (most + spread)
        else:
            low, high = min(band.low, (1 - _MARGIN) * least), max(band.high, (1 + _MARGIN) * most)
        return Band(min(int(low), middle), middle, max(int(high), middle))


class Calibration:
    """The measurements for one model, backend, trainer and precision on this machine."""

    def __init__(self, points: dict[str, tuple[int, int]], *, may_narrow: bool = True) -> None:
        """
        Args:
            points: the estimated and the measured bytes of a worker for each configuration, by its key.
            may_narrow: whether many of them make a band narrower.
        """
        self._points = points
        self._may_narrow = may_narrow

    @classmethod
    def of(cls, config: Config, *, is_probed: bool = False) -> Calibration:
        """What is known for a run; nothing if the file is missing, foreign or damaged.

        Args:
            config: the run's configuration.
            is_probed: whether the memory of ONNX Runtime and torch.compile was probed. A measurement says how far an
                estimate was from it, and probes are nearer than factors on eager PyTorch's memory.

        With ``backend=auto`` these are the measurements of all backends that it may take. However many runs took the
        smallest one, the next may take another: its band becomes no narrower.
        """
        is_open = isinstance(config.backend, AutoConfig)
        points: dict[str, tuple[int, int]] = {}
        for one in (config, *(possible(config) if is_open else ())):
            points |= _points(read_own(_file(one, is_probed=is_probed), _LARGEST))
        return cls(points, may_narrow=not is_open)

    def near(self, estimated: int) -> Correction:
        """What is known for an estimate of this size.

        Args:
            estimated: likely bytes of the first worker.
        """
        if not self._points:
            return Correction()
        import statistics

        ratios = [measured / predicted for predicted, measured in self._points.values()]
        near = [
            measured / predicted
            for predicted, measured in self._points.values()
            if 1 / _NEAR <= predicted / estimated <= _NEAR
        ]
        if self._may_narrow and len(near) >= ENOUGH:
            return Correction(len(near), statistics.median(near), min(near), max(near), narrows=True)
        return Correction(len(ratios), max(1.0, statistics.median(ratios)), min(ratios), max(ratios))


def learn(config: Config, key: str, estimated: int, measured: int, *, is_probed: bool = False) -> None:
    """Notes what a run has measured. A store that cannot be written notes nothing.

    Args:
        config: the run's configuration.
        key: of its estimate.
        estimated: the likely peak of its first worker without the end of the run, in bytes.
        measured: the largest peak of its workers up to there, in bytes.
        is_probed: whether the backend's memory was probed for the estimate.
    """
    file = _file(config, is_probed=is_probed)
    points = _points(read_own(file, _LARGEST))
    _, before = points.pop(key, (estimated, 0))
    points[key] = (estimated, max(before, measured))
    with suppress(OSError):
        write_own(file, {name: list(point) for name, point in list(points.items())[-_MOST:]})


def _file(config: Config, *, is_probed: bool) -> Path:
    mark = "-probed" if is_probed and config.backend.name in PROBED else ""
    return user_cache() / "measured" / f"{family_key(config)}{mark}.json"


def _points(content: Any) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for key, point in content.items() if isinstance(content, dict) else ():
        with suppress(TypeError, ValueError):
            predicted, measured = map(count, point)
            if 1 / _FARTHEST <= measured / predicted <= _FARTHEST:
                found[key] = (predicted, measured)
    return found
