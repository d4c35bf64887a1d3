"""In what the configurations of the groups differ, and nothing of what they have in common."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from omegaconf import OmegaConf

from ortlaunch.compare.groups import CIRCUMSTANCES, Group, circumstance, same_work
from ortlaunch.compare.runs import STEPS_TAKEN
from ortlaunch.config.schema import GROUPS
from ortlaunch.run.journal import flatten

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
    """What differs between the groups: parameters in the order of their names, then seeds, steps and circumstances.

    What only follows from another choice is left out: that one backend or trainer has keys that another lacks, with the
    values that they have anyway; and so is what a run that broke off had no time to say.
    """
    keys = sorted({key for group in groups for key in group.first.params if not same_work(key)} - {STEPS_TAKEN})
    found = [Difference(key, [group.first.params.get(key) for group in groups]) for key in keys]
    found = [one for one in found if not _follows(one, groups)]
    found.append(Difference("seed", [", ".join(group.seeds) or None for group in groups]))
    late = [Difference(STEPS_TAKEN, [group.first.params.get(STEPS_TAKEN) for group in groups])]
    late += [Difference(tag, [circumstance(group.first, tag) for group in groups]) for tag in _SHOWN_CIRCUMSTANCES]
    found += [one for one in late if not _unsaid(one, groups)]
    return [one for one in found if len(set(one.values)) > 1]


def _unsaid(difference: Difference, groups: list[Group]) -> bool:
    """Whether all who say something say the same, and only runs that did not finish say nothing."""
    pairs = zip(difference.values, groups, strict=True)
    return len({value for value, group in pairs if value is not None or group.first.status == "FINISHED"}) == 1


def _follows(difference: Difference, groups: list[Group]) -> bool:
    """Whether every group has the value that its choice of an option brings."""
    config_group, _, key = difference.key.partition(".")
    if key == "name" or config_group not in GROUPS:
        return False
    choices = [group.first.params.get(f"{config_group}.name", "") for group in groups]
    expected = [_defaults(config_group, choice).get(difference.key) for choice in choices]
    return "" not in choices and expected == difference.values


@cache
def _defaults(config_group: str, choice: str) -> dict[str, str]:
    """The parameters that an option of a config group has where nobody sets them, as they are recorded."""
    node = GROUPS[config_group].get(choice)
    if node is None:
        return {}
    plain = OmegaConf.to_container(OmegaConf.structured(node), enum_to_str=True)
    return flatten({config_group: plain})
