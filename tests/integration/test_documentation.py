"""Every command of README.md, the guide and the tutorial is run: in order, in one folder a page, on small models."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ortlaunch.cli import VERBS
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from tests.support.chat import write_classifier, write_model

ROOT = Path(__file__).parents[2]
_ID = "1a2b3c"
"""What the pages write where a reader puts the short id of a run."""
_GPT2 = ("vocab_size=256", "n_embd=32", "n_layer=1", "n_head=2")
_SMALL = {
    "gpt2": _GPT2,
    "gpt2_nano": _GPT2,
    "resnet": ("hidden_sizes=[32]", "depths=[1]"),
    "mlp": (),
    "bytes": ("width=16", "depth=1"),
}
_SHORT = ("device=cpu", "train.steps=2", "train.log_every=1", "launcher.workers_per_node=1")


def commands(page: str) -> list[str]:
    """The lines of a page's code blocks that are commands, without what a comment says of them."""
    found = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    blocks = [text for language, text in found if language in ("", "sh")]
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [re.sub(r"\s+#.*", "", line) for line in lines if line.startswith(("ortlaunch ", "make ", "source "))]


def files(page: str) -> dict[str, str]:
    """The files that a page has the reader write: its code blocks with a title."""
    found = re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```', (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    return dict(found)


def trains(words: list[str]) -> bool:
    return words[0] not in VERBS and "launcher.dry_run=true" not in words


def shortened(words: list[str]) -> list[str]:
    """The same command over few steps of a small model."""
    asked = [word for word in words if not word.startswith(("--", "+after", "repeat=")) and "," not in word]
    config = to_config(compose(asked))
    params = [f"model.params.{param}" for param in _SMALL[config.model.name]]
    tokens = ["data.seq_len=32"] if hasattr(config.data, "seq_len") else []
    keys = {word.partition("=")[0] for word in (*_SHORT, *tokens)}
    # Keys after an option would be taken for its values.
    return [*_SHORT, *params, *tokens, *(word for word in words if word.partition("=")[0] not in keys)]


def test_the_pages_name_commands() -> None:
    for page, least in (("README.md", 14), ("docs/guide.md", 18), ("docs/tutorial.md", 14)):
        assert len(commands(page)) >= least
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "constraints-torch26.txt"):
        for target in re.findall(r"(?:`|^)make ([a-z][a-z0-9-]+)", page.read_text(), re.MULTILINE):
            assert target in targets, f"{page}: make {target}"


def test_the_first_five_minutes_work(launch, tmp_path: Path) -> None:
    """README's first commands, to the comparison."""
    first = commands("README.md")
    first = first[: 1 + next(at for at, words in enumerate(first) if words.startswith("ortlaunch compare"))]
    assert len(first) == 3
    for words in [shlex.split(command)[1:] for command in first if command.startswith("ortlaunch ")]:
        result = launch(tmp_path, *(shortened(words) if trains(words) else words))
        assert result.returncode == 0, f"{words}\n{result.report}"
    assert result.stdout.count("FINISHED") == 2


