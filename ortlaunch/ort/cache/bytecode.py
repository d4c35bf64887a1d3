"""Reads what a function's instructions tell: the names that it uses, what it imports, and where it depends on order."""

from __future__ import annotations

import dis
import hashlib
import re
import types
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

_LONGEST_TEXT = 200
"""Number of characters up to which a string may hold the names of attributes; longer ones are documentation."""


class Empty(Enum):
    """Represents the content of an empty cell."""

    CELL = "empty cell"


def cells_of(function: types.FunctionType) -> list[Any]:
    """Returns the content of a function's closure."""
    contents = []
    for cell in function.__closure__ or ():
        try:
            contents.append(cell.cell_contents)
        except ValueError:
            # The enclosing function sets this name later, or never.
            contents.append(Empty.CELL)
    return contents


def nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields a code object and those of the functions defined in it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from nested(const)


def digest(codes: Iterable[types.CodeType]) -> str:
    """Returns a digest of the instructions; it is the only difference of two functions on the same line."""
    state = hashlib.sha256()
    for code in codes:
        state.update(code.co_code)
        consts = [_const(const) for const in code.co_consts if not isinstance(const, types.CodeType)]
        state.update(repr([code.co_name, code.co_names, code.co_varnames, consts]).encode())
    return state.hexdigest()[:16]


def _const(const: Any) -> str:
    return repr(sorted(map(repr, const))) if isinstance(const, frozenset) else repr(const)


def names(codes: Iterable[types.CodeType], *, in_texts: bool) -> set[str]:
    """Returns the names in the code, and its strings, which may be names of attributes as in ``getattr(x, "scale")``.

    Args:
        codes: the code.
        in_texts: whether a string may hold several names, as in ``"{0.scale}".format(x)``.
    """
    found: set[str] = set()
    for code in codes:
        found.update(code.co_names, code.co_freevars)
        for text in _texts(code.co_consts):
            if text.isidentifier():
                found.add(text)
            elif in_texts and len(text) <= _LONGEST_TEXT:
                found.update(re.findall(r"[^\W\d]\w*", text))
    return found


def _texts(consts: Iterable[Any]) -> Iterator[str]:
    # The names of ``case Point(x=0)`` are in a tuple.
    for const in consts:
        if isinstance(const, str):
            yield const
        elif isinstance(const, tuple | frozenset):
            yield from _texts(const)


def imports(codes: Iterable[types.CodeType]) -> set[str]:
    """Returns the modules that the code imports when it runs; a relative name begins with its dots."""
    found = set()
    for code in codes:
        steps = [one for one in dis.get_instructions(code) if one.opname != "EXTENDED_ARG"]
        for index, step in enumerate(steps):
            if step.opname == "IMPORT_NAME":
                # The number of dots is loaded first, then the names that are taken from the module.
                level = steps[index - 2].argval
                found.add("." * (level if isinstance(level, int) else 0) + str(step.argval))
    return found


def uses_order_of_sets(codes: Iterable[types.CodeType]) -> bool:
    """Whether the code makes a set whose order may differ between processes and does more with it than ``in``."""
    for code in codes:
        steps = list(dis.get_instructions(code))
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            is_tested = following is not None and following.opname == "CONTAINS_OP"
            if step.opname == "LOAD_CONST" and isinstance(step.argval, frozenset):
                if not is_tested and is_unordered(step.argval):
                    return True
            elif step.opname == "SET_ADD" or (step.opname == "BUILD_SET" and step.arg):
                return True
            elif step.opname.startswith("LOAD_") and step.argval in ("set", "frozenset") and "NULL" in step.argrepr:
                # Python marks a name that is called, which isinstance(x, set) does not do.
                return True
    return False


def is_unordered(values: Iterable[Any]) -> bool:
    """Whether a set of these values has another order in another process: that of numbers is always the same."""
    several = list(values)
    return len(several) > 1 and not all(type(value) in (int, float, bool) for value in several)


def untested_names(codes: Iterable[types.CodeType]) -> set[str]:
    """Returns the names whose values are used for more than the right side of ``in``."""
    found: set[str] = set()
    for code in codes:
        steps = list(dis.get_instructions(code))
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            is_tested = following is not None and following.opname == "CONTAINS_OP"
            if step.opname.startswith("LOAD_") and isinstance(step.argval, str) and not is_tested:
                found.add(step.argval)
    return found
