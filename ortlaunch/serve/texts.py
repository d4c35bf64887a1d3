"""The texts that stand below the fields of the schema's dataclasses, which Python itself does not keep."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from typing import Any


def texts_of(node: type[Any]) -> dict[str, str]:
    """Returns the text of each field of a dataclass, also of those that it inherits."""
    found: dict[str, str] = {}
    for base in reversed(node.__mro__):
        found |= _in_module(base.__module__).get(base.__qualname__, {})
    return found


@functools.cache
def _in_module(name: str) -> dict[str, dict[str, str]]:
    """The texts of all classes of a module; none where its source is not there."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[name]))
    except (OSError, TypeError, KeyError, SyntaxError):
        return {}
    return {one.name: _in_class(one) for one in tree.body if isinstance(one, ast.ClassDef)}


def _in_class(tree: ast.ClassDef) -> dict[str, str]:
    found = {}
    for field, after in zip(tree.body, tree.body[1:], strict=False):
        is_field = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if is_field and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            assert isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            found[field.target.id] = " ".join(str(after.value.value).split()).replace("``", "`")
    return found
