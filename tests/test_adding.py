"""The table "Adding something" of docs/architecture.md is true: adding what it names works with no other change."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.packages import install_metadata

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"

ADDED = {
    "a model": (
        "models/built_in/NAME.py",
        '''
from ortlaunch.models.registry import register_model


@register_model("mine", inputs="tokens")
def build(width=8):
    """a model of mine"""
    from torch import nn

    return nn.Sequential(nn.Embedding(16, width), nn.Linear(width, 16))
''',
    ),
    "a data source": (
        "data/sources/NAME.py",
        '''
from dataclasses import dataclass

from ortlaunch.config.options import option
from ortlaunch.config.schema import TokenDataConfig


@option("data")
@dataclass
class MineConfig(TokenDataConfig):
    """Tokens that count."""

    name: str = "mine"
    top: int = 16
    """Tokens are smaller than this."""

    def open(self, share):
        import numpy as np

        from ortlaunch.data.source import array_source

        return array_source(np.arange(10_000) % self.top, self.seq_len, "data=mine", self.top)
''',
    ),
    "an optimizer": (
        "trainer/optimizers.py",
        '''
from dataclasses import dataclass

from ortlaunch.config.options import option
from ortlaunch.config.schema import OptimizerConfig


@option("optimizer")
@dataclass
class MineConfig(OptimizerConfig):
    """Adagrad."""

    name: str = "mine"
    lr: float = 0.5
    lr_decay: float = 0.0
    """How fast the rate falls by itself."""

    def build(self, groups):
        from torch.optim import Adagrad

        return Adagrad(groups, lr=self.lr, lr_decay=self.lr_decay)
''',
    ),
    "a schedule": (
        "trainer/schedules.py",
        '''
from dataclasses import dataclass

from ortlaunch.config.options import option
from ortlaunch.config.schema import SchedulerConfig


@option("scheduler")
@dataclass
class MineConfig(SchedulerConfig):
    """Falls to a fifth at once."""

    name: str = "mine"
    floor: float = 0.2
    """What it falls to."""

    def ratio(self, progress):
        return self.floor if progress else 1.0
''',
    ),
    "a trap of ONNX Runtime": (
        "ort/verify/traps/NAME.py",
        """
from ortlaunch.ort.verify.trap import trap


@trap("mine", "Do something about it")
def look(examination):
    return f"{len(examination.batches)} batches were looked at"
""",
    ),
    "a metric": (
        "metrics/worker/NAME.py",
        """
from ortlaunch.metrics.at_log_steps import measured_by_every_worker


@measured_by_every_worker("mine")
def mine(device):
    return {"mine/answer": 42.0}
