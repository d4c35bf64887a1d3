"""What the people of each role may take of this machine, as administrators set it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
from sqlalchemy import select
from sqlalchemy.orm import Session

from ortlaunch.base.files import nearest_folder
from ortlaunch.config.devices import usable_cores
from ortlaunch.serve.access import Caller, Role
from ortlaunch.serve.audit import record
from ortlaunch.serve.database import reading, writing
from ortlaunch.serve.queue.scheduling import amount
from ortlaunch.serve.queue.store import Allowance
from ortlaunch.serve.service import Service
from ortlaunch.serve.tables import RoleLimits
from ortlaunch.serve.unfit import Problem, Unfit, unfit

LIMITS = ("slots", "hours", "memory", "disk")
NEEDS = ("cores", "memory", "disk")
"""What a run takes beside its slots; memory and disk in bytes."""
_GIB = 1 << 30
_KEYS = {
    **dict.fromkeys(("slots", "cores"), "launcher.workers_per_node"),
    "memory": "train.batch_size",
    "disk": "train.keep_checkpoints",
}
"""The key beside which the form shows that a run needs too much, where it is the likeliest cause."""


def limits_of(session: Session) -> dict[str, dict[str, float | None]]:
    """Returns the limits of all roles that start runs, by role; None: no limit."""
    found = {one.role: one for one in session.scalars(select(RoleLimits))}
    roles = [role.name for role in Role if role >= Role.runner]
    return {role: {name: getattr(found.get(role), name, None) for name in LIMITS} for role in roles}


def set_limits(service: Service, caller: Caller, role: str, values: Mapping[str, float | None]) -> None:
    """Sets the limits of a role. They hold for what is submitted from now on."""
    with writing(service.engine) as session:
        session.merge(RoleLimits(role=role, **values))
        record(session, caller, "limits.set", role, values)


def in_words(limits: Mapping[str, float | None]) -> list[str]:
    """Returns the limits of a role in words, without those that there are not."""
    units = {"slots": "slots at a time", "hours": "hours", "memory": "GiB of memory", "disk": "GiB of disk"}
    return [f"{value:g} {units[name]}" for name, value in limits.items() if value is not None]


def capacity() -> dict[str, float]:
    """Returns the cores, and the bytes of memory, of this machine."""
    return {"cores": usable_cores(), "memory": psutil.virtual_memory().total}


def allowed(service: Service, caller: Caller, minutes: float | None, checked: Mapping[str, Any]) -> Allowance:
    """Returns what a checked run may take.

    Args:
        service: the service.
        caller: who submits it.
        minutes: the time limit that was asked for.
        checked: what the check has returned.

    Raises:
        Unfit: it needs more than this machine has, or than the role may take.
    """
    needs = checked["needs"]
    if not needs:
        # Its scheduler has limits of its own.
        return Allowance(minutes, {})
    with reading(service.engine) as session:
        limits = limits_of(session)[caller.role.name]
    most = {**capacity(), "disk": _free_disk(service)}
    problems = [
        Problem(_KEYS[name], f"{_needs(name, need)}, and this machine has {amount(name, most[name])}")
        for name, need in needs.items()
        if need > most[name]
    ]
    units = {"memory": _GIB, "disk": _GIB}
    may = {name: value * units.get(name, 1) for name, value in limits.items() if value is not None}
    asked, role = {**needs, "slots": checked["slots"]}, caller.role.name
    problems += [
        Problem(_KEYS[name], f"{_needs(name, asked[name])}, and the role {role} may take {amount(name, limit)}")
        for name, limit in may.items()
        if asked.get(name, 0) > limit
    ]
    hours = may.pop("hours", math.inf)
    if minutes is not None and minutes > 60 * hours:
        problems.append(Problem("minutes", f"a run of the role {role} may take {60 * hours:g} minutes"))
    if problems:
        raise Unfit(*problems)
    return Allowance(60 * hours if minutes is None and hours < math.inf else minutes, may)


def require_disk(service: Service, checked: Sequence[Mapping[str, Any]]) -> None:
    """Refuses runs of which each has room on the disk, and which have not together.

    Raises:
        Unfit: they have not.
    """
    need, free = sum(one["needs"].get("disk", 0) for one in checked), _free_disk(service)
    if need > free:
        raise unfit(f"the runs need {amount('disk', need)} together, and this machine has {amount('disk', free)}")


def _free_disk(service: Service) -> int:
    return shutil.disk_usage(nearest_folder(service.settings.root)).free


def _needs(name: str, value: float) -> str:
    return f"the run needs {amount(name, value)} at least"
