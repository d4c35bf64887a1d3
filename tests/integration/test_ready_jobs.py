"""Every ready job really trains, two steps of it, its model shrunken; the one for a cluster is shown."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.config.paths import ready_jobs
from tests.support.chat import conversations, write_classifier, write_conversations, write_model

_GPT2 = ("vocab_size=256", "n_positions=64", "n_embd=32", "n_layer=2", "n_head=2")
_LAYERS = ("hidden_size=32", "num_hidden_layers=2", "num_attention_heads=2", "intermediate_size=64")
_SMALL = {
    "gpt2": _GPT2,
    "gpt2_nano": _GPT2,
    "bert": ("vocab_size=256", *_LAYERS),
    "llama": (*_LAYERS, "num_key_value_heads=2"),
    "vit": _LAYERS,
    "resnet": ("hidden_sizes=[32]", "depths=[1]"),
    "hf": (),
}
_ASKED = {
    "chat_lora": ("data.path=chat.jsonl", "data.seq_len=64"),
    "text_classes": ("model.params.pretrained=classifier", "data.path=texts.csv", "train.batch_size=2"),
}
"""What a job needs to be told; the words of all others."""
_SHORT = ("device=cpu", "train.epochs=null", "train.steps=2", "train.log_every=1", "tracking=none")


def small(name: str) -> tuple[str, ...]:
    """The command line that runs a job in seconds."""
    config = to_config(compose([f"+jobs={name}"]))
    params = tuple(f"model.params.{param}" for param in _SMALL[config.model.name])
    if config.backend.name == "compile":
        # Most of its time goes into kernels, for each layer again.
        params += ("model.params.n_layer=1",)
    tokens = () if config.data.name == "digits" else ("data.seq_len=32",)
    return f"+jobs={name}", *_SHORT, *params, *_ASKED.get(name, tokens)


JOBS = {name: to_config(compose([f"+jobs={name}"])) for name in ready_jobs()}
SWEEPS = [name for name, path in ready_jobs().items() if "MULTIRUN" in path.read_text()]
SUBMITTED = [name for name, config in JOBS.items() if config.launcher.name == "slurm"]
ELSEWHERE = ["timm_digits"]
"""Trained by ``make test-neighbours``, beside the package that it needs."""
TRAINED = [name for name in JOBS if name not in SWEEPS + SUBMITTED + ELSEWHERE]
NIGHTLY = ("gpt2_zero0_ort", "gpt2_zero1_ort", "gpt2_zero3_ort", "gpt2_eager", "gpt2_ort", "llama", "vit_digits")
"""CI trains the job of stage 2, stage 3 in `test_zero3.py`, gpt2 in `test_matrix.py`, the others in `tests/ort`."""


@pytest.fixture(scope="module")
def runs(table_of, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("ready")
    write_model(folder / "model")
    write_classifier(folder / "classifier")
    write_conversations(folder / "chat.jsonl", conversations(40))
    (folder / "texts.csv").write_text("text,label\n" + "a good one,good\na bad one,bad\n" * 20)
    return table_of(folder, {name: small(name) for name in TRAINED})


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.nightly] * (n in NIGHTLY)) for n in TRAINED])
def test_each_trains(runs, name: str) -> None:
    result = runs[name]
    if JOBS[name].backend.name == "compile" and torch.__version__.startswith("2.6."):
        assert result.is_request and "cannot compile the models of the installed transformers" in result.error
        return
    assert result.status == "FINISHED", result.report
    assert set(result.losses) == {1, 2}
    # Nothing of what the job is for was lost on the way: ONNX Runtime really ran, where it is the job's backend.
    assert result.tags["ortlaunch.ort_active"] == ("true" if JOBS[name].backend.name == "ort" else "false")


@pytest.mark.parametrize("name", SWEEPS)
def test_each_sweep_shows_its_combinations(ask, tmp_path: Path, name: str) -> None:
    dry = ask(tmp_path, f"+jobs={name}", "launcher.dry_run=true", "device=cpu").stdout
    assert dry.count("torch.distributed.run") == 4
    for combination in ("eager-ddp", "eager-deepspeed", "ort-ddp", "ort-deepspeed"):
        assert combination in dry


@pytest.mark.nightly
@pytest.mark.parametrize("name", SWEEPS)
def test_each_sweep_trains_every_combination(launch, tmp_path: Path, name: str) -> None:
    result = launch(tmp_path, *small(name), "backend=eager", "trainer=ddp,single", "train.batch_size=2")
    assert result.returncode == 0, result.report
    runs = sorted(path.parent.name for path in tmp_path.glob("runs/*/2*/journal.jsonl"))
    assert len(runs) == 2 and len({run.split("-", 2)[2] for run in runs}) == 2
    (sweep,) = tmp_path.glob("runs/*/multirun-*")
    assert f"sweep:      {sweep}\n" in result.stdout


@pytest.mark.parametrize("name", SUBMITTED)
def test_a_job_for_a_cluster_shows_what_it_would_submit(ask, tmp_path: Path, name: str) -> None:
    result = ask(tmp_path, f"+jobs={name}", "device=cpu", "launcher.dry_run=true")
    assert result.returncode == 0, result.stderr
    assert "#SBATCH --nodes=2" in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_what_the_job_for_a_phone_says_comes_next_works(runs, launch) -> None:
    assert runs["resnet_phone"].status == "FINISHED"
    said = re.findall(r"^#   ortlaunch (.*)$", ready_jobs()["resnet_phone"].read_text(), re.MULTILINE)
    assert [command.split()[:2] for command in said] == [["export", "artifacts"], ["export", "verify"]]
    for command in said:
        result = launch(runs.folder, *shlex.split(command))
        assert result.returncode == 0, result.report
    assert (runs.folder / "phone").is_dir()
