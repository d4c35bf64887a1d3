"""What `tests.benchmarks.bench_estimate` keeps, in `tests/benchmarks/estimates`, and what follows from it.

A record is a file of JSON lines. The first line has the setups: machine, versions, commit and day. Each further line is
one configuration, in the order of their numbers, and names the setup that it was measured in and the one that it was
estimated in. The file is replaced as a whole, so that an interruption loses no line.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ortlaunch.base.files import replace_text
from ortlaunch.config.devices import device_name, usable_cores
from ortlaunch.config.schema import Device
from ortlaunch.estimate.band import Band, verdict
from ortlaunch.tune.folder import OF_SPEED

FOLDER = Path(__file__).with_name("estimates")
LIMITS = (0.8, 0.9, 1.0, 1.1, 1.25)
"""Limits, as shares of what was measured."""
_MIB = 2**20
_QUARTER = 2**28
_PACKAGES = ("torch", "transformers", "deepspeed", "onnxruntime-training", "onnxruntime-training-cpu", "ortlaunch")

Result = dict[str, Any]
"""``number``, ``words``, ``measured`` bytes by rank, and of the estimate ``low``, ``peak`` and ``high`` of a machine,
``phase``, ``base``, ``tensors`` and ``process`` of its first worker at the peak. Without an estimate ``refused`` says
why, and without a measurement ``failed`` does. ``measured_in`` and ``estimated_in`` number the setups."""


@dataclass
class Record:
    """The results in a file."""

    file: Path
    setups: list[dict[str, Any]] = field(default_factory=list)
    """Where the results are from."""
    results: dict[str, Result] = field(default_factory=dict)
    """By their words."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while a result is added."""

    @classmethod
    def of(cls, file: Path) -> Record:
        """The record in a file; an empty one if there is none."""
        lines = [json.loads(text) for text in file.read_text().splitlines()] if file.is_file() else []
        setups = lines[0]["setups"] if lines else []
        return cls(file, setups, {one["words"]: one for one in lines[1:]})

    def keep(self, result: Result) -> None:
        """Keeps a result at once, in the place of an earlier one."""
        with self._lock:
            self.results[result["words"]] = result
            ordered = sorted(self.results.values(), key=lambda one: int(one["number"]))
            lines = [{"setups": self.setups}, *ordered]
            self.file.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self.file, "".join(f"{json.dumps(one)}\n" for one in lines))

    def setup(self) -> int:
        """The number of the present setup."""
        facts = machine() | {
            "libc": " ".join(platform.libc_ver()),
            "commit": _commit(),
            "day": time.strftime("%Y-%m-%d"),
        }
        with self._lock:
            if facts not in self.setups:
                self.setups.append(facts)
            return self.setups.index(facts)


def machine() -> dict[str, Any]:
    """The machine, the versions, and the variables that change what a process holds."""
    there = {one.metadata["Name"].lower(): one.version for one in importlib.metadata.distributions()}
    versions = {name: there[name] for name in _PACKAGES if name in there} | {"python": platform.python_version()}
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(OF_SPEED)}
    return {
        "processor": device_name(Device.cpu),
        "cores": usable_cores(),
        "memory": psutil.virtual_memory().total // _QUARTER,
        "versions": versions,
        "variables": variables,
    }


def _commit() -> str:
    """The commit of the code, with ``-dirty`` where the package differs from it; empty where git does not know."""
    commit, changes = (_git("rev-parse", "--short=10", "HEAD"), _git("status", "--porcelain", "--", "ortlaunch"))
    return f"{commit}-dirty" if changes else commit


def _git(*words: str) -> str:
    root = FOLDER.parents[2]
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False).stdout.strip()


def is_judged(result: Result) -> bool:
    """Whether nothing of a result is left to find out."""
    return bool({"peak", "refused", "failed"} & set(result))


def total(result: Result) -> int:
    """Bytes of all workers."""
    return sum(result["measured"].values())


def line(result: Result) -> str:
    """A configuration and its figures in MiB."""
    if "failed" in result or "refused" in result:
        name = "failed" if "failed" in result else "refused"
        return f"  {name}: {result['words']}: {result[name]}"
    measured = total(result)
    figures = [result["low"], result["peak"], result["high"], measured]
    text = " ".join(f"{figure / _MIB:>6.0f}" for figure in figures)
    side = " above" if result["high"] < measured else " below" if result["low"] > measured else ""
    return f"{text} {result['peak'] / measured - 1:>+7.1%}{side}  {result['number']}: {result['words']}"


def summary(results: Sequence[Result]) -> list[str]:
    """What was found: errors by class as a table of Markdown, verdicts by limit, and all of them together."""
    judged = [one for one in results if "peak" in one]
    failed, refused = (sum(name in one for one in results) for name in ("failed", "refused"))
    lines = [f"{len(judged)} runs judged, {refused} not estimated, {failed} not measured"]
    if not judged:
        return lines
    lines += ["", *table(judged), ""]
    lines += [f"{'limit':<22} {'fits':>6} {'tight':>6} {'does not fit':>13} {'false':>6}"]
    lines += [_of_limit(limit, judged) for limit in LIMITS]
    above, below = (len(_beyond(judged, side)) for side in ("above", "below"))
    lines += ["", f'a false "fits" under some limit: {above}', f'a false "does not fit" under some limit: {below}']
    return lines


def table(judged: Sequence[Result]) -> list[str]:
    """The errors by class as a table of Markdown."""
    lines = ["| | runs | median error | largest | over 5 % | over 10 % | above the band | below it |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- | --- |"]
    kinds: tuple[Callable[[Result], str], ...] = (lambda _: "all", _class, lambda one: one["words"].split()[0])
    return lines + [_of_group(name, judged, kind) for kind in kinds for name in sorted({kind(one) for one in judged})]


def _class(result: Result) -> str:
    """Backend and trainer."""
    keys = dict(word.split("=", 1) for word in result["words"].split())
    stage = keys.get("trainer.zero_stage")
    return f"{keys['backend']}, {keys['trainer'] if stage is None else f'ZeRO {stage}'}"


def _of_group(name: str, judged: Sequence[Result], kind: Callable[[Result], str]) -> str:
    group = [one for one in judged if kind(one) == name]
    errors = [_error(one) for one in group]
    far, farther = (sum(abs(error) > limit for error in errors) for limit in (0.05, 0.1))
    above, below = (len(_beyond(group, side)) for side in ("above", "below"))
    median, largest = statistics.median(map(abs, errors)), max(errors, key=abs)
    return f"| {name} | {len(group)} | {median:.1%} | {largest:+.1%} | {far} | {farther} | {above} | {below} |"


def _error(result: Result) -> float:
    return float(result["peak"] / total(result) - 1)


def _beyond(judged: Sequence[Result], side: str) -> list[Result]:
    """The results that were measured above or below their band."""
    if side == "above":
        return [one for one in judged if one["high"] < total(one)]
    return [one for one in judged if one["low"] > total(one)]


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


def of_report(report: dict[str, Any]) -> Result:
    """What is kept of an estimate's report: the figures of a machine, and what its first worker holds at the peak."""
    of_machine, first = report["machine"], report["workers"][0]
    phase = first["peak_phase"]
    use = first["phases"][phase]
    return {
        "low": of_machine["low_bytes"],
        "peak": of_machine["peak_bytes"],
        "high": of_machine["high_bytes"],
        "phase": phase,
        "base": first["parts"]["base_bytes"],
        "tensors": use["tensors_bytes"],
        "process": use["process_bytes"],
    }
