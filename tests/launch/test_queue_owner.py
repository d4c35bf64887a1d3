"""Who has a run between the request and the job: the command that submits it, then the job."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import Config
from ortlaunch.launch.plan import LaunchPlan
from ortlaunch.launch.planning import plan_in
from ortlaunch.launch.queue.submission import Ticket
from ortlaunch.launch.slurm.launcher import SlurmLauncher
from ortlaunch.run import claim
from ortlaunch.run.identity import Process
from ortlaunch.run.run import Run


class Cluster(SlurmLauncher):
    """A cluster that takes every script, or refuses it, and notes who has the run at that moment."""

    def __init__(self, *, takes: bool) -> None:
        self.takes = takes
        self.owners: list[claim.Owner | None] = []

    def ask(self, script: str, config: Config) -> None:
        return

    def enqueue(self, path: Path, config: Config) -> Ticket:
        self.owners.append(claim.owner(Run(path.parent)))
        if not self.takes:
            raise RequestError("no such partition")
        return Ticket("7")


@pytest.fixture
def config() -> Config:
    return to_config(compose(["model=mlp", "backend=eager", "launcher=slurm", "device=cpu", "tracking=none"]))


def planned(config: Config, folder: Path) -> LaunchPlan:
    return plan_in(config, folder / "default" / "20261122-120000-net-abc123", "abc123", "net")


def test_a_run_is_the_commands_until_it_is_the_jobs(config: Config, tmp_path: Path) -> None:
    cluster, plan = Cluster(takes=True), planned(config, tmp_path)
    assert cluster.submit(plan) == 0
    (during,) = cluster.owners
    assert during is not None and during.process == Process.this() and during.job is None
    after = claim.owner(plan.files)
    assert after is not None and after.job == "7" and not after.is_gone()
    with pytest.raises(RequestError, match="belongs to job 7"):
        claim.take(plan.files)
    claim.take(plan.files, job="7")


def test_a_refused_job_leaves_the_run_free(config: Config, tmp_path: Path) -> None:
    plan = planned(config, tmp_path)
    with pytest.raises(RequestError, match="no such partition"):
        Cluster(takes=False).submit(plan)
    claim.take(plan.files, after=1)
    assert claim.number(plan.files) == 2
