"""Attributes of modules and classes that are replaced for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Gives an attribute another value until its end.

    An attribute that the owner only inherits is inherited again afterwards, and a static or class method is one again.

    Args:
        owner: a module, a class or an object.
        name: the attribute's name.
        value: what it is meanwhile.

    Raises:
        AttributeError: there is no such attribute, as in another version of a library.
    """
    # The dictionary has a static method itself; getattr has the function in it.
    before, is_own = vars(owner).get(name, getattr(owner, name)), name in vars(owner)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