""",
    ),
}
"""Rows of the table that add a file, or a class to one: where it goes, and one that does."""

CHOSEN = {"a model": "model", "a data source": "data", "an optimizer": "optimizer", "a schedule": "scheduler"}
"""The config groups of which such a row adds an option."""


def table() -> dict[str, str]:
    """The rows of the table."""
    text = PAGE.read_text().partition("## Adding something\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {what: " | ".join(where) for what, *where in rows[2:]}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the program with all of `ADDED`, and nothing else that is new."""
    copy = tmp_path_factory.mktemp("tree")
    for folder in ("ortlaunch", "conf", "jobs", "slurm"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path, text in ADDED.values():
        file = copy / "ortlaunch" / path.replace("NAME", "mine")
        assert file.exists() is ("NAME" not in path)
        with file.open("a") as end:
            end.write(text)
    return copy


def command(tree: Path, cwd: Path, *arguments: str, packages: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The public command of that copy, to its end."""
    path = os.pathsep.join(str(part) for part in (tree, packages) if part)
    return subprocess.run(
        [sys.executable, "-m", "ortlaunch", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_every_file_and_folder_that_the_table_names_exists() -> None:
    rows = table()
    assert set(ADDED) <= set(rows)
    for what, where in rows.items():
        for path in re.findall(r"`([\w./-]+/[\w./-]*|[\w-]+\.py)`", where):
            # A file that is to be added is named by what it is called; its folder is there.
            named = path.rpartition("/")[0] if "NAME" in path else path
            assert (ROOT / named).exists() or (ROOT / "ortlaunch" / named).exists(), f"{what}: {path}"


def test_every_row_names_the_tests_of_what_is_added() -> None:
    without = [
        what for what, cells in table().items() if not re.search(r"`tests/[\w/.-]+`", cells.rpartition(" | ")[2])
    ]
    assert without == []


@pytest.mark.parametrize("what", ADDED)
def test_the_table_names_the_file_that_is_added_or_changed_here(what: str) -> None:
    assert f"`{ADDED[what][0]}`" in table()[what]


def test_added_options_are_listed_and_composed(tree: Path, tmp_path: Path) -> None:
    page = command(tree, tmp_path, "--help").stdout
    composed = command(tree, tmp_path, *(f"{group}=mine" for group in CHOSEN.values()), "--cfg", "job")
    assert composed.returncode == 0, composed.stderr
    for group in CHOSEN.values():
        (row,) = [line for line in page.splitlines() if line.startswith(f"  {group} ")]
        assert re.search(r"\bmine\b", row)
        assert f"{group}:\n  name: mine\n" in composed.stdout


@pytest.mark.parametrize("group", ["model", "optimizer"])
def test_an_added_option_is_what_a_misspelt_one_means(tree: Path, tmp_path: Path, group: str) -> None:
    near = command(tree, tmp_path, f"{group}=mien", "--cfg", "job")
    assert near.returncode == 2
    assert f"Did you mean {group}=mine?" in near.stderr


@pytest.mark.ort
def test_a_run_trains_with_all_that_was_added(tree: Path, tmp_path: Path) -> None:
    run = command(
        tree,
        tmp_path,
        *(f"{group}=mine" for group in CHOSEN.values()),
        *("backend=ort", "backend.allow=[mine]", "backend.export_cache=false", "trainer=single"),
        *("device=cpu", "tracking=none", "train.steps=2", "train.log_every=1"),
        *("model.params={width:4}", "data.seq_len=8", "data.top=12", "optimizer.lr=0.25", "scheduler.floor=0.1"),
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (journal,) = tmp_path.glob("runs/default/*/journal.jsonl")
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    logged = [event["values"] for event in events if "train/loss" in event.get("values", ())]
    assert [metrics["train/lr"] for metrics in logged] == [0.25, 0.025]
    assert [metrics["mine/answer"] for metrics in logged] == [42.0, 42.0]
    # The trap was looked for, found something, and was allowed.
    assert {"ortlaunch.allowed": "mine"} in [event.get("values") for event in events]


def test_an_installed_package_adds_options_too(tmp_path: Path) -> None:
    """By entry points, without a copy of the program: its module is that of `ADDED` under another name."""
    packages = tmp_path / "packages"
    optimizers = ["theirs = their_optimizer:MineConfig", "broken = their_optimizer:NoConfig"]
    install_metadata(
        packages,
        "theirs",
        {
            "ortlaunch.data": ["theirs = their_data:MineConfig"],
            "ortlaunch.optimizers": optimizers,
            "ortlaunch.schedulers": ["theirs = their_scheduler:MineConfig"],
        },
    )
    for what in ("a data source", "an optimizer", "a schedule"):
        (packages / f"their_{CHOSEN[what]}.py").write_text(re.sub(r"\bmine\b", "theirs", ADDED[what][1]))
    arguments = ("data=theirs", "optimizer=theirs", "scheduler=theirs", "optimizer.lr_decay=0.5", "--cfg", "job")
    composed = command(ROOT, tmp_path, *arguments, packages=packages)
    assert composed.returncode == 0, composed.stderr
    for lines in ("data:\n  name: theirs\n", "optimizer:\n  name: theirs\n", "  lr_decay: 0.5\n"):
        assert lines in composed.stdout
    broken = command(ROOT, tmp_path, "optimizer=broken", "--cfg", "job", packages=packages)
    assert broken.returncode == 2
    assert "optimizer=broken (their_optimizer:NoConfig of the package theirs): cannot be imported" in broken.stderr
