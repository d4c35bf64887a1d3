"""Which parts of the standard library and of installed packages give the same in every run."""

from __future__ import annotations

import sys

_PURE = frozenset(
    [
        *("__future__", "abc", "argparse", "builtins", "collections", "contextlib", "copy", "copyreg", "dataclasses"),
        *("decimal", "enum", "fractions", "functools", "heapq", "inspect", "itertools", "keyword", "logging", "math"),
        *("numbers", "operator", "re", "sre", "sre_compile", "statistics", "string", "struct", "textwrap", "types"),
        *("typing", "warnings", "weakref", "bisect", "cmath", "reprlib", "traceback", "colorsys", "annotationlib"),
    ]
)
"""Modules of the standard library whose functions depend on nothing but their arguments."""

UNKNOWN_BUILTINS = frozenset(
    ["breakpoint", "eval", "exec", "compile", "globals", "hash", "id", "input", "locals", "open", "vars", "__import__"]
)
"""Builtins that read values which cannot be followed by name."""
UNKNOWN_NAMES = frozenset(
    [
        "__hash__",
        "__builtins__",
        "__import__",
        "__code__",
        "__globals__",
        "__closure__",
        "f_back",
        "f_locals",
        "f_globals",
    ]
) | {"tb_frame", "gi_frame", "cr_frame", "__subclasses__", "__reduce__", "__reduce_ex__"}
"""Attributes that give addresses, other functions' values, or code that is made at run time."""
FILES = frozenset(
    ("read_text", "read_bytes", "open", "exists", "stat", "lstat", "is_file", "is_dir", "is_symlink", "iterdir", "glob")
) | {"rglob", "resolve", "absolute", "cwd", "home", "expanduser", "owner", "group", "readlink", "samefile", "is_mount"}
"""Methods of a path that look at the file system."""

NOT_PURE = (
    "torch.distributed",
    "numpy.random",
    *(f"inspect.{name}" for name in ("stack", "trace", "currentframe", "getsource", "getsourcelines", "getfile")),
    *(f"types.{name}" for name in ("FunctionType", "LambdaType", "CodeType", "FrameType")),
    *(f"argparse.{name}" for name in ("ArgumentParser", "FileType")),
    *(f"numpy.{name}" for name in ("load", "loadtxt", "fromfile", "genfromtxt", "memmap", "DataSource", "ctypeslib")),
    *(f"torch.{name}" for name in ("load", "from_file", "hub", "package", "serialization", "multiprocessing")),
    *(f"torch.{name}" for name in ("default_generator", "get_rng_state", "initial_seed", "random", "seed", "profiler")),
    *(f"torch.{name}" for name in ("get_num_threads", "get_num_interop_threads", "UntypedStorage", "monitor")),
    *(f"torch.cuda.{name}" for name in ("device_count", "current_device", "memory_allocated", "memory_reserved")),
    *(f"torch.cuda.{name}" for name in ("max_memory_allocated", "mem_get_info", "memory_stats", "utilization")),
    *(f"torch.cuda.{name}" for name in ("get_rng_state", "initial_seed", "get_device_properties", "Event", "seed")),
    *(f"torch.cuda.{name}" for name in ("get_device_name", "get_device_capability", "random", "memory")),
    *(f"torch.utils.{name}" for name in ("data", "cpp_extension", "collect_env")),
    "torch.jit.load",
)
"""Parts of torch and numpy, and of pure modules, that read files, clocks, random numbers or this process."""
DIFFERS = "what it gives can differ from run to run, or from worker to worker"


def gives_the_same(module: str) -> bool:
    """Whether a module of the standard library depends on nothing but the arguments of its functions."""
    return module.partition(".")[0].lstrip("_") in _PURE or module.partition(".")[0] in _PURE


def is_impure(home: str) -> bool:
    """Whether what a module or one of its objects gives may differ from run to run."""
    is_of_the_library = home.partition(".")[0] in sys.stdlib_module_names
    return (is_of_the_library and not gives_the_same(home)) or home.startswith(NOT_PURE)
