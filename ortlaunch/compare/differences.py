"""In what the configurations of the groups differ, and nothing of what they have in common."""

from __future__ import annotations

from dataclasses import dataclass

from ortlaunch.compare.groups import CIRCUMSTANCES, Group, circumstance, same_work

_SHOWN_CIRCUMSTANCES = (*CIRCUMSTANCES, "ortlaunch.hosts")


@dataclass(frozen=True)
class Difference:
    """A parameter, or a tag of ortlaunch's, that is not the same everywhere."""

    key: str
    values: list[str | None]
    """One for each group; None where it has no such key."""

    def by_value(self, labels: list[str]) -> list[tuple[str | None, list[str]]]:
        """Each value with the groups that have it, in the order of the groups."""
        found: dict[str | None, list[str]] = {}
        for value, label in zip(self.values, labels, strict=True):
            found.setdefault(value, []).append(label)
        return list(found.items())


def differences(groups: list[Group]) -> list[Difference]:
    """What differs between the groups: parameters in the order of their names, then seeds, then circumstances."""
    keys = sorted({key for group in groups for key in group.first.params if not same_work(key)})
    found = [Difference(key, [group.first.params.get(key) for group in groups]) for key in keys]
    found.append(Difference("seed", [", ".join(group.seeds) or None for group in groups]))
    for tag in _SHOWN_CIRCUMSTANCES:
        found.append(Difference(tag, [circumstance(group.first, tag) for group in groups]))
    return [one for one in found if len(set(one.values)) > 1]
