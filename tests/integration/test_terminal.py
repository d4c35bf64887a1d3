"""One run on a terminal, in a repository with changes, its environment full of secrets: what is shown and kept."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.conftest import RUN_SECONDS, journal
from tests.support.environment import environment

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "aws-hunter2-secret",
    "MLFLOW_TRACKING_PASSWORD": "mlflow-hunter2",
    "HF_TOKEN": "hf_hunter2hunter2hunter2",
    "NCCL_MY_TOKEN": "nccl-hunter2",
    "NCCL_X_PASS": "nccl-pass-hunter2",
    "TORCH_DSN": "torch-dsn-hunter2",
    "UCX_NOTE": "glpat-Hunter2Hunter2Hunter2",
    "TORCH_PROXY": "https://ann:hunter2@proxy.example/?token=hunter2",
}
BANNERS = re.compile(r"[Dd]eep[Ss]peed|torchrun|W\d{4}|\bINFO\b|\bWARNING\b|Warning:|onnxruntime|ORTModule")


@dataclass(frozen=True)
class Shown:
    """What a terminal of 80 columns was sent, and where the run lies."""

    text: str
    raw: str
    cwd: Path

    @property
    def run_dir(self) -> Path:
        (found,) = self.cwd.glob("runs/*/*")
        return found


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repo")
    for command in ("init -q", "add x.py", "commit -qm x"):
        (folder / "x.py").write_text("one\n")
        git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run([*git, *command.split()], cwd=folder, check=True)
    (folder / "x.py").write_text("two\n")
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    words = ["model=mlp", "data=digits", "backend=ort", "trainer=deepspeed", "train.steps=30", "train.log_every=5"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ortlaunch", *words],
        cwd=folder,
        env=environment() | SECRETS | {"TERM": "xterm-256color"},
        stdin=other,
        stdout=other,
        stderr=other,
        start_new_session=True,
    )
    os.close(other)
    raw = b""
    deadline = time.monotonic() + RUN_SECONDS
    try:
        while time.monotonic() < deadline:
            if select.select([main], [], [], 1)[0]:
                raw += os.read(main, 65536)
    except OSError:  # Nobody writes any more.
        pass
    finally:
        if time.monotonic() > deadline:
            process.kill()
        os.close(main)
    code = process.wait(timeout=120)
    text = raw.decode()
    assert code == 0, text
    return Shown(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text), text, folder)


def test_progress_has_step_loss_rate_memory_and_time_left(shown):
    figures = (
        r"step (\d+)/30  loss \d+\.\d{4}  [\d,.]+ samples/s  [\d.]+ s/step  [\d.]+ GiB +\S+ (\d+:\d\d:\d\d|-:--:--)"
    )
    bars = [match for line in re.split(r"[\r\n]+", shown.text) if (match := re.fullmatch(figures, line.strip()))]
    # The bar is drawn ten times a second: of fast steps it shows some.
    assert max(int(bar[1]) for bar in bars) == 30
    assert any(":" in bar[2] and "-" not in bar[2] for bar in bars)
    assert all(len(bar[0]) <= 80 for bar in bars)


def test_the_end_says_where_everything_is_and_libraries_say_nothing(shown):
    lines = [line.strip() for line in re.split(r"[\r\n]+", shown.text)]
    assert any(re.match(r"finished after [\d.]+ s: last loss", line) for line in lines)
    for label, place in (("run folder:", str(shown.run_dir)), ("mlflow:", "sqlite:///"), ("compare:", "ortlaunch")):
        assert any(line.startswith(label) and place in line for line in lines)
    for line in lines:
        # The run's own name and folder tell what it runs on.
        rest = line.replace(str(shown.run_dir), "").replace(shown.run_dir.name.split("-", 2)[2].rsplit("-", 1)[0], "")
        assert not BANNERS.search(rest), line
    assert "ORTModule" in (shown.run_dir / "logs" / "rank-0.log").read_text()


def test_what_was_changed_and_installed_is_kept_in_mlflow(shown):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{shown.cwd}/mlruns.db")
    (run,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=shown.cwd, capture_output=True, text=True, check=True)
    assert run.data.tags["ortlaunch.git_commit"] == commit.stdout.strip()
    assert run.data.tags["ortlaunch.git_dirty"] == "true"
    patch = Path(client.download_artifacts(run.info.run_id, "ortlaunch/git.patch")).read_text()
    assert "-one\n+two\n" in patch
    # The run's own files are none of the user's changes.
    assert "untracked" not in patch
    assert "torch==" in Path(client.download_artifacts(run.info.run_id, "ortlaunch/packages.txt")).read_text()
    (used,) = run.inputs.dataset_inputs
    assert (used.dataset.name, used.dataset.digest) == ("digits", run.data.tags["ortlaunch.data_fingerprint"])


def test_no_secret_is_anywhere(shown):
    assert "hunter2" not in shown.raw
    assert any(event["event"] == "end" for event in journal(shown.run_dir))
    looked = [path for path in shown.cwd.rglob("*") if path.is_file()]
    assert {"env.json", "journal.jsonl", "rank-0.log", "torchrun.log", "mlruns.db"} <= {path.name for path in looked}
    for path in looked:
        assert b"hunter2" not in path.read_bytes(), path
