"""The name that a misspelt one stands for: the guess behind every "Did you mean …?"."""

from __future__ import annotations

from collections.abc import Iterable

_ALIKE = 0.75
"""The least similarity (0 to 1) of a misspelt name to the right one.

Of four letters one may differ. With 0.7, other words get a guess: ``compile`` is no misspelt ``compare``, and
``metrics`` no misspelt ``restarts``.
"""
_BEGINNING = 3
"""The fewest characters that count as a name's beginning."""


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Returns the name that was probably meant by a name that does not exist.

    Args:
        name: what the user typed.
        names: the names that exist.

    Returns:
        A name that differs by two swapped letters, else the most similar one, else the shortest that begins with
        what was typed; None if there is none of these.
    """
    # Imported here, because every command imports this module and few have a misspelt name.
    import difflib

    known = list(names)
    if swapped := [other for other in known if _is_swap(name, other)]:
        return swapped[0]
    if similar := difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE):
        return similar[0]
    longer = [other for other in known if other.startswith(name)] if len(name) >= _BEGINNING else []
    return min(longer, key=len, default=None)


def _is_swap(name: str, other: str) -> bool:
    apart = [at for at, (one, two) in enumerate(zip(name, other, strict=False)) if one != two]
    return (
        len(name) == len(other)
        and len(apart) == 2
        and name[apart[0]] == other[apart[1]]
        and name[apart[1]] == other[apart[0]]
    )
