"""The memory check before a run on a GPU. A program stands in for nvidia-smi, because this machine has no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.launch.memory.question import key_of
from tests.support.cli import ortlaunch

WORDS = ("model=gpt2_nano", "model.params.n_layer=1", "data.seq_len=512", "train.batch_size=256", "device=cuda")
WORDS += ("backend=eager", "trainer=ddp")


@pytest.fixture
def gpus_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the MiB of each GPU, one in a line."""
    sizes, program = tmp_path / "sizes", tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncase $1 in\n-L) sed 's/.*/GPU 0: stand-in/' {sizes};;\n*) cat {sizes};;\nesac\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return sizes


def test_a_run_that_needs_more_than_its_gpu_is_refused(tmp_path: Path, gpus_of: Path) -> None:
    gpus_of.write_text("24000\n2500\n")
    result = ortlaunch(tmp_path, *WORDS, "train.memory_check=error")
    assert result.returncode == 2, result.stdout + result.stderr
    assert "does not fit into memory: a worker takes" in result.stderr
    assert "and 2.44 GiB are there (a GPU of this machine)" in result.stderr
    assert not (tmp_path / "runs").exists()
    # What was found is kept.
    known = ortlaunch(tmp_path, *WORDS, "launcher.dry_run=true")
    assert "does not fit into memory: a worker takes" in known.stderr
    gpus_of.write_text("81559\n")
    assert "into memory" not in ortlaunch(tmp_path, *WORDS, "launcher.dry_run=true").stderr


@pytest.mark.parametrize("word", ["launcher.allocator=keep", "launcher.threads=7"])
def test_another_allocator_or_more_threads_are_another_question(word: str) -> None:
    plain, other = (to_config(compose(["model=mlp", "device=cpu", *words])) for words in ([], [word]))
    assert key_of(plain, 2, 1) != key_of(other, 2, 1)


def test_the_same_run_on_the_cpu_is_another_question() -> None:
    on_gpu, on_cpu = (to_config(compose([*WORDS, f"device={device}"])) for device in ("cuda", "cpu"))
    assert key_of(on_gpu, 2, 1) != key_of(on_cpu, 2, 1)
