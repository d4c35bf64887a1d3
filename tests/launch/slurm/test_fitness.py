"""What a node says of itself, from real files and a real command in nvidia-smi's place."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import save_config, to_config
from ortlaunch.launch.environment import describe
from ortlaunch.launch.slurm import fitness
from ortlaunch.launch.slurm.plan import settled


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """A run folder as the first node sees it, and the variables of a task on node 1."""
    folder = tmp_path / "run"
    folder.mkdir()
    write(folder)
    (folder / "env.json").write_text(json.dumps(describe([])))
    (folder / "preflight.token").write_text("7-0-0")
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_NODEID": "1", "ORTLAUNCH_HEAD": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    return folder


def write(folder, *overrides):
    save_config(settled(to_config(compose(["launcher=slurm", "launcher.nodes=2", *overrides]))), folder / "config.yaml")


def test_a_fit_node(run_dir):
    assert fitness.report(run_dir) == 0
    assert [path.name for path in (run_dir / "preflight").iterdir()] == ["000001-n2.fit"]


def test_another_attempts_folder(run_dir, capsys):
    (run_dir / "preflight.token").write_text("6-0-0")
    assert fitness.report(run_dir) == 1
    assert "n2: " in capsys.readouterr().err
    assert (run_dir / "preflight" / "000001-n2.unfit").read_text().startswith(f"{run_dir} is not the run folder")


def test_other_versions(run_dir):
    recorded = json.loads((run_dir / "env.json").read_text())
    recorded["packages"]["torch"] = "1.0"
    (run_dir / "env.json").write_text(json.dumps(recorded))
    (line,) = fitness.examine(run_dir)
    assert line.startswith("torch ")
    assert "and 1.0 where the run was submitted" in line


@pytest.mark.parametrize("content", ['{"packages": {"torch": ', "{}", "[]", '{"packages": 3}'])
def test_a_damaged_record_is_one_finding(run_dir, content):
    (run_dir / "env.json").write_text(content)
    (line,) = fitness.examine(run_dir)
    assert line.startswith(f"{run_dir / 'env.json'} cannot be read")


def test_a_head_that_does_not_resolve(run_dir, monkeypatch):
    monkeypatch.setenv("ORTLAUNCH_HEAD", "nowhere.invalid")
    (line,) = fitness.examine(run_dir)
    assert "nowhere.invalid, does not resolve here" in line


def test_no_run_folder_here(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_NODEID", "0")
    assert fitness.report(tmp_path / "nowhere") == fitness.NO_FOLDER
    assert "cannot be used here" in capsys.readouterr().err


def nvidia_smi(folder, monkeypatch, text):
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\ncat <<'EOF'\n{text}\nEOF\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_fewer_gpus_than_workers(run_dir, tmp_path, monkeypatch):
    write(run_dir, "launcher.gpus_per_node=4", "train.precision=fp32")
    nvidia_smi(tmp_path, monkeypatch, "GPU 0: x\nGPU 1: x\nGPU 2: x\nGPU 3: x")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert fitness.examine(run_dir) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert fitness.examine(run_dir) == ["GPUs that are visible: 2, and 4 workers need one each"]


def test_orphans_on_the_gpus_are_named(tmp_path, monkeypatch):
    orphan = subprocess.Popen(
        [sys.executable, "-c", "input('orphan')"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    try:
        nvidia_smi(tmp_path, monkeypatch, f"{orphan.pid}, 31337\n1, 5\n99999999, 7")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        lines = fitness.gpu_orphans()
    finally:
        orphan.kill()
        orphan.wait()
    assert any(f"process {orphan.pid} of yours holds 31337 MiB" in line and "orphan" in line for line in lines)
    assert not any("99999999" in line for line in lines)


def test_silent_nodes_are_named(run_dir, tmp_path, monkeypatch):
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho n1; echo n2; echo n3\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    folder = run_dir / "preflight"
    folder.mkdir()
    (folder / "000000-n1.fit").touch()
    (folder / "000001-n2.unfit").write_text("no disk")
    assert fitness.problems(run_dir).splitlines() == [
        "n2: no disk",
        "n3: did not answer within launcher.preflight_seconds, or could not use the run folder (logs/slurm.log)",
    ]


def test_a_thousand_nodes_are_one_listing(run_dir, tmp_path, monkeypatch):
    """No file of a fit node is opened, and no more than some are named."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\nseq -f 'n%04.0f' 0 999\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    folder = run_dir / "preflight"
    folder.mkdir()
    for number in range(900):
        (folder / f"{number:06d}-n{number:04d}.fit").touch(mode=0o000)
    (line,) = fitness.problems(run_dir).splitlines()
    assert line.startswith("n0900, n0901, ")
    assert " and 84 more: did not answer" in line
