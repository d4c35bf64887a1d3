"""Watches what runs while a model is exported: all of it must be in the key, and nothing may come from outside.

The key follows names in the code (`reachable_code`). This is the second look at the same thing, from the other side:
code that ran and that the key does not describe, and calls that give something else in another run, keep an export from
being stored, in whichever way the forward came to them.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

from ortlaunch.ort.cache import files
from ortlaunch.ort.cache.files import Origin
from ortlaunch.ort.cache.standard_library import UNKNOWN_BUILTINS, gives_the_same, is_impure

_FORWARD = "_FlattenedModule.forward"
_MAY_ASK = ("logging", "warnings", "traceback", "linecache", "importlib", "contextlib", "threading", "_bootstrap")
"""Modules of the standard library that look at the time or at files only to write a message or to find a module."""
_BOOKKEEPING = ("contextvars", "threading", "thread", "importlib", "gc", "sys", "posixpath", "genericpath")
"""Modules of the standard library that installed packages ask about themselves, and not about a model."""
_COMPILED = ("torch", "numpy", "onnxruntime", "builtins", "ortlaunch")
"""Packages whose compiled functions are known; of torch's and numpy's, those that are not pure are known by name."""
_METHODS = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)


class Executed:
    """What ran in the forwards of one export."""

    def __init__(self) -> None:
        self.users_codes: dict[types.CodeType, str] = {}
        """The user's code, and the module of each."""
        self.from_outside: list[str] = []
        """Calls whose result can differ in another run, each once."""
        self._origins: dict[types.CodeType, Origin] = {}
        self._calls: set[Any] = set()
        self._numbers: list[Any] = []

    def drawn(self, *, is_over: bool) -> None:
        """Compares numpy's random numbers at both ends of a forward; ORTModule restores them after an export."""
        numbers = _state_of_random_numbers()
        if is_over and numbers != self._numbers:
            self.from_outside.append("numpy.random")
        self._numbers = numbers

    def called(self, frame: types.FrameType) -> None:
        """Takes a function that was entered."""
        code = frame.f_code
        if code not in self._origins:
            self._origins[code] = _origin(frame)
            if self._origins[code] is Origin.USER:
                self.users_codes[code] = str(frame.f_globals.get("__name__"))
        if self._origins[code] is not Origin.OWN:
            return
        home = str(frame.f_globals.get("__name__"))
        if (home, frame.f_back and frame.f_back.f_code) in self._calls:
            return
        self._calls.add((home, frame.f_back and frame.f_back.f_code))
        if is_impure(home):
            self._note(frame.f_back, f"{home}.{code.co_qualname}")

    def called_c(self, frame: types.FrameType, function: Any) -> None:
        """Takes a compiled function that is about to be called."""
        home = _home(function)
        key = (frame.f_code, home, function.__name__)
        if key in self._calls:
            return
        self._calls.add(key)
        name = function.__name__
        if _package(frame) in sys.stdlib_module_names and gives_the_same(_package(frame)):
            # A module such as inspect asks for itself.
            return
        is_unknown = home in ("builtins", "io", "_io") and name in UNKNOWN_BUILTINS - {"hash", "id", "vars", "locals"}
        if is_unknown or is_impure(home) or not _is_known(home):
            self._note(frame, f"{home}.{name}")

    def _note(self, frame: types.FrameType | None, what: str) -> None:
        """Notes a call, unless a part of the standard library made it for itself, or an import made it."""
        caller = frame
        while caller is not None and _package(caller) in sys.stdlib_module_names:
            if _package(caller) in _MAY_ASK:
                return
            caller = caller.f_back
        if caller is None or _package(caller) == "onnxruntime" or _is_importing(caller):
            return
        origin = files.module_origin(caller.f_globals.get("__name__"))
        is_bookkeeping = origin is Origin.INSTALLED and what.partition(".")[0].lstrip("_") in _BOOKKEEPING
        if origin is not Origin.OWN and not is_bookkeeping:
            self.from_outside.append(f"{what} at {caller.f_code.co_filename}:{caller.f_lineno}")


@contextlib.contextmanager
def watch() -> Iterator[Executed | None]:
    """Collects what runs in a forward that ORTModule exports; gives None if another profiler is active."""
    if sys.getprofile() is not None:
        yield None
        return
    executed = Executed()
    depth = 0

    def note(frame: types.FrameType, event: str, argument: Any) -> None:
        nonlocal depth
        if event == "c_call":
            if depth:
                executed.called_c(frame, argument)
        elif event in ("call", "return"):
            is_forward = frame.f_code.co_qualname == _FORWARD
            if is_forward:
                depth += 1 if event == "call" else -1
                executed.drawn(is_over=event == "return")
            if event == "call" and depth:
                executed.called(frame)

    sys.setprofile(note)
    try:
        yield executed
    finally:
        sys.setprofile(None)


def why_not(executed: Executed | None, described: frozenset[types.CodeType]) -> str | None:
    """Returns why what ran keeps the export from being stored; None if all of it is described.

    Args:
        executed: what ran.
        described: the user's code that is in the key.
    """
    if executed is None:
        return "a profiler is active, so that it cannot be seen what the forward runs"
    for code, module in executed.users_codes.items():
        if code not in described:
            place = f"{code.co_filename}:{code.co_firstlineno}"
            return f"it runs {module}.{code.co_qualname} ({place}), which no name leads to"
    if executed.from_outside:
        return f"it calls {executed.from_outside[0]}, and what that gives can differ from run to run"
    return None


def _state_of_random_numbers() -> list[Any]:
    """Returns the state of numpy's random numbers, whose functions no profiler sees."""
    random = sys.modules.get("numpy.random")
    return [] if random is None else [random.get_state()[1].tobytes(), random.get_state()[2]]


def _package(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _is_importing(frame: types.FrameType | None) -> bool:
    """Whether a module is being imported; the code of the user's modules is noticed as code that is not described."""
    while frame is not None and frame.f_code.co_qualname != _FORWARD:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _origin(frame: types.FrameType) -> Origin:
    name = frame.f_code.co_filename
    if not name.startswith("<"):
        return files.origin(name)
    home = frame.f_globals.get("__name__")
    if isinstance(home, str) and not hasattr(sys.modules.get(home), "__file__") and frame.f_back is not None:
        # Code that was made from a text, such as that of a named tuple, may name a module that does not exist.
        return _origin(frame.f_back)
    return files.module_origin(home)


def _home(function: Any) -> str:
    """Returns the module of a compiled function, or of the class whose method it is."""
    owner = function.__self__
    if function.__module__ is not None:
        return str(function.__module__)
    if owner is None or isinstance(owner, types.ModuleType):
        return getattr(owner, "__name__", "")
    kind = owner if isinstance(owner, type) else type(owner)
    metaclass: type = type(kind)
    for cls in (*kind.__mro__, *metaclass.__mro__):
        if isinstance(vars(cls).get(function.__name__), _METHODS):
            kind = cls
            break
    is_pythons = kind.__module__ != "builtins" or hasattr(builtins, kind.__name__) or kind.__flags__ & 1 << 9 == 0
    return kind.__module__ if is_pythons else kind.__name__


def _is_known(home: str) -> bool:
    package = home.partition(".")[0]
    return not package or package in _COMPILED or package in sys.stdlib_module_names
