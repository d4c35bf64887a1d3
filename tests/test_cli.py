"""The command line: verbs, help, exit codes."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from ortlaunch import __version__, cli
from ortlaunch.base import last_resort
from tests.support.cli import answer, ortlaunch
from tests.support.environment import environment


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
        "tensorboard",
        "--multirun",
        "Exit codes",
    ):
        assert word in result.stdout


@pytest.mark.parametrize("verb", [verb for verb in cli.VERBS if verb != "run"])
def test_every_verb_has_a_help_of_its_own(tmp_path: Path, verb: str) -> None:
    result = ortlaunch(tmp_path, verb, "--help")
    assert result.returncode == 0, result.stderr
    assert f"ortlaunch {verb}" in " ".join(result.stdout.split()), result.stdout


@pytest.mark.parametrize(("words", "page"), [([], ["--help"]), (["tune"], ["tune", "--help"])])
def test_the_word_help_is_the_option(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: list[str], page: list[str]
) -> None:
    result = answer(tmp_path, capfd, "help", *words)
    assert (result.returncode, result.stdout) == (0, answer(tmp_path, capfd, *page).stdout)


def test_version(tmp_path: Path) -> None:
    assert ortlaunch(tmp_path, "--version").stdout.strip() == f"ortlaunch {__version__}"


def test_workers_get_the_threads_and_the_allocator_that_are_asked_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("model=mlp", "device=cpu", "launcher.dry_run=true")
    plain = answer(tmp_path, capfd, *words).stdout
    asked = answer(tmp_path, capfd, *words, "launcher.threads=3", "launcher.allocator=keep").stdout
    assert "MALLOC" not in plain
    assert {"OMP_NUM_THREADS=3", "MALLOC_MMAP_MAX_=0", f"MALLOC_TRIM_THRESHOLD_={2**62}"} <= set(asked.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["backend=eager,ort"], ["backend=eager,ort", "--multirun", "ortlaunch bench"]),
        (["model=gtp2"], ["gtp2", "model=gpt2"]),
        (["trian"], ["trian", "compare"]),
        (["statsu", "x"], ["statsu: no such command. Did you mean ortlaunch status?"]),
        (["stop", "x"], ["stop: no such command. Did you mean ortlaunch cancel?"]),
        (["model="], ["model=: no option is named (there are bert, factory,"]),
        (["backend=", "model=mlp"], ["backend=: no option is named (there are auto, compile,"]),
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
        (["bench", "model=mlp", "--repeat", "2"], ["--repeat: the number of rounds is given as repeat=N"]),
        (["bench", "model=mlp", "repeats=2"], ["repeats=2: the number of rounds is given as repeat=N"]),
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
        pytest.param(["export", "artifacts", "out=x", "optimizer=sgd"], ["optimizer.momentum"], marks=pytest.mark.ort),
        (["export", "inference", "out=x", "loss=own"], ["loss= is not for this export"]),
        pytest.param(["export", "verify", "nowhere"], ["nowhere holds no export"], marks=pytest.mark.ort),
        pytest.param(
            ["export", "weights", "--from-artifacts", "nowhere", "--out", "x"],
            ["nowhere holds no export"],
            marks=pytest.mark.ort,
        ),
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
    assert f"--nproc-per-node={min(2, len(os.sched_getaffinity(0)))}" in result.stdout
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
        (["model=mlp", "train.steps=4,5", f"hydra.sweep.dir=new/{'x' * 300}"], 2),
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


LONG = "x" * 300


@pytest.fixture(autouse=True)
def no_run_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test of this process may have written a run folder."""
    monkeypatch.setattr(last_resort, "_begun", None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--"], ["--: no script follows"]),
        (["=5"], ["=5: keys are given as KEY=VALUE"]),
        (["-sc"], ["--shell-completion", "query=SHELL"]),
        (["-sc", "query=bash"], ["COMP_LINE"]),
        (["+after="], ["+after= names no run"]),
        (["hydra.run.dir=/proc/nowhere"], ["hydra.run.dir=/proc/nowhere"]),
        (["train.steps=" + "9" * 10_000], ["train.steps=999", "4300 digits"]),
        (["bench", "repeat=" + "9" * 10_000], ["repeat=999", "no number of rounds"]),
        (["logs", "x", "--rank", "9" * 10_000], ["--rank", "number or all"]),
        ([f"name={LONG}"], ["name=xxx", "at most 200 bytes"]),
        ([f"experiment={LONG}"], ["experiment=xxx", "at most 200 bytes"]),
        (["status", LONG], ["xxx", "File name too long"]),
        (["resume", "~nosuchuser/x"], ["there is no user nosuchuser here"]),
        (["run_root=~nosuchuser/x"], ["there is no user nosuchuser here"]),
        (["run_root=/proc/nowhere", "model=mlp"], ["/proc/nowhere", "run_root=FOLDER"]),
        ([f"run_root={LONG}", "model=mlp"], ["xxx", "File name too long"]),
        (["run_root=/proc/nowhere", "train.steps=4,5", "-m"], ["/proc/nowhere"]),
        (["cancel", "x", "--wait", "nan"], ["--wait", "'nan'"]),
        (["compare", "--tag", "nope"], ["compare: --tag: 'nope' is not KEY=VALUE"]),
        (["jobs", "--last", "0"], ["jobs: --last: '0'"]),
        (["status"], ["status: the following arguments are required: RUN"]),
        (["\udcff=1"], ["is no UTF-8 text"]),
    ],
)
def test_odd_input_is_one_line_too(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    result = answer(tmp_path, capfd, *arguments)
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    assert len(result.stderr.splitlines()) == 1 and result.stderr.startswith("ortlaunch: ")
    assert len(result.stderr) < 1200
    for word in words:
        assert word in result.stderr
    assert list(tmp_path.iterdir()) == []


def fails(error: Exception) -> Callable[[list[str]], int]:
    """A dispatcher that fails."""

    def dispatch(arguments: list[str]) -> int:
        raise error

    return dispatch


def test_an_unforeseen_error_is_one_line_and_its_traceback_a_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("MY_TOKEN", "geheim-4711-xyz")
    monkeypatch.setattr(cli, "dispatch", fails(LookupError("no\nsuch geheim-4711-xyz thing")))
    result = answer(tmp_path, capfd, "models")
    (file,) = tmp_path.iterdir()
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("ortlaunch: unexpected error: LookupError: no such ")
    assert result.stderr.endswith(f" (the traceback is in {file})\n") and result.stderr.count("\n") == 1
    assert "Traceback" in file.read_text() and "dispatch" in file.read_text()
    assert "geheim" not in file.read_text() + result.stderr


def test_the_traceback_of_a_run_is_in_its_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_resort, "_begun", tmp_path / "launcher-error.log")
    # Once a run has begun, its end is a failure: the request was good.
    monkeypatch.setattr(cli, "dispatch", fails(PermissionError(errno.EACCES, "Permission denied", "journal")))
    result = answer(tmp_path, capfd, "models")
    assert result.returncode == 1
    assert str(tmp_path / "launcher-error.log") in result.stderr
    assert "PermissionError" in (tmp_path / "launcher-error.log").read_text()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR])
