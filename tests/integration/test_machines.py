"""A run on several machines by hand: the very lines that the dry run prints, typed on two test hosts."""

from __future__ import annotations

import shlex
import signal
import time

import pytest

from tests.integration import hosts
from tests.support.needs import needs

SMALL = ("model=gpt2_nano", "model.params.n_layer=2", "data.seq_len=32", "train.batch_size=2", "train.log_every=1")
SAME = (*SMALL, *(f"model.params.{kind}_pdrop=0" for kind in ("resid", "embd", "attn")))


@pytest.fixture
def two_hosts():
    why = hosts.missing()
    needs(why is None, str(why))
    with hosts.two_hosts() as made:
        yield made


def lines(launch, folder, *words):
    """The line for each machine, as the dry run prints them, without the command's name."""
    printed = launch(folder, *words, "launcher.dry_run=true")
    assert printed.returncode == 0, printed.report
    assert list(folder.glob("runs")) == []
    typed = [shlex.split(line) for line in printed.stdout.splitlines() if not line.startswith("#")]
    assert [line[0] for line in typed] == ["ortlaunch", "ortlaunch"]
    return [line[1:] for line in typed]


@pytest.mark.parametrize(
    "trainer",
    [
        ("trainer=ddp",),
        pytest.param(("trainer=deepspeed", "trainer.zero_stage=2", "backend=ort"), marks=pytest.mark.nightly),
    ],
)
def test_two_machines_train_as_one_with_as_many_workers(launch, train, start, two_hosts, tmp_path, mlflow_run, trainer):
    words = (*SAME, "backend=eager", "train.steps=6", *trainer)
    several = ("launcher.nodes=2", f"launcher.master_addr={two_hosts[0].address}", "launcher.workers_per_node=1")
    typed = lines(launch, tmp_path, *words, *several)
    second = start(tmp_path, *typed[1], prefix=two_hosts[1].prefix())
    time.sleep(1)  # In any order.
    first = start(tmp_path, *typed[0], prefix=two_hosts[0].prefix())
    led, assisted = first.finish(), second.finish()
    assert led.returncode == 0, led.report
    assert assisted.returncode == 0, assisted.report
    assert "2 machines x 1 worker" in led.stdout
    assert assisted.run_dir == led.run_dir
    assert led.tags["ortlaunch.world_size"] == "2"
    assert mlflow_run(led)[1].info.status == "FINISHED"
    assert [event["event"] for event in led.events].count("start") == 1
    alone = train(tmp_path, *words, "tracking=none")
    assert led.losses == pytest.approx(alone.losses, abs=1e-6)
    # The agents take ranks in an order of their own, but one is on each machine.
    assert {path.name for path in (led.run_dir / "logs").glob("torchrun-*.log")} == {"torchrun-0.log", "torchrun-1.log"}


@pytest.mark.nightly
def test_stopped_on_one_machine_it_goes_on_from_both(launch, start, two_hosts, tmp_path):
    words = (*SMALL, "backend=eager", "tracking=none")
    several = ("launcher.nodes=2", f"launcher.master_addr={two_hosts[0].address}", "launcher.workers_per_node=1")
    typed = lines(launch, tmp_path, *words, *several, "train.steps=100000")
    first = start(tmp_path, *typed[0], prefix=two_hosts[0].prefix())
    second = start(tmp_path, *typed[1], prefix=two_hosts[1].prefix())
    run_dir = first.wait_for_training()
    second.process.send_signal(signal.SIGINT)
    ended = first.finish(), second.finish()
    assert [one.returncode for one in ended] == [130, 130], [one.report for one in ended]
    assert ended[0].status == "KILLED"
    done = max(ended[0].losses)
    again = ("resume", str(run_dir), f"train.steps={done + 3}")
    first = start(tmp_path, *again, prefix=two_hosts[0].prefix())
    second = start(tmp_path, *again, "launcher.node_rank=1", prefix=two_hosts[1].prefix())
    led, assisted = first.finish(), second.finish()
    assert led.returncode == 0, led.report
    assert assisted.returncode == 0, assisted.report
    assert "launcher.node_rank=1" in led.stdout
    assert max(led.losses) == done + 3
    assert f"after step {done}" in led.stdout + assisted.stdout


@pytest.mark.nightly
def test_a_killed_worker_is_named_with_its_machine_by_the_first_one(launch, start, two_hosts, tmp_path):
    words = (*SMALL, "backend=eager", "tracking=none", "train.steps=100000", "launcher.workers_per_node=1")
    several = ("launcher.nodes=2", f"launcher.master_addr={two_hosts[0].address}")
    typed = lines(launch, tmp_path, *words, *several)
    first = start(tmp_path, *typed[0], prefix=two_hosts[0].prefix())
    second = start(tmp_path, *typed[1], prefix=two_hosts[1].prefix())
    first.wait_for_training()
    workers = [
        process
        for process in hosts.processes_in(two_hosts[1])
        if "ortlaunch.worker" in process.cmdline() and "torch.distributed.run" not in process.cmdline()
    ]
    assert len(workers) == 1
    workers[0].kill()
    ended = first.finish(), second.finish()
    assert [one.returncode for one in ended] == [1, 1], [one.report for one in ended]
    assert "SIGKILL" in ended[1].stderr
    assert "rank " in ended[0].stderr and "failed" in ended[0].stderr
    assert ended[0].status == "FAILED"


def test_the_other_machine_refuses_another_configuration(ask, tmp_path):
    """No second machine needed: what it compares lies in the shared folder."""
    run = "20260101-120000-1a2b3c"
    folder = tmp_path / "runs" / "default" / "20260101-120000-gpt2_nano-eager-ddp-1a2b3c"
    folder.mkdir(parents=True)
    known = ask(tmp_path, *SMALL, "backend=eager", "--cfg", "job")
    (folder / "config.yaml").write_text(known.stdout)
    (folder / "journal.jsonl").touch()
    several = ("launcher.nodes=2", "launcher.master_addr=127.0.0.1", f"launcher.run={run}", "launcher.node_rank=1")
    result = ask(tmp_path, *SMALL, "backend=eager", "train.steps=7", *several)
    assert result.returncode == 2, result.stderr
    assert "train.steps" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("launcher.nodes=2",), ("launcher.master_addr",)),
        (("launcher.master_addr=127.0.0.1",), ("launcher.nodes",)),
        (("launcher.nodes=2", "launcher.master_addr=127.0.0.1", "launcher.node_rank=2"), ("below launcher.nodes=2",)),
        (("launcher.nodes=2", "launcher.master_addr=127.0.0.1", "launcher.node_rank=1"), ("launcher.run",)),
        (("launcher.nodes=2", "launcher.master_addr=127.0.0.1", "launcher.run=mine"), ("launcher.run=mine",)),
        (("launcher.nodes=2", "launcher.master_addr=no.such.host.invalid"), ("cannot reach",)),
        (("launcher.nodes=2", "launcher.master_addr=127.0.0.1", "trainer=single"), ("trainer=single",)),
    ],
)
def test_what_cannot_work_is_refused(refused, words, parts):
    answer = refused(*SMALL, *words)
    assert all(part in answer for part in parts), answer
