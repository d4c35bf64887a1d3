"""A worker that fails: what the person at the terminal reads, what MLflow keeps, and that nothing goes on running."""

from __future__ import annotations

import socket

import pytest

from tests.support.stumbling import NET, WORDS
from tests.support.waiting import until

NETS = f"""{NET}
import signal
import torch

class Raises(Net):
    def stumble(self):
        raise ValueError("the moon is in the wrong phase")

class Killed(Net):
    def stumble(self):
        os.kill(os.getpid(), signal.SIGKILL)

class Large(Net):
    # A weight of a TiB in a file that has nothing in it takes no memory; no step uses it.
    _ddp_params_and_buffers_to_ignore = ("large", ".large")

    def __init__(self):
        super().__init__()
        self.large = nn.Parameter(torch.from_file("large", shared=True, size=2**38))

    def stumble(self): ...

def sized(width: int):
    return nn.Linear(width, 10)
"""


@pytest.fixture(scope="module")
def run(launch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("failures")
    (folder / "nets.py").write_text(NETS)
    return lambda *more: launch(folder, *WORDS, *more)


@pytest.fixture(scope="module")
def raised(run):
    return run("model.target=nets:Raises")


@pytest.fixture(scope="module")
def killed(run):
    return run("model.target=nets:Killed")


def test_an_exception_reaches_the_terminal(raised):
    """Exit code 1; standard error has the rank, the host, the user's own line and message, and where the rest is."""
    assert raised.returncode == 1, raised.report
    assert f"rank 1 on {socket.gethostname()} failed" in raised.stderr
    assert 'raise ValueError("the moon is in the wrong phase")' in raised.stderr
    assert "ValueError: the moon is in the wrong phase" in raised.stderr
    assert str(raised.run_dir / "logs" / "rank-1.log") in raised.stderr
    assert "the moon is in the wrong phase" in raised.log(1)


def test_an_exception_is_not_buried(raised):
    """Neither torchrun's report nor the other rank's errors, which follow from the first, stand beside it."""
    assert raised.stderr.count("Traceback") <= 1
    assert "torch.distributed.elastic" not in raised.stderr
    assert "rank 0" not in raised.stderr
    assert "Traceback" not in raised.stdout


def test_a_killed_worker_is_named(killed):
    """Exit code 1; rank 1 and SIGKILL are named, though the worker itself could say nothing."""
    assert killed.returncode == 1, killed.report
    assert f"rank 1 on {socket.gethostname()} failed" in killed.stderr
    assert "SIGKILL" in killed.stderr


@pytest.mark.parametrize("kind", ["raised", "killed"])
def test_mlflow_calls_it_failed_and_keeps_what_was_trained(kind, request, mlflow_run):
    """FAILED with the reason as a tag; the steps before the failure are there."""
    result = request.getfixturevalue(kind)
    client, run = mlflow_run(result)
    assert run.info.status == "FAILED"
    assert "rank 1" in run.data.tags["ortlaunch.failure"]
    assert {1, 2, 3} <= {point.step for point in client.get_metric_history(run.info.run_id, "train/loss")}


@pytest.mark.parametrize("kind", ["raised", "killed"])
def test_no_process_goes_on(kind, request, leftovers):
    until(lambda: leftovers(request.getfixturevalue(kind).run_dir) == [])


@pytest.mark.nightly
def test_a_wrong_request_found_by_a_worker_is_one_line(run):
    """Exit code 2 as if the launcher had found it: one line with the key, no traceback."""
    result = run("model.target=nets:sized", "model.params.widht=64")
    assert result.returncode == 2, result.report
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("ortlaunch: model.params.widht: ")
    assert "Did you mean model.params.width?" in result.stderr
    assert result.status == "FAILED"


LARGE = (
    *("model.target=nets:Large", "trainer.find_unused_parameters=true"),
    *("train.checkpoint_every=null", "train.save_weights=false"),
)
"""Whose gradients and optimizer state would take 3 TiB."""


@pytest.mark.parametrize("check", ["warn", "error", "off"])
def test_a_state_that_no_machine_has_room_for(tmp_path, train, check):
    (tmp_path / "nets.py").write_text(NETS)
    run = train(tmp_path, *WORDS, *LARGE, "train.steps=6", f"train.memory_check={check}", "tracking=none")
    line = "the run does not fit into memory: a worker holds 4096.00 GiB"
    assert (run.error[: len(line)], run.is_request) == ((line, True) if check == "error" else ("", False)), run.report
    assert [run.log(rank).count(f"warning: {line}") for rank in range(2)] == [int(check == "warn"), 0]


@pytest.mark.nightly
def test_a_run_without_room_is_refused_by_its_workers(run):
    """Exit code 2 and one line, as if the launcher had found it."""
    result = run(*LARGE, "train.memory_check=error")
    assert result.returncode == 2, result.report
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("ortlaunch: the run does not fit into memory: a worker holds ")
    assert result.status == "FAILED"