@pytest.fixture
def beginner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of somebody who has typed the files of the tutorial."""
    for name, text in files("docs/tutorial.md").items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (tmp_path / "corpus.txt").write_text("In the beginning was the word. " * 500)
    monkeypatch.setenv("ORTLAUNCH_JOBS", str(tmp_path / "jobs"))
    return tmp_path


def test_the_tutorials_model_trains(launch, beginner: Path) -> None:
    """The files of the tutorial, and its first run."""
    assert sorted(files("docs/tutorial.md")) == ["jobs/bytes.yaml", "nets.py"]
    first = next(words for words in map(shlex.split, commands("docs/tutorial.md")) if words[1:] == ["+jobs=bytes"])
    result = launch(beginner, *shortened(first[1:]))
    assert result.returncode == 0, result.report
    assert "step 2/2  eval loss" in result.stdout


def test_every_command_about_ones_own_data_works(launch, tmp_path: Path) -> None:
    for name, text in files("docs/data.md").items():
        (tmp_path / name).write_text(text)
    trained, estimated = map(shlex.split, commands("docs/data.md"))
    result = launch(tmp_path, *trained[1:], "train.steps=50", "device=cpu")
    assert result.returncode == 0, result.report
    assert "step 50/50  eval loss" in result.stdout
    assert launch(tmp_path, *estimated[1:], "device=cpu").returncode == 0


@pytest.mark.nightly
def test_every_command_about_chats_works(launch, tmp_path: Path) -> None:
    for name, text in files("docs/chat.md").items():
        (tmp_path / name).write_text(text)
    write_model(tmp_path / "model")
    write_classifier(tmp_path / "classifier")
    for words in map(shlex.split, commands("docs/chat.md")):
        more = () if words[1] == "export" else ("device=cpu", "launcher.workers_per_node=1")
        result = launch(tmp_path, *words[1:], *more)
        assert result.returncode == 0, result.report
    assert "eval/accuracy" in result.stdout or "accuracy" in result.stdout
    assert (tmp_path / "adapter" / "adapter_config.json").is_file() and (tmp_path / "whole" / "config.json").is_file()


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_every_command_of_the_tutorial_works(launch, start, beginner: Path) -> None:
    """In order. What goes to the cluster is composed alone: tests/slurm submits to a real one."""
    long = None
    for command in commands("docs/tutorial.md"):
        program, *words = shlex.split(command)
        if program != "ortlaunch":
            continue
        if "name=long" in words:
            long = start(beginner, *shortened(words), "train.steps=100000")
            run_dir = long.wait_for_training()
            continue
        if words[0] == "resume":
            words = ["resume", "long", f"train.steps={_steps_taken(run_dir) + 1}"]
        elif words[:2] == ["status", "cluster"]:
            words[1] = "long"
        elif words[0] == "bench":
            words = ["bench", *shortened(words[1:]), "repeat=1"]
        elif "launcher=slurm" in words:
            words = [*words, "device=cpu", *["launcher.dry_run=true"] * ("launcher.dry_run=true" not in words)]
        elif trains(words) and "launcher.dry_run=true" not in words and "batch_size=16" not in words:
            words = shortened(words)
        words = [word.replace(_ID, run_dir.name.rpartition("-")[2]) if long else word for word in words]
        result = launch(beginner, *words)
        refused = "batch_size=16" in words
        assert result.returncode == (2 if refused else 0), f"{command}\n{words}\n{result.report}"
        if words[0] == "cancel":
            assert long is not None and long.finish().returncode == 130
    assert (beginner / "weights").is_dir() and (beginner / "server").is_dir() and (beginner / "bytes.html").is_file()


def _steps_taken(run_dir: Path) -> int:
    """The step of the newest checkpoint."""
    return max(int(path.name.partition("-")[2]) for path in run_dir.glob("checkpoints/step-*"))


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("page", "made"), [("README.md", ["weights"]), ("docs/guide.md", ["weights", "phone"])])
def test_every_command_works(launch, tmp_path: Path, page: str, made: list[str]) -> None:
    (tmp_path / "corpus.txt").write_text("In the beginning was the word. " * 500)
    (tmp_path / "train.py").write_text("print('a script of their own')")
    done: set[str] = set()
    for command in commands(page):
        program, *words = shlex.split(command)
        if program != "ortlaunch" or command in done:
            continue
        done.add(command)
        folders = sorted(tmp_path.glob("runs/*/2*"), key=lambda folder: folder.stat().st_mtime)
        if folders:
            newest = folders[-1]
            known = newest.name.rpartition("-")[2]
            words = [str(newest) if word.endswith(f"-{_ID}") else word.replace(_ID, known) for word in words]
        if words[0] == "resume":
            words[-1] = "train.steps=3"
        elif words[0] == "bench":
            words = ["bench", *(re.sub("^repeat=.*", "repeat=1", word) for word in shortened(words[1:]))]
        elif trains(words) and "--" not in words:
            words = shortened(words)
        elif "launcher.dry_run=true" in words:
            words.append("device=cpu")
        result = launch(tmp_path, *words)
        assert result.returncode == 0, f"{command}\n{words}\n{result.report}"
        assert result.stdout.strip(), command
    assert all((tmp_path / name).is_dir() for name in made)


@pytest.mark.nightly
def test_the_page_on_scripts_can_be_followed(launch, tmp_path: Path) -> None:
    """Its script, and every command of its second block, in order."""
    for name, text in files("docs/script.md").items():
        (tmp_path / name).write_text(text)
    followed = [words for words in map(shlex.split, commands("docs/script.md")) if "hello" in " ".join(words)]
    assert len(followed) == 4
    for words in [*followed, ["ortlaunch", "jobs"], ["ortlaunch", "compare"]]:
        result = launch(tmp_path, *words[1:])
        assert result.returncode == 0, f"{words}\n{result.report}"
    # Two runs of one learning rate are repeats of each other.
    assert result.stdout.count("FINISHED") == 2
    assert all(value in result.stdout for value in ("args.lr", "0.1", "0.3"))
