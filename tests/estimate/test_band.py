"""Verdicts, bands, and sizes of memory."""

from __future__ import annotations

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.estimate.band import (
    Band,
    by_trials,
    compilers_of,
    loaders_of,
    phase_band,
    times,
    total,
    verdict,
    worst,
)
from ortlaunch.launch.limits import parsed

GIB = 2**30


@pytest.mark.parametrize(
    ("limit", "word"),
    [(None, "unknown"), (120, "fits"), (119, "tight"), (90, "tight"), (89, "does not fit")],
)
def test_the_verdict_asks_for_the_whole_band(limit: int | None, word: str) -> None:
    assert verdict(Band(90, 100, 120), limit) == word


@pytest.mark.parametrize("backend", ["eager", "compile", "ort"])
def test_a_band_is_in_order(backend: str) -> None:
    band = phase_band(backend, GIB, 2 * GIB)
    assert GIB < band.low <= band.middle <= band.high
    # What is there by chance alone proves nothing, and may be there.
    by_chance = phase_band(backend, GIB, 2 * GIB, is_sure=False)
    assert by_chance.low == phase_band(backend, GIB, 0).low
    assert (by_chance.middle, by_chance.high) == (band.middle, band.high)


def test_small_processes_and_gathered_weights_have_room() -> None:
    # Of a worker of 400 MiB, 30 MiB more than the likely figure were measured, and 22 less of one of 399.
    small = phase_band("eager", 400 * 2**20, 0)
    assert min(small.high - small.middle, small.middle - small.low) > 30 * 2**20
    # What gloo's threads have gathered stays in their heaps.
    plain, gathering = (phase_band("eager", GIB, GIB, gathers=gathers) for gathers in (False, True))
    assert gathering.low == plain.low
    assert gathering.middle > plain.middle and gathering.high > plain.high
    # Number 1 of seed 0 in a run of 20 steps: 789 MiB a worker.
    assert phase_band("eager", 399 * 2**20, 198 * 2**20).high > 789 * 2**20


@pytest.mark.parametrize(("size", "middle", "off"), [(16, 260, 64 + 0.08 * 260), (12, 220, 64 + 0.08 * 220 + 0.3 * 40)])
def test_a_line_goes_through_its_trials_and_is_surest_there(size: int, middle: int, off: float) -> None:
    mib = 2**20
    band = by_trials([(8, 180 * mib), (16, 260 * mib)], size)
    assert band.middle == middle * mib
    assert band.high - band.middle == band.middle - band.low == pytest.approx(off * mib, rel=1e-5)
    by_chance = by_trials([(8, 180 * mib), (16, 260 * mib)], size, chance=mib)
    assert (by_chance.low, by_chance.high) == (band.low - mib, band.high + mib)


def test_a_larger_micro_batch_never_needs_less() -> None:
    assert by_trials([(1, 500), (2, 490)], 64).middle == 490


def test_loader_processes_keep_one_copy_of_what_their_worker_changes() -> None:
    assert loaders_of([], 0) == Band(0, 0, 0)
    one, two = loaders_of([GIB], GIB // 4), loaders_of([GIB, GIB], GIB // 4)
    assert (one.low, one.middle, two.low, two.middle) == (GIB, GIB + GIB // 4, 2 * GIB, 2 * GIB + GIB // 4)
    assert 0 < one.high - one.middle == (two.high - two.middle) / 2


@pytest.mark.parametrize("names", [["eager"], ["ort"], ["eager", "ort"]])
def test_without_torch_compile_there_are_no_compilers(names: list[str]) -> None:
    assert compilers_of(names, 4) == Band(0, 0, 0)


def test_compilers_may_all_be_spared_and_are_beside_every_worker() -> None:
    one, four = compilers_of(["eager", "compile"], 1), compilers_of(["compile"], 4)
    # Kernels that are kept from an earlier run are not compiled again.
    assert one.low == four.low == 0
    assert 0 < one.middle <= one.high and four == times(one, 4)


def test_the_worst_phase_covers_the_others() -> None:
    name, band = worst({"build": Band(5, 6, 20), "step": Band(9, 10, 11)})
    assert (name, band) == ("step", Band(9, 10, 20))
    assert times(band, 3) == total([band] * 3) == Band(27, 30, 60)


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 * GIB), ("80G", 80 * GIB), ("1.5 gb", GIB + GIB // 2), ("512", 512 * 2**20)]
)
def test_sizes_are_read_as_slurm_reads_them(text: str, size: int) -> None:
    assert parsed(text, "--memory") == size


@pytest.mark.parametrize("text", ["8", "80 "])
def test_a_number_without_a_unit_that_no_machine_has_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match=f"^--memory={text}: a number without a unit is in MiB.*{text.strip()}G if"):
        parsed(text, "--memory")


@pytest.mark.parametrize("text", ["", "0", "lots", "-1GiB", "1 PiB", "GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="not a size of memory; write 80GiB"):
        parsed(text, "--memory")
