"""A generated program whose model reads values in ways of `ways_of_reading`.

As a script it computes the key of a program that was written before, in a process of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ortlaunch.ort.cache import key as export_key
from ortlaunch.ort.cache import torch_state
from tests.ort import ways_of_reading, ways_of_replacing
from tests.ort.ways_of_reading import Fragment

WAYS: dict[str, Fragment] = ways_of_reading.WAYS | ways_of_replacing.WAYS
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


class Drawn:
    """A generated program with one value for each of its fragments."""

    def __init__(self, folder: Path, fragments: list[Fragment]) -> None:
        self._folder = folder
        self._fragments = [(str(number), fragment) for number, fragment in enumerate(fragments)]

    def write(self) -> Drawn:
        """Writes the program's two files."""
        (self._folder / "drawn_helper.py").write_text("".join(self._texts("helper")) + "\n")
        body = CLASS.format(
            init="\n".join(self._texts("init")) or "        pass",
            forward="\n".join(f"        {text}" for text in self._texts("forward")),
            members="".join(self._texts("members")),
        )
        (self._folder / "drawn_model.py").write_text(HEAD + "\n".join(self._texts("define")) + body)
        return self

    def _texts(self, part: str) -> list[str]:
        texts = [getattr(fragment, part).replace("§", number) for number, fragment in self._fragments]
        return [text for text in texts if text]

    def key(self, values: list[float]) -> str:
        """Runs the program anew, as another process would; returns a digest of what its export depends on."""
        for name in [name for name in sys.modules if name.startswith("drawn_")]:
            del sys.modules[name]
        importlib.invalidate_caches()
        with pytest.MonkeyPatch.context() as patches:
            model = self._run(values, patches)
            facts = [export_key.model_facts(model), torch_state.functions_of_torch()]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def _run(self, values: list[float], patches: pytest.MonkeyPatch) -> torch.nn.Module:
        def patch(owner: object, name: str, value: object) -> None:
            patches.setattr(owner, name, value, raising=False)

        def register(name: str, function: object) -> None:
            from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

            mapping = type(ALL_ATTENTION_FUNCTIONS)._global_mapping
            patch(type(ALL_ATTENTION_FUNCTIONS), "_global_mapping", {**mapping, name: function})

        module, helper = importlib.import_module("drawn_model"), importlib.import_module("drawn_helper")
        model = module.build()
        scope = {"module": module, "helper": helper, "model": model, "torch": torch}
        scope |= {"patch": patch, "register": register}
        for (number, fragment), value in zip(self._fragments, values, strict=True):
            exec(fragment.patch.replace("§", number).replace("$", repr(value)), dict(scope))
        return model


@contextlib.contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Lets Python find the programs in this folder."""
    with pytest.MonkeyPatch.context() as patches:
        patches.syspath_prepend(folder)
        patches.setattr(sys, "dont_write_bytecode", True)
        yield
        for name in [name for name in sys.modules if name.startswith("drawn_")]:
            del sys.modules[name]


if __name__ == "__main__":
    with importable(Path(sys.argv[1])):
        ways = sys.argv[2:]
        print(Drawn(Path(sys.argv[1]), [WAYS[way] for way in ways]).key([1.0] * len(ways)))
