"""A kept graph in which a value differs that the key may not see is not run: the start exports anew, and is right.

Models are generated: each reads a value in one of the ways that Python has. A start with one value keeps a graph, and a
start with another value must find it out.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ortlaunch.config.schema import OrtConfig
from ortlaunch.models.task import Batch, make_task
from ortlaunch.ort import session
from ortlaunch.ort.verify.start import QuickCheck
from tests.ort import ways_of_reading, ways_of_replacing
from tests.ort.ways_of_reading import Fragment
from tests.support.nightly import first_in_ci

OUTSIDE = {
    "environment": Fragment(
        "x = x * float(os.environ.get('DRAWN§', 1))", "import os", patch="patch(module.os.environ, 'DRAWN§', $)"
    ),
    "file": Fragment(
        "x = x * float(pathlib.Path(__file__).with_name('drawn§.txt').read_text())",
        "import pathlib",
        patch="import pathlib; pathlib.Path(module.__file__).with_name('drawn§.txt').write_text(repr($))",
    ),
}
WAYS: dict[str, Fragment] = OUTSIDE | ways_of_replacing.WAYS | ways_of_reading.WAYS
HEAD = "import enum\nimport functools\nfrom dataclasses import dataclass, field\nimport torch\nimport drawn_helper\n"
CLASS = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
{init}

    def forward(self, x):
        x = self.linear(x)
{forward}
        return x
{members}

def build():
    return Net()
"""


def written(folder: Path, fragment: Fragment) -> None:
    def text(part: str) -> str:
        return str(getattr(fragment, part)).replace("§", "0")

    (folder / "drawn_helper.py").write_text(f"{text('helper')}\n")
    forward = f"        {text('forward')}"
    body = CLASS.format(init=text("init") or "        pass", forward=forward, members=text("members"))
    (folder / "drawn_model.py").write_text(f"{HEAD}{text('define')}\n{body}")


@contextlib.contextmanager
def made(folder: Path, fragment: Fragment, value: float) -> Iterator[torch.nn.Module]:
    """Runs the program anew, as another process would, and gives its model."""
    for name in [name for name in sys.modules if name.startswith("drawn_")]:
        del sys.modules[name]
    importlib.invalidate_caches()
    with pytest.MonkeyPatch.context() as patches:
        patches.syspath_prepend(folder)
        patches.setattr(sys, "dont_write_bytecode", True)

        def patch(owner: object, name: str, value: object) -> None:
            if isinstance(owner, type(importlib.import_module("os").environ)):
                patches.setenv(name, repr(value))
            else:
                patches.setattr(owner, name, value, raising=False)

        module, helper = importlib.import_module("drawn_model"), importlib.import_module("drawn_helper")
        torch.manual_seed(0)
        model = module.build()
        scope = {"module": module, "helper": helper, "model": model, "torch": torch, "patch": patch}
        exec(fragment.patch.replace("§", "0").replace("$", repr(value)), scope)
        yield model


def start(folder: Path, fragment: Fragment, value: float) -> None:
    """Starts a run's check, which finds nothing, and compares the gradients with PyTorch's."""
    with made(folder, fragment, value) as model:
        data: list[Batch] = [{"x": torch.rand(4, 2), "labels": torch.randint(0, 2, (4,))} for _ in range(3)]
        task = make_task(model, data[0])
        ort = session.wrap(model, OrtConfig(), threads=1, onnx_dir=None)
        assert QuickCheck(ort, task, contextlib.nullcontext).findings(data) == []
        expected, actual = (torch.autograd.grad(task.loss(one, data[0]), [*model.parameters()]) for one in (model, ort))
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("way", first_in_ci(WAYS, 12))
def test_a_kept_graph_with_another_value_is_not_run(tmp_path: Path, way: str) -> None:
    written(tmp_path, WAYS[way])
    start(tmp_path, WAYS[way], 1.0)
    start(tmp_path, WAYS[way], 3.0)
