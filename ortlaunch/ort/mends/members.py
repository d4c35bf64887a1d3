"""A stand-in for a module or an object of torch, of which some members are others."""

from __future__ import annotations

from typing import Any


class Except:
    """An object of which some members are others."""

    def __init__(self, original: Any, **members: Any) -> None:
        self._original = original
        vars(self).update(members)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
