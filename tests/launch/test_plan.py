"""What a run will be is decided before anything is written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config import devices
from ortlaunch.config.load import to_config
from ortlaunch.launch import agent
from ortlaunch.launch.local.launcher import node_part
from ortlaunch.launch.plan import LaunchPlan, NodePart
from ortlaunch.launch.planning import make_plan
from ortlaunch.launch.queue.node import environment_of
from ortlaunch.launch.slurm.launcher import SlurmLauncher
from ortlaunch.launch.slurm.plan import settled


def plan(*overrides: str) -> LaunchPlan:
    return make_plan(to_config(compose(["device=cpu", *overrides])))


def part(*overrides: str) -> NodePart:
    return node_part(plan(*overrides))


def test_workers_share_the_cores() -> None:
    cores = devices.usable_cores()
    chosen = part("launcher.workers_per_node=2")
    assert chosen.plan.workers == 2
    assert chosen.start.environment["OMP_NUM_THREADS"] == str(max(1, cores // 2))
    assert "--nproc-per-node=2" in chosen.start.command
    assert part("launcher.workers_per_node=64").threads == max(1, cores // 64)


def test_a_single_trainer_gets_one_worker_with_all_cores() -> None:
    chosen = part("trainer=single")
    assert (chosen.plan.workers, chosen.threads) == (1, devices.usable_cores())


def test_on_cuda_each_gpu_gets_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    # The only machine part that is replaced: the number of GPUs.
    monkeypatch.setattr("ortlaunch.config.devices._present_gpus", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    chosen = part("device=auto")
    assert chosen.plan.workers == 3
    assert "DS_ACCELERATOR" not in chosen.start.environment
    assert "CUDA_VISIBLE_DEVICES" not in chosen.start.environment


@pytest.mark.parametrize(
    ("backend", "own", "value"), [("ort", None, "0"), ("eager", "1", "1"), ("compile", None, None)]
)
def test_torch_compiles_ahead_only_where_something_is_compiled(
    monkeypatch: pytest.MonkeyPatch, backend: str, own: str | None, value: str | None
) -> None:
    monkeypatch.delenv("TORCH_WARM_POOL", raising=False)
    if own is not None:
        monkeypatch.setenv("TORCH_WARM_POOL", own)
    chosen = part(f"backend={backend}", "trainer=deepspeed")
    assert chosen.start.environment.get("TORCH_WARM_POOL") == value
    config = settled(to_config(compose(["launcher=slurm", f"backend={backend}"])))
    on_a_node = environment_of(SlurmLauncher(), make_plan(config))
    assert on_a_node.get("TORCH_WARM_POOL") == value


@pytest.mark.parametrize(("variable", "count"), [("0,1", 2), ("", 0), ("-1", 0), ("0,-1,1", 1), ("0,1,2,3,4", 4)])
def test_visible_gpus_follow_the_variable(monkeypatch: pytest.MonkeyPatch, variable: str, count: int) -> None:
    monkeypatch.setattr("ortlaunch.config.devices._present_gpus", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert devices.visible_gpus() == count


def test_torchrun_leaves_no_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import run as torchrun

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torchrun sets it where it is not set.
    command = part("launcher.workers_per_node=2").start.command
    assert command[1:5] == ["-P", "-m", agent.__name__, torchrun.__name__]
    config, program, words = torchrun.config_from_args(torchrun.parse_args(command[5:]))
    assert [program, *words][:4] == [sys.executable, "-P", "-m", "ortlaunch.worker"]
    destination = config.logs_specs.reify({0: {}, 1: {}})
    assert set(destination.stdouts.values()) == {""}, "the workers have torchrun's own output"
    assert list(tmp_path.iterdir()) == []


def test_planning_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = plan("name=nasty name/../x".replace("/", "_"))
    assert chosen.run_dir.is_relative_to(tmp_path / "runs" / "default")
    assert list(tmp_path.iterdir()) == []


def test_two_plans_of_one_configuration_have_folders_of_their_own() -> None:
    assert plan().run_dir != plan().run_dir


def test_a_name_becomes_a_folder_without_shell_characters() -> None:
    folder = plan("name='a b$(x);ü'").run_dir.name
    assert " " not in folder
    assert "$" not in folder
    assert "ü" in folder


def test_the_default_name_tells_model_backend_and_trainer() -> None:
    assert plan("trainer=deepspeed", "trainer.zero_stage=2").name == "gpt2_nano-ort-deepspeed-z2"
    assert plan("backend=eager").name == "gpt2_nano-eager-ddp"
