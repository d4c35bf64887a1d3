"""Says in what the code and the packages of an attempt differ from those of the attempt before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ortlaunch.base.reading import read_bytes, read_json
from ortlaunch.run.run import Run

_COMMIT = 12
"""Characters of a commit that are shown."""


def other_code(run: Run, attempt: int) -> str:
    """Returns what differs, such as ``commit 1a2b3c4d5e6f -> 6f5e4d3c2b1a``; empty if nothing does or is known to.

    Args:
        run: the run, whose folder has the records of this attempt.
        attempt: how often it was launched before.
    """
    earlier = run.earlier_attempt(attempt)
    before, now = (read_json(folder / run.environment_file.name) for folder in (earlier, run.path))
    if not attempt or before is None or now is None:
        return ""
    found = [f"{name} {then} -> {here}" for name, then, here in _versions(before, now) if then != here]
    if _content(earlier / run.patch_file.name) != _content(run.patch_file):
        found.append("changes that are in no commit (git.patch)")
    then, here = (_scripts(folder / run.sources.name) for folder in (earlier, run.path))
    found += sorted(name for name, content in here.items() if then.get(name, content) != content)
    return ", ".join(found)


def _versions(before: dict[str, Any], now: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """What was recorded of both attempts, by name."""
    commits = [str((one.get("git") or {}).get("commit", "none"))[:_COMMIT] for one in (before, now)]
    yield "commit", commits[0], commits[1]
    yield "python", str(before.get("python")), str(now.get("python"))
    packages = [one.get("packages") or {} for one in (before, now)]
    for name in sorted({*packages[0], *packages[1]}):
        yield name, str(packages[0].get(name, "none")), str(packages[1].get(name, "none"))


def _scripts(folder: Path) -> dict[str, bytes]:
    return {path.name: _content(path) for path in folder.glob("*")}


def _content(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except OSError:
        return b""
