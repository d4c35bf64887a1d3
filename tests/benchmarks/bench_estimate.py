"""How near `ortlaunch estimate` is to the memory of real runs: ``python -m tests.benchmarks.bench_estimate``.

Configurations are drawn by a seed (`tests.benchmarks.estimate_draws`), trained for three steps and estimated. What was
measured is the largest resident memory of each worker, as the kernel counts it (``VmHWM``), summed over all workers; a
measurement that has missed a worker is repeated and never counted.

A verdict is judged beside limits near what was measured: "fits" under a limit below it is false, and so is "does not
fit" under a limit that is not. The last two lines judge by every limit there is: a high figure below what was measured
would be a false "fits" under some limit, a low one above it a false "does not fit".

Results are kept (`tests.benchmarks.estimate_record`). ``bench_estimate`` prints them. ``bench_estimate measure`` takes
the configurations that are missing or failed; each is kept at once, so that a later call goes on. ``bench_estimate
again`` estimates the measured ones again, by the present code, and measures nothing; ONNX Runtime
is tried by real steps.

``ORTLAUNCH_ESTIMATE_COUNT`` (200), ``ORTLAUNCH_ESTIMATE_SEED`` (0) and ``ORTLAUNCH_ESTIMATE_FIRST`` (0) choose what is
drawn, and ``ORTLAUNCH_ESTIMATE_ONLY=WORD,WORD`` takes of it what has one of these words; a number is such a word.
``ORTLAUNCH_ESTIMATE_RECORD=FILE`` is another record than that of the seed in ``tests/benchmarks/estimates``.
``ORTLAUNCH_ESTIMATE_JOBS=2`` takes two configurations at a time: much of one is start-up, which leaves cores idle, and
the memory of a worker does not depend on what runs beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from ortlaunch.base.user import user_cache
from tests.benchmarks.estimate_draws import MODELS, draw, make_models
from tests.benchmarks.estimate_record import FOLDER, Record, Result, is_judged, line, of_report, summary

_SECONDS = 0.02
_MOST_SECONDS = 900
_VERBS = ("print", "measure", "again")


def main(verb: str = "print") -> None:
    """Measures and estimates what the verb asks for, and prints what is kept.

    Args:
        verb: ``print``, ``measure`` or ``again``.
    """
    if verb not in _VERBS:
        sys.exit(f"bench_estimate takes one of {', '.join(_VERBS)}")
    seed = _number("SEED", 0)
    record = Record.of(Path(os.environ.get("ORTLAUNCH_ESTIMATE_RECORD", FOLDER / f"seed{seed}.jsonl")))
    first = _number("FIRST", 0)
    only = set(filter(None, os.environ.get("ORTLAUNCH_ESTIMATE_ONLY", "").split(",")))
    numbered = [(number, draw(seed, number)) for number in range(first, first + _number("COUNT", 200))]
    drawn = [(number, words) for number, words in numbered if not only or only & {*words, str(number)}]
    print(f"{'low':>6} {'likely':>6} {'high':>6} {'real':>6} {'error':>7}  configuration   (MiB, all workers)")
    results = _results(record, drawn, verb)
    print("\n".join(["", *summary(results)]))


def _number(name: str, default: int) -> int:
    return int(os.environ.get(f"ORTLAUNCH_ESTIMATE_{name}", default))


def _results(record: Record, drawn: Sequence[tuple[int, tuple[str, ...]]], verb: str) -> list[Result]:
    """The results of these configurations, as far as there are any; each is printed."""
    here = user_cache() / "bench-estimate"
    if verb != "print":
        make_models(here / "models")
    with ThreadPoolExecutor(_number("JOBS", 1)) as jobs:
        # In their order, whichever is done first.
        results = jobs.map(lambda one: _result(*one, record, here, verb), drawn)
        found = []
        for result in results:
            if result is not None and is_judged(result):
                print(line(result), flush=True)
                found.append(result)
    return found


def _result(number: int, words: tuple[str, ...], record: Record, here: Path, verb: str) -> Result | None:
    """The result of a configuration, each new part of which is kept at once; None if there is none.

    Args:
        number: its number.
        words: its words.
        record: what is kept.
        here: the folder with the models.
        verb: ``measure`` finds what is missing, ``again`` estimates what was measured.
    """
    result = record.results.get(" ".join(words))
    if verb == "measure" and (result is None or "failed" in result):
        result = {**_measured(number, words, here), "measured_in": record.setup()}
        record.keep(result)
    if result is None or "measured" not in result:
        return result
    if verb == "again" or (verb == "measure" and "peak" not in result):
        result = {**_estimated(result, words, here), "estimated_in": record.setup()}
        record.keep(result)
    return result


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
            return {**result, "measured": peaks, "run_seconds": round(time.perf_counter() - began, 1)}
    return {**result, "failed": f"only workers {sorted(peaks)} were measured"}


def _estimated(result: Result, words: tuple[str, ...], here: Path) -> Result:
    """Adds the estimate to a measurement."""
    kept = {name: result[name] for name in ("number", "words", "measured", "run_seconds", "measured_in")}
    began = time.perf_counter()
    # ONNX Runtime is tried, which --quick leaves out.
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
    return {**kept, **of_report(json.loads(said.stdout)), "seconds": round(time.perf_counter() - began, 1)}


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
            if process.pid not in ranks and process.cmdline()[1:4] == ["-P", "-m", "ortlaunch.worker"]:
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
    main(*sys.argv[1:2])
