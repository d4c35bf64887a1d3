"""Trials of other backends: what becomes of one that cannot be made."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest

from ortlaunch.run.run import Run
from ortlaunch.trainer.auto import trials


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOSPC], ids=["no process", "full disk"])
def test_a_trial_that_cannot_be_started_leaves_the_run_as_it_is(monkeypatch, tmp_path, number):
    def refuse(*_arguments, **_options):
        raise OSError(number, "not now")

    monkeypatch.setattr(trials.subprocess, "Popen", refuse)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv("ORTLAUNCH_LIFE", raising=False)
    values = {}
    store = SimpleNamespace(set=lambda key, text: values.update({key: text.encode()}), get=values.get)
    selection = SimpleNamespace(rank=0, store=store, environment={})
    rate = trials.tried(selection, Run(tmp_path), "ort", 30.0, lambda: False)
    assert rate is not None
    assert rate.step_seconds is None
    assert 0 < rate.tried_seconds < 30
    # The other workers end their trials of it, too.
    assert values["trial-ended-ort/0"] == b"1"
