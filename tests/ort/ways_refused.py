"""What cannot be described, or differs from run to run, each as a piece of a program."""

from __future__ import annotations

from tests.ort.ways_of_reading import Fragment

REFUSED = {
    "contextvar": Fragment(
        "x = x * V§.get()",
        define="import contextvars\nV§ = contextvars.ContextVar('V§', default=1.0)",
        patch="module.V§.set($)",
    ),
    "weak proxy": Fragment(
        "x = x * W§.rate()",
        define="import weakref\nclass C§:\n    def rate(self):\n        return G§\nO§ = C§()\nW§ = weakref.proxy(O§)\n",
        patch="module.G§ = $",
    ),
    "ndarray subclass": Fragment(
        "x = x * float(A§[0])",
        define="import numpy\nclass Arr§(numpy.ndarray):\n    pass\nA§ = numpy.ones(2).view(Arr§)",
        patch="module.A§[0] = $",
    ),
    "masked array": Fragment(
        "x = x * float(A§.filled(9.)[0])",
        define="import numpy\nA§ = numpy.ma.array([1.0, 2.0])",
        patch="module.A§[0] = $",
    ),
    "ndarray of objects": Fragment(
        "x = x * A§[0]",
        define="import numpy\nA§ = numpy.array([1.0, None], dtype=object)",
        patch="module.A§[0] = $",
    ),
    "bytearray subclass": Fragment(
        "x = x * D§[0]",
        define="class Q§(bytearray):\n    pass\nD§ = Q§(b'1')\n",
        patch="module.D§[0] = int($)",
    ),
    "hash of object": Fragment(
        "x = x * hash(O§)",
        define="class C§:\n    def __hash__(self):\n        return int(G§)\nO§ = C§()\n",
        patch="module.G§ = $",
    ),
    "threading local": Fragment(
        "x = x * V§.rate",
        define="import threading\nV§ = threading.local()",
        patch="module.V§.rate = $",
    ),
    "singledispatch": Fragment(
        "x = x * f§(1)",
        define="@functools.singledispatch\ndef f§(v):\n    return 2.0\n",
        patch="module.f§.register(int, lambda v, w=$: w)",
    ),
    "lru_cache filled": Fragment(
        "x = x * f§()",
        define="G§ = 1.0\n@functools.lru_cache\ndef f§():\n    return G§\n",
        patch="module.G§ = $; module.f§(); module.G§ = 7.0",
    ),
    "lazy import": Fragment(
        "import drawn_lazy§; x = x * drawn_lazy§.V",
        patch="import pathlib; (pathlib.Path(module.__file__).parent / 'drawn_lazy§.py').write_text('V = ' + repr($))",
    ),
}

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
    "Random instance": ("import random\nRNG = random.Random(0)", "RNG.random()"),
    "numpy Generator": ("import numpy\nRNG = numpy.random.default_rng(0)", "RNG.random()"),
    "file object": ("FILE = open(__file__)", "len(FILE.read())"),
    "path object": ("import pathlib\nP = pathlib.Path(__file__)", "len(P.read_text())"),
    "torch.load": ("", "torch.load('x')"),
    "torch.from_file": ("", "torch.from_file('x')"),
    "numpy.load": ("import numpy", "numpy.load('x')"),
    "numpy.fromfile": ("import numpy", "numpy.fromfile('x')"),
    "initial_seed": ("", "torch.initial_seed()"),
    "get_rng_state": ("", "torch.get_rng_state()[0]"),
    "frame": ("import inspect", "inspect.currentframe().f_back.f_locals['a']"),
    "exec via types": ("import types", "types.FunctionType(CODE, {})()"),
    "torch Generator": ("GEN = torch.Generator()", "torch.rand(2, generator=GEN)"),
    "default_generator": ("", "torch.default_generator.initial_seed()"),
    "hash of str": ("", "hash('abc')"),
    "set order": ("", "[len(n) for n in {'abc', 'de'}][0]"),
    "set order built": ("", "[len(n) for n in set(('abc', 'de'))][0]"),
    "num threads": ("", "torch.get_num_threads()"),
    "dunder import": ("", "__builtins__['__import__']('os').getpid()"),
    "cuda memory": ("", "torch.cuda.memory_allocated()"),
    "sys.argv": ("import sys", "len(sys.argv)"),
    "thread ident": ("import threading", "threading.get_ident()"),
    "uuid": ("import uuid", "uuid.uuid4().int"),
    "secrets via torch": ("", "torch.os.getpid()"),
    "random via torch": ("", "torch.random.seed()"),
    "object address": ("", "object().__hash__()"),
    "distributed by alias": ("import torch.distributed as dist", "dist.get_rank()"),
    "env by alias": ("from os import environ as E", "E.get('X')"),
}
"""The statements of a module, and the expression that reads something."""
