"""Vectorized functions are called in one thread before anything is computed with them."""

from __future__ import annotations

import subprocess
import sys

PROBE = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if arguments and isinstance(arguments[0], torch.Tensor):
            sizes.setdefault(function.overloadpacket.__name__, arguments[0].numel())
        return function(*arguments, **(keywords or {}))

sizes = {}
with Seen():
    from ortlaunch.trainer.seeds import seed_everything
    seed_everything(0)
print({name: sizes[name] for name in ("tanh", "exp", "erf", "log", "sin")})
"""


def test_their_first_call_is_short() -> None:
    """A process of its own, as a worker is; 64 values are below what torch shares out to threads."""
    ran = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120, check=False)
    assert ran.stdout == "{'tanh': 64, 'exp': 64, 'erf': 64, 'log': 64, 'sin': 64}\n", ran.stderr
