"""The list of the run roots that a user has started runs in."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ortlaunch.run.roots import known_roots, note_root

_AT_ONCE = 4


def test_runs_that_begin_at_the_same_moment_lose_no_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    roots = [tmp_path / str(number) for number in range(40)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for first in range(0, len(roots), _AT_ONCE):
            some, begin = roots[first : first + _AT_ONCE], threading.Barrier(_AT_ONCE)

            def note(root: Path, begin: threading.Barrier = begin) -> None:
                root.mkdir()
                begin.wait(120)
                note_root(root)

            list(pool.map(note, some))
    assert set(known_roots()) == set(roots)
    assert known_roots()[0] in roots[-_AT_ONCE:], "the latest comes first"