def test_a_path_that_cannot_be_used_is_a_wrong_request(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(cli, "dispatch", fails(OSError(number, os.strerror(number), "/some/where")))
    result = answer(tmp_path, capfd, "models")
    assert result.returncode == 2
    assert result.stderr.startswith(f"ortlaunch: /some/where: {os.strerror(number)}: ")


def test_a_full_disk_is_no_unexpected_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "dispatch", fails(OSError(errno.ENOSPC, "No space left on device")))
    result = answer(tmp_path, capfd, "models")
    assert result.returncode == 1
    assert result.stderr.startswith("ortlaunch: No space left on device: make room for the run folder, ")


def test_no_place_for_a_traceback_is_no_further_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkstemp", full)
    monkeypatch.setattr(last_resort, "_begun", tmp_path / "gone" / "file")
    monkeypatch.setattr(cli, "dispatch", fails(LookupError("x")))
    result = answer(tmp_path, capfd, "models")
    assert result.returncode == 1
    assert re.search(r"no place for its traceback; it was raised in .*test_cli\.py, line \d+\)$", result.stderr.strip())


def test_a_locale_of_ascii_alone_takes_every_folder(tmp_path: Path) -> None:
    folder = tmp_path / "ö"
    folder.mkdir()
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = ortlaunch(folder, "launcher.dry_run=true", "name='ä'", "device=cpu", **plain)
    assert result.returncode == 0, result.stderr
    assert f"{folder}/runs/default/" in result.stdout


def test_a_working_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    gone, odd = tmp_path / "gone", Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    gone.mkdir()
    odd.mkdir()
    shell = f'cd {gone} && rmdir {gone} && exec "{sys.executable}" -m ortlaunch jobs'
    deleted = subprocess.run(["sh", "-c", shell], env=environment(), capture_output=True, text=True, timeout=200)
    assert (deleted.returncode, deleted.stdout) == (2, "")
    assert "ortlaunch: the working folder cannot be used (No such file or directory)" in deleted.stderr
    assert "Traceback" not in deleted.stderr
    result = ortlaunch(odd, "jobs")
    assert result.returncode == 2
    assert "the working folder's name is no UTF-8 text" in result.stderr


def test_a_user_without_a_home_folder_is_told_what_to_set(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's user may have no entry in the machine's list of users."""

    def unknown(user: int) -> NoReturn:
        raise KeyError(user)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "ORTLAUNCH_CACHE"):
        monkeypatch.delenv(name, raising=False)
    result = answer(tmp_path, capfd, "jobs")
    assert result.returncode == 2
    said = f"ortlaunch: the user {os.geteuid()} has no home folder: set HOME, or ORTLAUNCH_CACHE to a folder"
    assert result.stderr.startswith(said) and len(result.stderr.splitlines()) == 1
    assert answer(tmp_path, capfd, "--version").returncode == 0
