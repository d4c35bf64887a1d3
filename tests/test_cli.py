"""The command line: verbs, help, exit codes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ortlaunch import __version__, cli
from tests.support.cli import answer, ortlaunch


def test_help_names_every_verb_group_and_option(tmp_path: Path) -> None:
    result = ortlaunch(tmp_path, "--help")
    assert result.returncode == 0
    for verb in cli.VERBS:
        assert re.search(rf"^ +ortlaunch (\[{verb}\]|{verb})( |$)", result.stdout, re.MULTILINE), verb
    for word in (
        "status RUN",
        "logs RUN",
        "cancel RUN",
        "export weights",
        "export onnx|artifacts|inference",
        "export verify",
        "gpt2_nano",
        "+jobs=NAME",
        "gpt2_zero2_ort",
        "deepspeed",
        "pysource",
        "--multirun",
        "Exit codes",
    ):
        assert word in result.stdout


@pytest.mark.parametrize("verb", [verb for verb in cli.VERBS if verb != "run"])
def test_every_verb_has_a_help_of_its_own(tmp_path: Path, verb: str) -> None:
    result = ortlaunch(tmp_path, verb, "--help")
    assert result.returncode == 0, result.stderr
    assert f"ortlaunch {verb}" in " ".join(result.stdout.split()), result.stdout


def test_version(tmp_path: Path) -> None:
    assert ortlaunch(tmp_path, "--version").stdout.strip() == f"ortlaunch {__version__}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["backend=eager,ort"], ["backend=eager,ort", "--multirun", "ortlaunch bench"]),
        (["model=gtp2"], ["gtp2", "model=gpt2"]),
        (["trian"], ["trian", "compare"]),
        (["train.steps=0"], ["train.steps=0"]),
        (["--steps", "50"], ["--steps: no such option", "KEY=VALUE", "train.steps=50?"]),
        (["model=gpt2", "--batch-size=4"], ["--batch-size: no such option", "train.batch_size=4?"]),
        (["--dry-run", "model=gpt2"], ["launcher.dry_run=true?"]),
        (["--lr", "model=gpt2"], ["optimizer.lr=VALUE?"]),
        (["--multi-run", "backend=eager,ort"], ["--multi-run: no such option", "did you mean --multirun?"]),
        (["-x"], ["-x: no such option", "ortlaunch --help"]),
        (["model=gpt2", "--resolve", "50"], ["50: keys are given as KEY=VALUE"]),
        (["model=gpt2", "steps"], ["steps: keys are given as KEY=VALUE"]),
        (["--cfg", "jbo"], ["--cfg", "jbo", "job"]),
        (["--con", "x"], ["--con", "--config-dir"]),
        (["--resolve"], ["--resolve", "--cfg"]),
        (["model=gpt2", "--package", "model"], ["--package", "--cfg"]),
        (["--cfg", "job", "--multirun"], ["--cfg and --multirun"]),
        (["check", "--steps", "5"], ["--steps: no such option", "train.steps=5?"]),
        (["bench", "--steps", "5"], ["--steps: no such option", "train.steps=5?"]),
        (["train.stpes=1"], ["train.steps"]),
        (["model=hf"], ["model.params.pretrained"]),
        (["run", "model=factory"], ["model.target"]),
        (["model=factory", "model.target=nets:Net"], ["model.target=nets:Net: there is no module 'nets'"]),
        (["compare", "--uri", "sqlite:///nowhere.db"], ["nowhere.db"]),
        (["compare", "--html", "nowhere/x.html"], ["--html nowhere/x.html", "no folder"]),
        (["bench", "repeat=0"], ["repeat=0"]),
        (["bench", "model=gtp2"], ["gtp2", "model=gpt2"]),
        (["sync", "nowhere"], ["nowhere"]),
        (["models", "x"], ["x"]),
        (["resume"], ["resume", "RUN_DIR"]),
        (["jobs", "--experiment", "nowhere"], ["nowhere"]),
        (["status", "nowhere"], ["nowhere", "no run folder"]),
        (["logs", "nowhere"], ["nowhere", "no run folder"]),
        (["cancel", "nowhere"], ["nowhere", "no run folder"]),
        (["resume", "nowhere"], ["nowhere", "no run folder"]),
        (["export"], ["export weights RUN"]),
        (["export", "weights", "nowhere"], ["nowhere", "no run folder"]),
        (["export", "onxx"], ["onxx", "onnx"]),
        (["export", "onnx", "model=mlp"], ["out=FOLDER"]),
        (["export", "artifacts", "out=x", "from_run=nowhere"], ["from_run=nowhere"]),
        (["export", "artifacts", "out=x", "optimizer=sgd"], ["optimizer.momentum"]),
        (["export", "inference", "out=x", "loss=own"], ["loss= is not for this export"]),
        (["export", "verify", "nowhere"], ["nowhere holds no export"]),
        (["export", "weights", "--from-artifacts", "nowhere", "--out", "x"], ["nowhere holds no export"]),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2_and_leaves_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    result = answer(tmp_path, capfd, *arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert result.stderr.startswith("ortlaunch: ")
    for word in words:
        assert word in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_process_of_its_own_ends_so_too(tmp_path: Path) -> None:
    result = ortlaunch(tmp_path, "train.stpes=1")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("ortlaunch: train.stpes: no such key")


def test_the_composed_configuration_is_printed(tmp_path: Path) -> None:
    result = ortlaunch(tmp_path, "model=gpt2", "trainer=deepspeed", "--cfg", "job")
    assert result.returncode == 0
    assert "zero_stage: 1" in result.stdout
    assert "n_layer: 12" in result.stdout


def test_configuration_of_the_users_own_is_found(tmp_path: Path) -> None:
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "tiny.yaml").write_text("name: gpt2_nano\nparams:\n  n_layer: 1\n")
    result = ortlaunch(tmp_path, "--config-dir", "mine", "model=tiny", "--cfg", "job")
    assert result.returncode == 0, result.stderr
    assert "n_layer: 1" in result.stdout


def test_a_dry_run_prints_the_command_and_writes_nothing(tmp_path: Path) -> None:
    result = ortlaunch(tmp_path, "model=gpt2", "trainer=deepspeed", "launcher.dry_run=true", "device=cpu")
    assert result.returncode == 0
    assert "torch.distributed.run" in result.stdout
    assert "--nproc-per-node=2" in result.stdout
    assert "OMP_NUM_THREADS=" in result.stdout
    assert str(tmp_path / "runs") in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["launcher.dry_run=true", "trainer=ddp,single"], 0),
        (["launcher=slurm", "launcher.dry_run=true", "optimizer.lr=0.1,0.2"], 0),
        (["train.steps=0,4"], 2),
        (["train.steps=4,0", "launcher=slurm"], 2),
        # Hydra finds out while it composes the second, when it has made the folder.
        (["backend=ort,eager", "backend.threads=2"], 2),
        (["backend=ort,eager", "backend.threads=2", "launcher=slurm"], 2),
    ],
)
def test_a_sweep_that_starts_nothing_writes_nothing(tmp_path: Path, arguments: list[str], code: int) -> None:
    result = ortlaunch(tmp_path, *arguments, "--multirun")
    assert result.returncode == code, result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["train.steps=0,4"], ["backend=ort,eager", "backend.threads=2"]])
def test_a_sweep_that_starts_nothing_leaves_the_users_own_folders(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "mine").mkdir()
    assert ortlaunch(tmp_path, *arguments, "run_root=mine", "--multirun").returncode == 2
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-c", "job", "-p", "train"], ["# @package train", "steps:"]),
        (["--info", "searchpath"], ["main", "schema"]),
        (["--hydra-help"], ["--config-path"]),
        (["--run", "launcher.dry_run=true"], ["torch.distributed.run"]),
    ],
)
def test_hydras_own_options_work(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    result = ortlaunch(tmp_path, *arguments)
    assert result.returncode == 0, result.stderr
    for word in words:
        assert word in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_options_may_stand_between_keys(tmp_path: Path) -> None:
    arguments = ["model=gpt2", "--cfg", "job", "trainer=deepspeed", "--resolve", "seed=3"]
    result = ortlaunch(tmp_path, *arguments)
    assert result.returncode == 0, result.stderr
    assert "zero_stage: 1" in result.stdout and "seed: 3" in result.stdout


def test_shell_completion_of_hydra_works(tmp_path: Path) -> None:
    result = ortlaunch(tmp_path, "-sc", "query=bash", COMP_LINE="ortlaunch trainer=d", COMP_POINT="19", COMP_CWORD="1")
    assert result.returncode == 0, result.stderr
    assert {"trainer=ddp", "trainer=deepspeed"} <= set(result.stdout.split())


def test_models_lists_each_with_a_line(tmp_path: Path) -> None:
    lines = ortlaunch(tmp_path, "models").stdout.splitlines()
    assert {line.split()[0] for line in lines} >= {"mlp", "resnet", "gpt2", "gpt2_nano", "bert", "llama", "vit", "hf"}


@pytest.mark.parametrize("name", ["onnx", "artifacts", "verify", "inference"])
def test_each_export_has_a_page(tmp_path: Path, name: str) -> None:
    result = ortlaunch(tmp_path, "export", name, "--help")
    assert result.returncode == 0
    assert f"ortlaunch export {name}" in result.stdout and "Exit codes" in result.stdout
    assert name in ortlaunch(tmp_path, "export", "--help").stdout
