"""Whatever a forward's code reads outside of the model's attributes is part of the export cache's key.

Models are generated: each is made of several fragments, and a fragment reads one value in one of the ways that Python
has. Setting one value differently must change the key, and setting all of them to the same must not.
"""

# ruff: noqa: E501
from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ortlaunch.ort.cache import key as export_key
from ortlaunch.ort.cache.files import NotCacheableError

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


@dataclass(frozen=True)
class Fragment:
    """One way to read a value. ``§`` stands for the fragment's number, ``$`` for the value."""

    forward: str
    """Statements of the model's forward."""
    define: str = ""
    """Statements of the module, before the class."""
    init: str = ""
    members: str = ""
    helper: str = ""
    """Statements of another module."""
    patch: str = ""
    """Statements that a program runs after the model was built."""


WAYS = {
    "global": Fragment("x = x * G§", patch="module.G§ = $"),
    "global of a function": Fragment("x = f§(x)", "def f§(x):\n    return x * G§\n", patch="module.G§ = $"),
    "item of a global": Fragment("x = x * T§['a'][0]", "T§ = {'a': [1.0]}", patch="module.T§['a'][0] = $"),
    "tensor of a global": Fragment("x = x * T§", "T§ = torch.ones(2)", patch="module.T§.fill_($)"),
    "closure": Fragment("x = f§(x)", "def make§(value):\n    return lambda x: x * value\n", patch="module.f§ = module.make§($)"),
    "closure of a local class": Fragment(
        "x = self.part§(x)",
        "def make§(value):\n    class Part(torch.nn.Module):\n        def forward(self, x):\n            return x * value\n"
        "    return Part()\n",
        "        self.part§ = torch.nn.Identity()",
        patch="model.part§ = module.make§($)",
    ),
    "closure of a decorator": Fragment(
        "x = f§(x)",
        "def scaled§(value):\n    def wrap(function):\n        @functools.wraps(function)\n        def call(x):\n"
        "            return function(x) * value\n        return call\n    return wrap\ndef plain§(x):\n    return x\n",
        patch="module.f§ = module.scaled§($)(module.plain§)",
    ),
    "default": Fragment("x = f§(x)", "def f§(x, factor=1.0):\n    return x * factor\n", patch="module.f§.__defaults__ = ($,)"),
    "keyword default": Fragment(
        "x = f§(x)", "def f§(x, *, factor=1.0):\n    return x * factor\n", patch="module.f§.__kwdefaults__ = {'factor': $}"
    ),
    "attribute of a function": Fragment("x = x * f§.factor", "def f§():\n    pass\n", patch="module.f§.factor = $"),
    "partial": Fragment(
        "x = f§(x)",
        "def scale§(x, factor):\n    return x * factor\n",
        patch="module.f§ = module.functools.partial(module.scale§, factor=$)",
    ),
    "one of two functions of a line": Fragment(
        "x = f§(x)", "F§ = [lambda x: x * 2, lambda x: x * 3]\n", patch="module.f§ = module.F§[int($ > 1)]"
    ),
    "class attribute": Fragment("x = x * self.C§", members="    C§ = 1.0\n", patch="module.Net.C§ = $"),
    "class attribute of a base": Fragment(
        "x = self.part§(x)",
        "class Base§(torch.nn.Module):\n    C§ = 1.0\nclass Part§(Base§):\n    def forward(self, x):\n        return x * self.C§\n",
        "        self.part§ = Part§()",
        patch="module.Base§.C§ = $",
    ),
    "property": Fragment(
        "x = x * self.p§", members="    @property\n    def p§(self):\n        return G§\n", patch="module.G§ = $"
    ),
    "cached property": Fragment(
        "x = x * self.p§",
        members="    @functools.cached_property\n    def p§(self):\n        return G§\n",
        patch="module.G§ = $",
    ),
    "static method": Fragment(
        "x = self.s§(x)", members="    @staticmethod\n    def s§(x):\n        return x * G§\n", patch="module.G§ = $"
    ),
    "class method": Fragment(
        "x = self.c§(x)", members="    @classmethod\n    def c§(cls, x):\n        return x * cls.C§\n    C§ = 1.0\n",
        patch="module.Net.C§ = $",
    ),
    "replaced method": Fragment(
        "x = self.m§(x)",
        "def other§(self, x):\n    return x * 3\n",
        members="    def m§(self, x):\n        return x * 2\n",
        patch="module.Net.m§ = module.other§ if $ > 1 else module.Net.m§",
    ),
    "operator of an object": Fragment(
        "x = O§ + x",
        "class Op§:\n    def __add__(self, x):\n        return x * G§\nO§ = Op§()\n",
        patch="module.G§ = $",
    ),
    "callable object": Fragment(
        "x = O§(x)",
        "class Op§:\n    def __init__(self):\n        self.factor = 1.0\n    def __call__(self, x):\n        return x * self.factor\n"
        "O§ = Op§()\n",
        patch="module.O§.factor = $",
    ),
    "configuration object": Fragment(
        "x = x * self.cfg§.rate",
        "@dataclass\nclass Cfg§:\n    rate: float = 1.0\n",
        "        self.cfg§ = Cfg§()",
        patch="model.cfg§.rate = $",
    ),
    "method of a configuration object": Fragment(
        "x = x * self.cfg§.rate()",
        "class Cfg§:\n    __slots__ = ('value',)\n    def rate(self):\n        return self.value * G§\n",
        "        self.cfg§ = Cfg§()\n        self.cfg§.value = 1.0",
        patch="module.G§ = $",
    ),
    "object that is made": Fragment(
        "x = x * Made§().value",
        "class Made§:\n    def __init__(self):\n        self.value = G§\n",
        patch="module.G§ = $",
    ),
    "enumeration": Fragment("x = x * E§.value", "class Kind§(enum.Enum):\n    A = 1.0\n    B = 3.0\n",
                            patch="module.E§ = module.Kind§.B if $ > 1 else module.Kind§.A"),
    "name made at run time": Fragment("x = x * getattr(self, 'C' + '§')", members="    C§ = 1.0\n", patch="module.Net.C§ = $"),
    "global of another module": Fragment("x = x * drawn_helper.H§", helper="H§ = 1.0\n", patch="helper.H§ = $"),
    "function of another module": Fragment(
        "x = drawn_helper.h§(x)", helper="H§ = 1.0\ndef h§(x):\n    return x * H§\n", patch="helper.H§ = $"
    ),
    "module imported in a function": Fragment(
        "import drawn_helper as inner; x = x * inner.H§", helper="H§ = 1.0\n", patch="helper.H§ = $"
    ),
    "function under no_grad": Fragment(
        "x = x + f§(x)",
        "@torch.no_grad()\ndef f§(x):\n    return x * G§\n",
        patch="module.G§ = $",
    ),
    "nested function": Fragment(
        "x = (lambda y: y * G§)(x)", patch="module.G§ = $"
    ),
    "hook": Fragment(
        "pass",
        "def make§(value):\n    return lambda module, inputs, output: output * value\n",
        patch="model.linear.register_forward_hook(module.make§($))",
    ),
    "replaced function of torch": Fragment(
        "x = torch.nn.functional.relu6(x)",
        "def make§(value):\n    return lambda x: x * value\n",
        patch="patch(torch.nn.functional, 'relu6', module.make§($))",
    ),
    "replaced method of torch.Tensor": Fragment(
        "x = x.cosh()",
        "def make§(value):\n    return lambda x: x * value\n",
        patch="patch(torch.Tensor, 'cosh', module.make§($))",
    ),
    "function registered with a package": Fragment(
        "x = x",
        "def make§(value):\n    def attention(*args):\n        return value\n    return attention\n",
        "        from transformers.models.gpt2.modeling_gpt2 import GPT2Attention\n"
        "        from transformers import GPT2Config\n"
        "        self.attention§ = GPT2Attention(GPT2Config(n_embd=4, n_head=2))\n",
        patch="register('drawn§', module.make§($))",
    ),
    "function of a package that was replaced": Fragment(
        "x = x",
        "def make§(value):\n    def attention(*args):\n        return value\n    return attention\n",
        "        from transformers.models.gpt2.modeling_gpt2 import GPT2Attention\n"
        "        from transformers import GPT2Config\n"
        "        self.attention§ = GPT2Attention(GPT2Config(n_embd=4, n_head=2))\n",
        patch="import transformers.models.gpt2.modeling_gpt2 as m; patch(m, 'eager_attention_forward', module.make§($))",
    ),
}  # fmt: skip


