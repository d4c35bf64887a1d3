"""How much memory a real step may take where a model cannot be traced."""

from __future__ import annotations

import resource

import psutil
import pytest

MIB = 2**20


@pytest.mark.parametrize("limit", [None, 2**46], ids=["no limit", "a larger machine"])
def test_a_real_step_gets_no_more_than_the_control_group_has(
    monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    from ortlaunch.estimate import traces

    set_to: list[int] = []
    monkeypatch.setattr(traces, "available", lambda: 100 * MIB)
    monkeypatch.setattr(resource, "setrlimit", lambda _kind, both: set_to.append(both[0]))
    traces._limit_memory(limit)
    assert 40 * MIB < set_to[0] - psutil.Process().memory_info().vms < 80 * MIB
