"""Finds in which parameters and tags the groups of a comparison differ."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from omegaconf import OmegaConf

from ortlaunch.compare.groups import CIRCUMSTANCES, Group, circumstance
from ortlaunch.compare.runs import STEPS_TAKEN
from ortlaunch.config.effects import same_work
from ortlaunch.config.schema import GROUPS
from ortlaunch.run.journal import flatten

_SHOWN_CIRCUMSTANCES = (*CIRCUMSTANCES, "ortlaunch.hosts")


@dataclass(frozen=True)
class Difference:
    """A parameter, or a tag of ortlaunch, that is not the same in all groups."""

    key: str
    values: list[str | None]
    """One value for each group; None if the group does not have the key."""

    def by_value(self, labels: list[str]) -> list[tuple[str | None, list[str]]]:
        """Returns each value with the labels of its groups, in the order of the groups."""
        found: dict[str | None, list[str]] = {}
        for value, label in zip(self.values, labels, strict=True):
            found.setdefault(value, []).append(label)
        return list(found.items())


def differences(groups: list[Group]) -> list[Difference]:
    """Returns the differences: parameters in the order of their names, then seeds, steps and circumstances.

    Two kinds are left out. One is keys that only follow from another choice, such as the defaults of another trainer.
    The other is what a run could not record because it broke off.
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
    """Whether all recorded values are equal, and only unfinished runs lack one."""
    pairs = zip(difference.values, groups, strict=True)
    return len({value for value, group in pairs if value is not None or group.first.status == "FINISHED"}) == 1


def _follows(difference: Difference, groups: list[Group]) -> bool:
    """Whether every group has the default value of the option that it chose."""
    config_group, _, key = difference.key.partition(".")
    if key == "name" or config_group not in GROUPS:
        return False
    choices = [group.first.params.get(f"{config_group}.name", "") for group in groups]
    expected = [_defaults(config_group, choice).get(difference.key) for choice in choices]
    return "" not in choices and expected == difference.values


@cache
def _defaults(config_group: str, choice: str) -> dict[str, str]:
    """Returns the default parameters of an option of a config group, in the form in which they are recorded."""
    node = GROUPS[config_group].get(choice)
    if node is None:
        return {}
    plain = OmegaConf.to_container(OmegaConf.structured(node), enum_to_str=True)
    return flatten({config_group: plain})