class Drawn:
    """A generated program with one value for each of its fragments."""

    def __init__(self, folder: Path, ways: list[str], patch: Callable[[object, str, object], None]) -> None:
        self._folder, self._patch = folder, patch
        self._fragments = [(str(number), WAYS[way]) for number, way in enumerate(ways)]
        (folder / "drawn_helper.py").write_text("".join(self._texts("helper")) + "\n")
        body = CLASS.format(
            init="\n".join(self._texts("init")) or "        pass",
            forward="\n".join(f"        {text}" for text in self._texts("forward")),
            members="".join(self._texts("members")),
        )
        (folder / "drawn_model.py").write_text(HEAD + "\n".join(self._texts("define")) + body)

    def _texts(self, part: str) -> list[str]:
        texts = [getattr(fragment, part).replace("§", number) for number, fragment in self._fragments]
        return [text for text in texts if text]

    def facts(self, values: list[float]) -> object:
        """Runs the program anew, as another process would, and writes down what its export depends on."""
        for name in ("drawn_helper", "drawn_model"):
            sys.modules.pop(name, None)
        module, helper = importlib.import_module("drawn_model"), importlib.import_module("drawn_helper")
        model = module.build()
        for (number, fragment), value in zip(self._fragments, values, strict=True):
            statements = fragment.patch.replace("§", number).replace("$", repr(value))
            exec(statements, {"module": module, "helper": helper, "model": model, "torch": torch,
                              "patch": self._patch, "register": self._register})  # fmt: skip
        return export_key.model_facts(model)

    def _register(self, name: str, function: object) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        mapping = type(ALL_ATTENTION_FUNCTIONS)._global_mapping
        self._patch(type(ALL_ATTENTION_FUNCTIONS), "_global_mapping", {**mapping, name: function})


