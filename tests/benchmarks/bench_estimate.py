"""How near `ortlaunch estimate` is to the memory of real runs: ``python -m tests.benchmarks.bench_estimate``.

Configurations are drawn by a seed (`tests.benchmarks.estimate_draws`), trained for three steps and estimated. What was
measured is the largest resident memory of each worker, as the kernel counts it (``VmHWM``), summed over all workers; a
measurement that has missed a worker is repeated and never counted. The estimates have a cache of their own, so that no
earlier run corrects them.

A verdict is judged beside limits near what was measured: "fits" under a limit below it is false, and so is "does not
fit" under a limit that is not. The last two lines judge by every limit there is: a high figure below what was measured
would be a false "fits" under some limit, a low one above it a false "does not fit".

``ORTLAUNCH_ESTIMATE_COUNT`` (24), ``ORTLAUNCH_ESTIMATE_SEED`` (0) and ``ORTLAUNCH_ESTIMATE_FIRST`` (0) choose what is
drawn. ``ORTLAUNCH_ESTIMATE_RECORD=FILE`` keeps each result at once as a line of JSON, and a later call goes on where
the file ends. ``ORTLAUNCH_ESTIMATE_LATER=1`` only measures, and a later call estimates what is in the file.
``ORTLAUNCH_ESTIMATE_JOBS=2`` takes two configurations at a time: much of one is start-up, which leaves cores idle, and
the memory of a worker does not depend on what runs beside it. ``ORTLAUNCH_ESTIMATE_AGAIN=1`` estimates the runs of the
file again, by the present code, and measures nothing; ``ORTLAUNCH_ESTIMATE_ONLY=WORD,WORD`` takes configurations that
have one of these words.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from ortlaunch.launch.memory.band import Band, verdict
from tests.benchmarks.estimate_draws import MODELS, draw, make_models

_MIB = 2**20
_SECONDS = 0.02
_MOST_SECONDS = 900
_FILE = threading.Lock()
"""Held while a result is added to the file."""
LIMITS = (0.8, 0.9, 1.0, 1.1, 1.25)
"""Limits, as shares of what was measured."""

Result = dict[str, Any]
"""``number``, ``words``, ``measured`` bytes by rank, and of the estimate ``low``, ``peak``, ``high`` and ``report``.
Without an estimate ``refused`` says why, and without a measurement ``failed`` does."""


def main() -> None:
    """Draws, measures, estimates and prints."""
    count, seed, first = (_number(name, default) for name, default in (("COUNT", 24), ("SEED", 0), ("FIRST", 0)))
    record = os.environ.get("ORTLAUNCH_ESTIMATE_RECORD")
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(record) if record else Path(temporary) / "record.jsonl"
        here = Path(f"{file}.d")
        make_models(here / "models")
        results = _results(file, [(number, draw(seed, number)) for number in range(first, first + count)], here)
    print("\n".join(summary(results)))


def _number(name: str, default: int) -> int:
    return int(os.environ.get(f"ORTLAUNCH_ESTIMATE_{name}", default))


def _results(file: Path, drawn: Sequence[tuple[int, tuple[str, ...]]], here: Path) -> list[Result]:
    """The results of these configurations: those in the file, and others, which are added to it."""
    known = _read(file)
    only = set(filter(None, os.environ.get("ORTLAUNCH_ESTIMATE_ONLY", "").split(",")))
    print(f"{'low':>6} {'likely':>6} {'high':>6} {'real':>6} {'error':>7}  configuration   (MiB, all workers)")
    wanted = [one for one in drawn if not only or only & set(one[1])]
    with ThreadPoolExecutor(_number("JOBS", 1)) as jobs:
        # In their order, whichever is done first.
        results = jobs.map(lambda one: _result(*one, known.get(" ".join(one[1])), partial(_keep, file), here), wanted)
        found = []
        for result in filter(None, results):
            print(line(result) if _is_judged(result) else f"  measured: {result['words']}", flush=True)
            found.append(result)
    return [one for one in found if _is_judged(one)]


def _result(
    number: int, words: tuple[str, ...], known: Result | None, keep: Callable[[Result], None], here: Path
) -> Result | None:
    """The result of a configuration, each new part of which is kept at once; None for one that is not to be measured.

    Args:
        number: its number.
        words: its words.
        known: what the file has.
        keep: adds a result to the file.
        here: the folder with the models.
    """
    again, later = _number("AGAIN", 0) != 0, _number("LATER", 0) != 0
    if known is None and again:
        return None
    result = known
    if result is None:
        result = _measured(number, words, here)
        keep(result)
    if "measured" in result and (again or not (later or _is_judged(result))):
        result = _estimated(result, words, here)
        keep(result)
    return result


def _is_judged(result: Result) -> bool:
    """Whether nothing of a result is left to find out."""
    return bool({"peak", "refused", "failed"} & set(result))


def _keep(file: Path, result: Result) -> None:
    """Adds a line to the file."""
    with _FILE:
        before = file.read_bytes() if file.is_file() else b""
        # An interruption may have cut the last line.
        end = "\n" if before and not before.endswith(b"\n") else ""
        with file.open("a") as stream:
            stream.write(f"{end}{json.dumps(result)}\n")


def _read(file: Path) -> dict[str, Result]:
    """The last result of each configuration, by its words. A line that an interruption has cut is left out."""
    found: dict[str, Result] = {}
    for text in file.read_text().splitlines() if file.is_file() else ():
        try:
            result = json.loads(text)
        except ValueError:
            continue
        found[result["words"]] = result
    return found


def line(result: Result) -> str:
    """A configuration and its figures in MiB."""
    if "failed" in result or "refused" in result:
        name = "failed" if "failed" in result else "refused"
        return f"  {name}: {result['words']}: {result[name]}"
    measured = total(result)
    figures = [result["low"], result["peak"], result["high"], measured]
    text = " ".join(f"{figure / _MIB:>6.0f}" for figure in figures)
    return f"{text} {result['peak'] / measured - 1:>+7.1%}  {result['words']}"


def total(result: Result) -> int:
    """Bytes of all workers."""
    return sum(result["measured"].values())


def summary(results: Sequence[Result]) -> list[str]:
    """Tables of what was found: errors by group, verdicts by limit, and all of them together."""
    judged = [one for one in results if "failed" not in one and "refused" not in one]
    lines = [f"{len(judged)} runs judged, {len(results) - len(judged)} refused or failed"]
    if not judged:
        return lines
    lines += ["", f"{'group':<22} {'runs':>4} {'median':>7} {'largest':>7}  off by 5 % / 10 %  above / below the band"]
    for kind in (lambda _: "all", _backend, _trainer, lambda one: one["words"].split()[0]):
        lines += [_of_group(name, judged, kind) for name in sorted({kind(one) for one in judged})]
    lines += ["", f"{'limit':<22} {'fits':>6} {'tight':>6} {'does not fit':>13} {'false':>6}"]
    lines += [_of_limit(limit, judged) for limit in LIMITS]
    above = sum(one["high"] < total(one) for one in judged)
    below = sum(one["low"] > total(one) for one in judged)
    lines += ["", f'a false "fits" under some limit: {above}', f'a false "does not fit" under some limit: {below}']
    return lines


def _backend(result: Result) -> str:
    return next(word for word in result["words"].split() if word.startswith("backend="))


def _trainer(result: Result) -> str:
    words = [word for word in result["words"].split() if word.startswith(("trainer=", "trainer.zero_stage="))]
    return " ".join(word.replace("trainer.", "").replace("trainer=", "") for word in words)


def _of_group(name: str, judged: Sequence[Result], kind: Callable[[Result], str]) -> str:
    group = [one for one in judged if kind(one) == name]
    errors = [abs(one["peak"] / total(one) - 1) for one in group]
    above, below = sum(one["high"] < total(one) for one in group), sum(one["low"] > total(one) for one in group)
    far = f"{sum(error > 0.05 for error in errors):>8} / {sum(error > 0.1 for error in errors)}"
    figures = f"{statistics.median(errors):>7.1%} {max(errors):>7.1%}"
    return f"{name:<22} {len(group):>4} {figures}  {far:<17} {above:>8} / {below}"


def _of_limit(limit: float, judged: Sequence[Result]) -> str:
    words = []
    false = 0
    for one in judged:
        size = int(limit * total(one))
        word = verdict(Band(one["low"], one["peak"], one["high"]), size)
        false += word == ("fits" if size < total(one) else "does not fit")
        words.append(word)
    fits, tight, not_fits = (words.count(word) for word in ("fits", "tight", "does not fit"))
    return f"{f'{limit:.2f} of the measured':<22} {fits:>6} {tight:>6} {not_fits:>13} {false:>6}"


def _measured(number: int, words: tuple[str, ...], here: Path) -> Result:
    """Trains a configuration and notes the memory of its workers."""
    result: Result = {"number": number, "words": " ".join(words)}
    began = time.perf_counter()
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            peaks, error = measured(_whole(words, here), _workers(words), Path(folder), _environment(here))
        if error:
            return {**result, "failed": error}
        if len(peaks) == _workers(words):
            return {**result, "measured": peaks, "run_seconds": time.perf_counter() - began}
    return {**result, "failed": f"only workers {sorted(peaks)} were measured"}


def _estimated(result: Result, words: tuple[str, ...], here: Path) -> Result:
    """Adds the estimate to a measurement."""
    kept = {name: result[name] for name in ("number", "words", "measured", "run_seconds")}
    began = time.perf_counter()
    # ONNX Runtime is probed, which --quick leaves out.
    options = ["--format=json", *([] if "backend=ort" in words else ["--quick"])]
    command = [sys.executable, "-m", "ortlaunch", "estimate", *_whole(words, here), *options]
    try:
        said = subprocess.run(
            command, env=_environment(here), capture_output=True, text=True, check=False, timeout=_MOST_SECONDS
        )
    except subprocess.TimeoutExpired:
        return {**kept, "refused": f"not ended after {_MOST_SECONDS} s"}
    if not said.stdout.startswith("{"):
        return {**kept, "refused": " ".join(said.stderr.split())[-500:]}
    report = json.loads(said.stdout)
    machine = report["machine"]
    figures = {"low": machine["low_bytes"], "peak": machine["peak_bytes"], "high": machine["high_bytes"]}
    return {**kept, **figures, "seconds": time.perf_counter() - began, "report": report}


def _workers(words: Sequence[str]) -> int:
    return next((int(word.partition("=")[2]) for word in words if word.startswith("launcher.workers_per_node=")), 1)


def _whole(words: Sequence[str], here: Path) -> list[str]:
    """The words of a command: those of a configuration, and those that all have."""
    common = ("device=cpu", "tracking=none", "train.log_every=2", "train.memory_check=off")
    return [*(word.replace(MODELS, str(here / "models")) for word in words), *common]


def _environment(here: Path) -> dict[str, str]:
    """The variables of a command, with a cache in which no run is measured."""
    return {**os.environ, "ORTLAUNCH_CACHE": str(here / "cache")}


def measured(
    words: Sequence[str], workers: int, folder: Path, environment: dict[str, str]
) -> tuple[dict[str, int], str]:
    """Trains, and returns the largest resident memory of each worker in bytes by its rank, and why the run failed."""
    command = [sys.executable, "-m", "ortlaunch", *words, f"run_root={folder}/runs"]
    ranks: dict[int, str] = {}
    peaks: dict[str, int] = {}
    ends = time.monotonic() + _MOST_SECONDS
    with (
        (folder / "output").open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output, env=environment) as run,
    ):
        while run.poll() is None and time.monotonic() < ends:
            for rank, peak in _peaks(run.pid, ranks, workers):
                peaks[rank] = max(peak, peaks.get(rank, 0))
            time.sleep(_SECONDS)
        if run.poll() is None:
            run.terminate()
            return peaks, f"still running after {_MOST_SECONDS} s"
    said = (folder / "output").read_text(errors="replace").split()
    return peaks, "" if run.returncode == 0 else " ".join(said)[-500:]


def _peaks(root: int, ranks: dict[int, str], workers: int) -> Iterator[tuple[str, int]]:
    """The rank and the peak of each worker below a process.

    Args:
        root: the command.
        ranks: the ranks of the workers that were found, by process; others are looked for until all are there.
        workers: how many there are.
    """
    for pid, rank in list(ranks.items()):
        try:
            yield rank, _high_water(pid)
        except OSError:
            del ranks[pid]
    if len(ranks) == workers:
        return
    try:
        children = psutil.Process(root).children(recursive=True)
    except psutil.Error:
        return
    for process in children:
        try:
            # A process that was just forked has the command of torchrun for a moment.
            if process.pid not in ranks and process.cmdline()[1:4] == ["-u", "-m", "ortlaunch.worker"]:
                ranks[process.pid] = process.environ()["RANK"]
        except (psutil.Error, OSError, KeyError):
            continue


def _high_water(pid: int) -> int:
    """The largest resident memory of a process so far, in bytes.

    Raises:
        OSError: the process has ended.
    """
    for text in Path(f"/proc/{pid}/status").read_text().splitlines():
        if text.startswith("VmHWM:"):
            return int(text.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} has no memory any more")


if __name__ == "__main__":
    main()
