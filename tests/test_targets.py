"""A user's modules are looked at and not imported: only what is certainly missing is refused."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.compose.rules import check
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import ModelConfig
from ortlaunch.launch.table import launcher_of
from ortlaunch.models.registry import check_source

BOMB = "raise SystemExit('imported')\n"
NETS = f"""{BOMB}
import torch.nn as nn
from torch.nn import Linear as Layer

class Net(nn.Module):
    def local(self):
        for module in self.modules():
            module.eval()

    def grow(self):
        global Grown
        Grown = Net

if nn:
    def build(): ...
else:
    made = Net
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that ortlaunch was started in, which is not on `sys.path`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "package" / "inner").mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").write_text(BOMB + "from .deep import Deep as _Deep\n")
    (tmp_path / "package" / "deep.py").write_text("class Deep: ...\n")
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "inner" / "deep.py").write_text("class Deep: ...\n")
    (tmp_path / "broken.py").write_text("def build(:\n")
    return tmp_path


def look(target: str, *imports: str, same: bool = True) -> None:
    check_source(ModelConfig(name="factory", target=target, imports=list(imports)), same_environment=same)


@pytest.mark.parametrize(
    "target",
    [
        *("nets:Net", "nets:Net.local", "nets:Layer", "nets:build", "nets:made", "nets:Grown", "nets:nn.Linear"),
        *("package.deep:Deep", "package:deep.Deep", "folder.inner.deep:Deep"),
        *("torch.nn:Linear", "math:sqrt", "os.path:join", "transformers:GPT2LMHeadModel"),
    ],
)
def test_what_is_there_is_found(here: Path, target: str) -> None:
    look(target)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("net:Net", "model.target=net:Net: there is no module 'net', neither in the folder where ortlaunch was"),
        ("nets.py:Net", "(a module is named without .py: nets)"),
        ("nets.deep:Net", "there is no module 'nets.deep'"),
        ("package.deeper:Deep", "there is no module 'package.deeper'"),
        ("folder.inner.deeper:Deep", "there is no module 'folder.inner.deeper'"),
        ("nets:Nett", "nets has no 'Nett'. Did you mean Net?"),
        ("nets:local", "nets has no 'local'"),
        ("nets:Nett.build", "nets has no 'Nett.build'"),
        ("package:deeper.Deep", "package has no 'deeper.Deep'"),
        ("broken:build", "importing broken failed: invalid syntax (broken.py, line 1)"),
    ],
)
def test_what_is_not_there_is_refused(here: Path, target: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        look(target)
    assert words in str(caught.value)
    assert not {"nets", "package", "folder", "broken"} & set(sys.modules)


@pytest.mark.parametrize(
    "text",
    [
        "from torch.nn import *",
        "def __getattr__(name): ...",
        "__getattr__ = print",
        "globals()['Net'] = int",
        "exec('Net = int')",
        "import sys; setattr(sys.modules[__name__], 'Net', int)",
        "import sys; sys.modules[__name__] = int",
        "import sys; sys.modules[__name__].__dict__.update(Net=int)",
    ],
)
def test_a_module_that_may_make_names_is_left_to_the_workers(here: Path, text: str) -> None:
    (here / "makes.py").write_text(text)
    look("makes:Net")
    (here / "makes.py").write_text("pass")
    with pytest.raises(RequestError, match="makes has no 'Net'"):
        look("makes:Net")


def test_a_package_that_says_where_its_modules_lie_is_left_to_the_workers(here: Path) -> None:
    (here / "package" / "__init__.py").write_text("__path__.append('/elsewhere')\n")
    look("package.deeper:Deep")


def test_imports_come_before_the_target_and_may_help_it(here: Path) -> None:
    look("later:Net", "nets")
    with pytest.raises(RequestError, match=r"^model\.imports: net: there is no module 'net'"):
        look("nets:Net", "net")
    with pytest.raises(RequestError, match=r"^model\.imports: nets\.py: there is no module 'nets\.py'"):
        look("nets:Net", "nets.py")
    with pytest.raises(RequestError, match=r"^model\.imports: \./nets\.py: not of the form package\.module"):
        look("nets:Net", "./nets.py")


def test_where_the_workers_have_another_python_only_the_folder_is_judged(here: Path) -> None:
    for target in ("net:Net", "json:dumpss", "folder.inner.deeper:Deep", "broken:build"):
        look(target, same=False)
    for target in ("nets:Nett", "package.deeper:Deep"):
        with pytest.raises(RequestError):
            look(target, same=False)


@pytest.mark.parametrize(
    ("words", "is_judged"),
    [
        ([], True),
        (["launcher=slurm"], True),
        (["launcher=slurm", "launcher.python=/opt/python"], False),
        (["launcher=slurm", "launcher.container.image=/x.sif"], False),
        (["launcher=slurm", "launcher.setup=['module load nets']"], False),
        (["launcher=slurm", "+launcher.env.PYTHONPATH=/lib"], False),
    ],
)
def test_a_job_with_a_python_of_its_own_may_find_other_packages(here: Path, words: list[str], is_judged: bool) -> None:
    config = to_config(compose(["device=cpu", "model=factory", "model.target=net:Net", *words]))
    config = launcher_of(config).settle(config)
    with pytest.raises(RequestError, match="there is no module 'net'") if is_judged else nullcontext():
        check(config)
