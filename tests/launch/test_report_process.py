"""The process of a verb that looks at a configuration."""

from __future__ import annotations

import psutil
import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.compose.prepare import prepared
from ortlaunch.config.load import to_config
from ortlaunch.launch.report_process import report_of


def test_a_process_that_does_not_end_in_time_is_ended_and_says_so() -> None:
    config = prepared(to_config(compose(["model=mlp", "device=cpu", "backend=eager", "trainer=single"])))
    # It imports torch, which takes longer.
    with pytest.raises(RequestError, match="the check did not end within 0 s"):
        report_of("check", config, {}, status="", quiet=True, timeout=0.01)
    assert not [one for one in psutil.Process().children() if "ortlaunch.check.process" in _words(one)]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
