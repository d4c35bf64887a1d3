"""`+after=RUN` on this machine, and what it says to SLURM."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import SlurmConfig
from ortlaunch.follow import after as follow_after
from ortlaunch.follow.after import after, split_after, wait_for
from ortlaunch.launch.slurm import cluster
from ortlaunch.run.journal import Journal


def dependency(names: list[str], given: str | None) -> str | None:
    """What the job of a run after these would wait for."""
    made = to_config(compose(["launcher=slurm", *([f"launcher.dependency='{given}'"] if given else [])]))
    launcher = after(made, names).launcher
    assert isinstance(launcher, SlurmConfig)
    return launcher.dependency


def test_the_word_is_no_key_of_the_configuration() -> None:
    words, runs = split_after(["model=mlp", "+after=one,two", "train.steps=5", "+after=three"])
    assert words == ["model=mlp", "train.steps=5"]
    assert runs == ["one", "two", "three"]


@pytest.mark.parametrize("word", ["+after=", "+after=,", "+after=one,", "+after=one, ,two"])
def test_an_empty_name_is_refused(word: str) -> None:
    """A script whose variable is empty must not start at once."""
    with pytest.raises(RequestError, match=r"^\+after=.* names no run"):
        split_after(["model=mlp", word])


def test_a_run_that_has_finished_is_not_waited_for(make_run) -> None:
    make_run("done")
    wait_for(["done"])
    assert dependency(["done"], None) is None
    assert dependency(["done"], "singleton") == "singleton"


@pytest.fixture
def at_each_look(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Calls one function after another, each before the command looks once more; the last one again and again."""

    def use(*steps: Callable[[], object]) -> None:
        left = list(steps)
        clock = SimpleNamespace(sleep=lambda _seconds: (left.pop(0) if left[1:] else left[0])())
        monkeypatch.setattr(follow_after, "time", clock)

    return use


def test_this_command_waits_for_a_run_that_goes_on(make_run, alive, capsys, at_each_look) -> None:
    run_dir = make_run("going", end=None, launcher=alive)
    ended: list[bool] = []

    def end() -> None:
        assert not ended
        ended.append(True)
        with Journal(run_dir / "journal.jsonl") as journal:
            journal.end("FINISHED")

    at_each_look(lambda: None, end)
    wait_for(["going"])
    assert ended
    assert capsys.readouterr().out == "waiting for going (000001)\n"


def test_the_wait_goes_on_while_the_scheduler_does_not_answer(make_run, squeue_fails, tmp_path, at_each_look) -> None:
    squeue = tmp_path / "bin" / "squeue"
    fails = squeue.read_text()
    squeue.write_text("#!/bin/sh\necho '5|5|N/A|RUNNING|0|1|0:10|1:00:00|n1|None'\n")
    run_dir = make_run("training", end=None, job={"scheduler": "slurm", "job_id": "5"})
    ended: list[bool] = []

    def fail() -> None:
        squeue.write_text(fails)
        cluster._answers.clear()

    def end() -> None:
        assert not ended
        ended.append(True)
        with Journal(run_dir / "journal.jsonl") as journal:
            journal.end("FINISHED")

    at_each_look(lambda: None, fail, lambda: None, end)
    wait_for(["training"])
    assert ended


@pytest.mark.parametrize("status", ["FAILED", "KILLED"])
def test_nothing_comes_after_a_run_that_did_not_finish(make_run, status: str) -> None:
    make_run("broken", end=status)
    with pytest.raises(RequestError, match=f"broken .* is {status.lower()}.*ortlaunch resume"):
        wait_for(["broken"])
    with pytest.raises(RequestError, match="broken"):
        dependency(["broken"], None)


def test_slurm_cannot_wait_for_what_is_no_job(make_run, alive) -> None:
    make_run("here", end=None, launcher=alive)
    with pytest.raises(RequestError, match="not as a job"):
        dependency(["here"], None)
