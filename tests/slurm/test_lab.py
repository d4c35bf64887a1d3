"""The test cluster itself: with accounting, two side by side, and nothing of it left afterwards."""

from __future__ import annotations

import subprocess
import time

import psutil
import pytest
from lab import Lab, LabError, down, load, missing, up

from tests.support.needs import needs

# It takes MariaDB and a second cluster. The first one, in which CI's runs are, has the same beginning and end.
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def accounted(slurm):
    """A second cluster beside the first, with slurmdbd."""
    why = missing(accounting=True)
    needs(not why, str(why))
    folder = slurm.lab.folder / "second"
    folder.mkdir(mode=0o711)
    lab = Lab(folder, slurm.lab.base_port + 2000, accounting=True)
    try:
        up(lab)
        yield lab
    finally:
        down(lab)


def of(folder):
    """Processes that name a folder in their command line."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if any(str(folder) in word for word in process.info["cmdline"] or [])
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def test_accounting_knows_a_job_that_has_ended(slurm, accounted):
    assert load(accounted.folder) == accounted
    environment = {**slurm.environment, "SLURM_CONF": str(accounted.conf)}

    def output(*command):
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=True).stdout

    job = output("sbatch", "--parsable", "--nodes=2", "--output=/dev/null", "--wrap=srun hostname").strip()
    deadline = time.monotonic() + 120
    while "COMPLETED" not in (text := output("sacct", "-n", "-X", "-j", job, "-o", "state,nodelist")):
        assert time.monotonic() < deadline, text
        time.sleep(0.2)
    # The other cluster is another one.
    assert slurm("squeue", "-h").strip() == ""


def test_nothing_listens_beyond_this_machine(accounted):
    ports = {accounted.base_port, *(accounted.port_of(name) for name in accounted.names)}
    ports |= {accounted.database_port, accounted.accounting_port}
    listening = [
        one for one in psutil.net_connections("inet") if one.status == psutil.CONN_LISTEN and one.laddr.port in ports
    ]
    assert {one.laddr.port for one in listening} == ports
    assert {one.laddr.ip for one in listening} == {"127.0.0.1"}


def test_up_leaves_a_cluster_that_runs_alone(accounted):
    before = {path: path.read_bytes() for path in (accounted.folder / "etc").iterdir()}
    processes = {process.pid for process in of(accounted.folder)}
    with pytest.raises(LabError, match=r"holds a cluster that runs \(munged, slurmctld, .*lab\.py down"):
        up(accounted)
    assert {path: path.read_bytes() for path in (accounted.folder / "etc").iterdir()} == before
    assert {process.pid for process in of(accounted.folder)} == processes


def test_down_leaves_nothing(accounted):
    assert of(accounted.folder)
    down(accounted)
    deadline = time.monotonic() + 120
    while of(accounted.folder):
        assert time.monotonic() < deadline, of(accounted.folder)
        time.sleep(0.1)
