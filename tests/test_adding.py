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
    "a trainer": (
        "config/trainers/NAME.py",
        """
from dataclasses import dataclass

from ortlaunch.config.trainers.single import SingleConfig, SingleTrainer


@dataclass(eq=False, repr=False)
class MineConfig(SingleConfig):
    \"\"\"One worker, and my rules.\"\"\"

    name: str = "mine"


class MineTrainer(SingleTrainer):
    schema = MineConfig
""",
    ),
    "a hook": (
        "hooks.py",
        """

class Mine:
    def step(self, run):
        run.log_metric("mine/step", float(run.step))
""",
    ),
    "a route of the service": (
        "serve/api/NAME.py",
        """
from typing import Annotated

from fastapi import APIRouter, Depends

from ortlaunch.serve.access import Caller, Role, needs
from ortlaunch.serve.service import Service, service_of

router = APIRouter()


@router.get("/api/mine")
def mine(
    service: Annotated[Service, Depends(service_of)], caller: Annotated[Caller, Depends(needs(Role.viewer))]
) -> dict[str, str]:
    service.limits.mine.take(caller.name)
    return {"name": caller.name}
""",
    ),
}
"""Rows of the table that add a file, or a class to one: where it goes, and one that does."""

BACKEND = '''@dataclass(eq=False, repr=False)
class MineBackend(BackendConfig):
    """Mine."""

    name: str = "mine"
    share: float = 0.5
    """How much of it."""


'''

EDITED = {
    "a trainer": [
        ("config/trainers/__init__.py", "_ALL: tuple[Trainer[Any], ...] = (", "{}MineTrainer(), "),
        (
            "config/trainers/__init__.py",
            "from ortlaunch.config.trainers.fsdp import FsdpTrainer\n",
            "{}from ortlaunch.config.trainers.mine import MineTrainer\n",
        ),
    ],
    "a backend": [
        ("config/schema.py", "@dataclass(eq=False, repr=False)\nclass AutoConfig(", f"{BACKEND}{{}}"),
        ("config/schema.py", '"backend": {', '{}"mine": MineBackend, '),
        (
            "trainer/wrapping.py",
            "    if isinstance(cfg, CompileConfig):\n        _check",
            '    if cfg.name == "mine":\n        print("wrapped by", cfg.share)\n{}',
        ),
    ],
    "a precision": [
        ("config/schema.py", '    fp16 = "fp16"\n', '{}    mine = "mine"\n'),
        ("trainer/precision.py", "Precision.fp16: torch.float16", "{}, Precision.mine: torch.bfloat16"),
    ],
    "an operator's correction": [
        (
            "ort/operators/table.py",
            "ROWS = (\n",
            '{}    Row("embedding", lambda *_: print("mine is corrected") is None, "it has to say so"),\n',
        ),
    ],
    "a key that changes the loop": [
        (
            "config/schema.py",
            "    grad_accumulation: int =",
            '    mine: float = number(0, least=0)\n    """Mine."""\n{}',
        ),
        ("trainer/loop.py", "        lr = engine.lr\n", "{}        lr += session.config.train.mine\n"),
    ],
    "a limit of the service": [
        (
            "serve/limits.py",
            "    forgetting: Bucket",
            "    mine: Bucket = field(default_factory=lambda: Bucket(1, 60.0))\n{}",
        ),
    ],
}
"""Rows that also change a file: where, what is there, and what it becomes."""

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
    for changes in EDITED.values():
        for path, there, becomes in changes:
            file = copy / "ortlaunch" / path
            assert file.read_text().count(there) == 1, f"{path}: {there}"
            file.write_text(file.read_text().replace(there, becomes.replace("{}", there)))
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
    assert set(ADDED) | set(EDITED) <= set(rows)
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


@pytest.mark.parametrize("what", [*ADDED, *(what for what in EDITED if what not in ADDED)])
def test_the_table_names_the_files_that_are_added_or_changed_here(what: str) -> None:
    paths = [ADDED[what][0]] if what in ADDED else []
    for path in [*paths, *(path for path, _, _ in EDITED.get(what, []))]:
        assert f"`{path}`" in table()[what]


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
        *("device=cpu", "tracking=none", "train.steps=2", "train.log_every=1", "train.mine=1"),
        "train.hooks=[{target: ortlaunch.hooks:Mine}]",
        *("model.params={width:4}", "data.seq_len=8", "data.top=12", "optimizer.lr=0.25", "scheduler.floor=0.1"),
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (journal,) = tmp_path.glob("runs/default/*/journal.jsonl")
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    logged = [event["values"] for event in events if "train/loss" in event.get("values", ())]
    # What the key of the loop adds to the schedule's.
    assert [metrics["train/lr"] for metrics in logged] == [1.25, 1.025]
    assert [event["values"]["mine/step"] for event in events if "mine/step" in event.get("values", ())] == [1.0, 2.0]
    assert "mine is corrected" in "".join(path.read_text() for path in journal.parent.glob("logs/*.log"))
    assert [metrics["mine/answer"] for metrics in logged] == [42.0, 42.0]
    # The trap was looked for, found something, and was allowed.
    assert {"ortlaunch.allowed": "mine"} in [event.get("values") for event in events]


def test_a_run_trains_with_a_trainer_a_backend_and_a_precision(tree: Path, tmp_path: Path) -> None:
    words = ("model=mlp", "trainer=mine", "backend=mine", "backend.share=0.25", "train.precision=mine")
    run = command(tree, tmp_path, *words, "device=cpu", "tracking=none", "train.steps=2")
    assert run.returncode == 0, run.stdout + run.stderr
    (log,) = tmp_path.glob("runs/default/*/logs/rank-0.log")
    assert "wrapped by 0.25" in log.read_text()


ASKS = """
import sys
from pathlib import Path
from ortlaunch.serve.access import Role
from tests.support.service import in_process

service = in_process(Path(sys.argv[1]))
client, token = service.client(), service.token("vera", Role.viewer)
print([client.get("/api/mine", headers=headers).status_code for headers in ({}, token, token)])
"""


def test_a_route_asks_for_a_role_and_keeps_to_a_limit(tree: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([str(tree), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path}
    asked = subprocess.run(
        [sys.executable, "-c", ASKS, str(tmp_path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert asked.stdout == "[401, 200, 429]\n", asked.stderr


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
