"""Reads pickles without running what they hold.

A pickle can call any function that it names. This reader asks for each name, and accepts no name that it was not told.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any


class UnknownNameError(pickle.UnpicklingError):
    """A pickle names a class or function that its kind of file never has."""


def loads(content: bytes, find: Callable[[str, str], Any]) -> Any:
    """The object in a pickle.

    Args:
        content: the pickle.
        find: returns what a name stands for, given the module and the qualified name, or None for a name that the file
            must not have. It must not import a module that the pickle has chosen.

    Raises:
        UnknownNameError: the pickle has another name.
        Exception: the pickle is damaged.
    """
    return _Reader(content, find).load()


class _Reader(pickle.Unpickler):
    def __init__(self, content: bytes, find: Callable[[str, str], Any]) -> None:
        super().__init__(io.BytesIO(content))
        self._find = find

    def find_class(self, module: str, name: str) -> Any:
        """Returns what a name stands for."""
        found = self._find(module, name)
        if found is None:
            raise UnknownNameError(f"it names {module}.{name}, which no such file has")
        return found

    def persistent_load(self, pid: Any) -> Any:
        """Refuses references to outside the file."""
        raise UnknownNameError("it refers to something outside the file")
