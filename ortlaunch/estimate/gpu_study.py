"""What an estimate says about the memory of a worker's GPU, and what could be changed about the run."""

from __future__ import annotations

from collections.abc import Sequence

from ortlaunch.estimate.band import Band, any_of, gpu_band, worst
from ortlaunch.estimate.study import Found, Study

_NO_BAND = Band(0, 0, 0)


class GpuStudy(Study):
    """Judges the memory of a worker's GPU: each worker has one for itself."""

    def _find_lines(self) -> None:
        """Nothing is probed: this machine need not have the GPU."""
        self._why_no_line = "and none are taken on a GPU"

    def _bands_in(self, found: Found, names: Sequence[str]) -> dict[str, Band]:
        phases = found.trace.to_json()["phases"]
        return {name: any_of([gpu_band(one, phases[name]) for one in self._backends]) for name in names}

    def _machine(self, found: Found) -> Band:
        """The memory of the GPU that needs the most."""
        return worst(self._bands(found, is_first=True))[1]

    @property
    def _compilers(self) -> Band:
        return _NO_BAND

    @property
    def _loaders(self) -> Band:
        return _NO_BAND