@pytest.fixture
def draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[str]], Drawn]]:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def make(ways: list[str]) -> Drawn:
        return Drawn(tmp_path, ways, monkeypatch.setattr)

    yield make
    for name in ("drawn_helper", "drawn_model"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("way", WAYS)
def test_a_value_that_the_forward_reads_is_part_of_the_key(draw: Callable[[list[str]], Drawn], way: str) -> None:
    program = draw([way])
    first = program.facts([1.0])
    assert program.facts([1.0]) == first
    assert program.facts([3.0]) != first


@pytest.mark.parametrize("seed", range(6))
def test_each_value_of_a_drawn_model_is_part_of_the_key(draw: Callable[[list[str]], Drawn], seed: int) -> None:
    chooser = random.Random(seed)
    ways = chooser.sample(sorted(WAYS), 8)
    program = draw(ways)
    same = [1.0] * len(ways)
    first = program.facts(same)
    assert program.facts(same) == first
    for number, way in enumerate(ways):
        changed = [3.0 if index == number else 1.0 for index in range(len(ways))]
        assert program.facts(changed) != first, way


UNKNOWN = {
    "the environment": ("import os", "os.environ.get('DRAWN', 1)"),
    "a clock": ("import time", "time.time()"),
    "a clock by its name": ("from time import perf_counter", "perf_counter()"),
    "Python's random numbers": ("import random", "random.random()"),
    "Python's random numbers by their name": ("from random import random", "random()"),
    "NumPy's random numbers": ("import numpy", "numpy.random.rand()"),
    "a file": ("", "open(__file__).read()"),
    "a file by its path": ("from pathlib import Path", "Path('x').stat().st_size"),
    "all globals": ("", "globals()"),
    "code made at run time": ("", "eval('2')"),
    "a worker's rank": ("", "torch.distributed.get_rank()"),
    "the number of workers by its name": ("from torch.distributed import get_world_size", "get_world_size()"),
    "a generator that goes on": ("ENDLESS = iter(__import__('itertools').count())", "next(ENDLESS)"),
}


@pytest.mark.parametrize("place", ["module", "forward"])
@pytest.mark.parametrize("what", UNKNOWN)
def test_what_cannot_be_known_beforehand_is_not_cached(
    tmp_path: Path, draw: Callable[[list[str]], Drawn], what: str, place: str
) -> None:
    program = draw([])
    define, expression = UNKNOWN[what]
    before = f"        {define}\n" if place == "forward" and define.startswith(("import", "from")) else ""
    body = CLASS.format(init="", forward=f"{before}        x = x * {expression}", members="")
    (tmp_path / "drawn_model.py").write_text(HEAD + ("" if before else define) + body)
    with pytest.raises(NotCacheableError, match=r"can differ|cannot be known|is a count"):
        program.facts([])


def test_built_in_models_have_the_same_key_twice() -> None:
    from ortlaunch.config.schema import ModelConfig
    from ortlaunch.models.registry import build_model

    for name in ("gpt2_nano", "mlp", "resnet", "vit"):
        one, other = (export_key.model_facts(build_model(ModelConfig(name=name))) for _ in range(2))
        assert one == other
