"""An MLflow server for a team: PostgreSQL, basic auth, started by the script that the image runs.

Runs of two workers log to it; `compare` reads them back; MLflow's own page shows them in a browser.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import urlopen

import pytest

from tests.integration.conftest import Result, Started
from tests.support.browser import visiting
from tests.support.servers import Server, points, postgres

SCRIPT = Path(__file__).parents[2] / "docker" / "mlflow-server.sh"
ADMIN, DATABASE = "correct horse battery", "staple:@/% 1"
WORDS = ("model=mlp", "backend=eager", "train.steps=12", "train.log_every=1", "train.save_weights=false")
# 0.2 s of hashing for the first request of each user, and whatever else the machine does.
PATIENT = ("tracking.timeout_seconds=20", "tracking.flush_seconds=60")


RUNS = {"ddp": ("trainer=ddp",)} | ({"zero": ("trainer=deepspeed",)} if os.environ.get("ORTLAUNCH_NIGHTLY") else {})


@dataclass(frozen=True)
class Team:
    """The server, and the runs that it was told."""

    server: Server
    folder: Path
    runs: dict[str, Result]


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    folder = tmp_path_factory.mktemp("team")
    secrets = {"admin": ADMIN, "database": DATABASE}
    for name, secret in secrets.items():
        (folder / name).write_text(secret + "\n")
    with postgres("mlflow", DATABASE, "mlflow") as port:
        server = Server(
            folder,
            [str(SCRIPT)],
            {
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                # It is killed, and leaves what it has there.
                "TMPDIR": str(folder),
                "MLFLOW_BACKEND_STORE_URI": f"postgresql://mlflow@127.0.0.1:{port}/mlflow",
                "MLFLOW_ARTIFACTS_DESTINATION": str(folder / "artifacts"),
                "MLFLOW_DATABASE_PASSWORD_FILE": str(folder / "database"),
                "MLFLOW_ADMIN_PASSWORD_FILE": str(folder / "admin"),
            },
        )
        server.environment["MLFLOW_PORT"] = str(server.port)
        try:
            server.up()
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
                patch.setenv("MLFLOW_TRACKING_PASSWORD", ADMIN)
                runs = {
                    name: Started(folder, (*WORDS, *PATIENT, f"tracking.uri={server.uri}", *words)).finish()
                    for name, words in RUNS.items()
                }
                yield Team(server, folder, runs)
        finally:
            server.kill()


def test_nobody_comes_in_without_a_password(team: Team) -> None:
    with pytest.raises(HTTPError, match="401"):
        urlopen(f"{team.server.uri}/api/2.0/mlflow/experiments/search?max_results=1", timeout=10)


def test_runs_of_two_workers_arrive_whole(team: Team) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(team.server.uri)
    for result in team.runs.values():
        assert result.returncode == 0, result.report
        assert "sync" not in result.stdout, result.report
        (run,) = client.search_runs(["1"], f"tags.`ortlaunch.run_dir` = '{result.run_dir}'")
        assert (run.info.status, run.data.tags["ortlaunch.world_size"]) == ("FINISHED", "2")
        assert points(client, run) == Counter(result.points)
        copy = client.download_artifacts(run.info.run_id, "ortlaunch/config.yaml", str(team.folder))
        assert Path(copy).read_text() == (result.run_dir / "config.yaml").read_text()


def test_no_password_is_written_anywhere(team: Team) -> None:
    """Not into the runs' folders, not onto the terminal, not into the server's log or any process' command line."""
    files = [path for run in team.runs.values() for path in run.run_dir.rglob("*") if path.is_file()]
    texts = [path.read_text(errors="replace") for path in [*files, team.folder / "server.log"]]
    texts += [run.report for run in team.runs.values()]
    texts += subprocess.run(
        ["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for secret in (ADMIN, DATABASE):
        assert not [text for text in texts if secret in text or quote(secret) in text]


def test_compare_reads_them_and_names_the_page(team: Team) -> None:
    compared = Started(team.folder, ("compare", "--uri", team.server.uri, "--format", "json")).finish()
    assert compared.returncode == 0, compared.report
    assert {run["status"] for run in json.loads(compared.stdout)["runs"]} == {"FINISHED"}
    assert len(json.loads(compared.stdout)["runs"]) == len(RUNS)


@pytest.mark.nightly
def test_the_page_of_both_runs_in_a_browser(team: Team) -> None:
    """MLflow's page that compares the two shows both names, and the curves of both, without an error."""
    from mlflow import MlflowClient

    client = MlflowClient(team.server.uri)
    found = {run.info.run_name: run.info.run_id for run in client.search_runs(["1"])}
    ids = quote(json.dumps(list(found.values())))
    with visiting("admin", ADMIN, width=1900) as visit:
        visit.page.goto(f"{team.server.uri}/#/compare-runs?runs={ids}&experiments={quote(json.dumps(['1']))}")
        for name in found:
            visit.page.get_by_text(name).first.wait_for(timeout=30_000)
        _picture(visit.page, "mlflow-compare.png")
        visit.page.goto(
            f"{team.server.uri}/#/metric?runs={ids}&metric={quote(json.dumps('train/loss'))}"
            f"&experiments={quote(json.dumps(['1']))}&plot_metric_keys={quote(json.dumps(['train/loss']))}"
        )
        lines = visit.page.locator(".scatterlayer .trace .js-line")
        lines.nth(1).wait_for(state="attached", timeout=30_000)
        drawn = [lines.nth(number).get_attribute("d") or "" for number in range(lines.count())]
        _picture(visit.page, "mlflow-curves.png")
    # Each run's, through more points than its two ends; MLflow draws some twice, before and after smoothing.
    assert len(set(drawn)) == 2 and min(path.count("L") for path in drawn) > 5
    assert visit.hosts == {team.server.uri.removeprefix("http://")}
    assert visit.errors == [] and visit.failed == []


def _picture(page: object, name: str) -> None:
    """Keeps what is seen where ORTLAUNCH_PICTURES says, for the docs."""
    if folder := os.environ.get("ORTLAUNCH_PICTURES"):
        page.screenshot(path=Path(folder) / name)  # type: ignore[attr-defined]
