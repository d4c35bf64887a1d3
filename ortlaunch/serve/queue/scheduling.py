"""Decides which waiting jobs start now. It is a pure function of the moment, the slots, the jobs and the past usage.

- Between users the one with the least usage comes first; within a user the oldest job does. A higher priority comes
  before both.
- A job gets all of its slots, and all that it takes beside them, at once. The first job that does not fit is the head.
  Its start is promised for the moment at which enough running jobs will have reached their time limits.
- A later job of another user may start before the head (backfill) only if it ends before that moment by its own time
  limit, or needs no slot that the head will need. While a running job without a limit stands in the way, no moment can
  be promised, and nothing passes the head.
- Only a job of a higher priority takes the head's place.
- A job that only processes outside the queue keep from its slots is no head: nobody can tell how long these stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Amounts = tuple[float, ...]
"""Slots, and what is counted beside them."""
LEAST_CHARGE = 600.0
"""A job that has just begun counts as if it had used its slots for this many seconds. So one user does not get all
slots that become free at one moment."""
HALF_LIFE = 24 * 3600.0
"""After this many seconds, usage counts half."""


@dataclass(frozen=True)
class Waiting:
    """A job that waits."""

    id: str
    owner: str
    number: int
    """Jobs are numbered in the order of their submission."""
    slots: int
    minutes: float | None = None
    """Its time limit; None without one."""
    priority: int = 0
    beside: Amounts = ()
    """What it takes beside slots, in the order of `Capacity.beside`."""

    @property
    def amounts(self) -> Amounts:
        """All that it takes."""
        return self.slots, *self.beside


@dataclass(frozen=True)
class Running:
    """A job that holds slots."""

    id: str
    owner: str
    slots: int
    since: float
    minutes: float | None = None
    beside: Amounts = ()

    @property
    def amounts(self) -> Amounts:
        """All that it holds."""
        return self.slots, *self.beside

    def end(self, now: float) -> float:
        """When it ends at the latest; infinite without a limit. A job beyond its limit is being stopped now."""
        return math.inf if self.minutes is None else max(now, self.since + 60 * self.minutes)


@dataclass(frozen=True)
class Capacity:
    """The slots of the machine."""

    total: int
    """All slots that the machine has."""
    withheld: int = 0
    """Free slots that other processes use or that an administrator has taken out."""
    beside: Amounts = ()
    """What the machine has beside slots, such as cores and bytes of memory."""
    names: tuple[str, ...] = ()
    """What these are."""

    @property
    def amounts(self) -> Amounts:
        """All that jobs may take."""
        return self.total - self.withheld, *self.beside


@dataclass(frozen=True)
class Plan:
    """What to do now."""

    starts: list[str] = field(default_factory=list)
    """The jobs to start, in this order."""
    order: list[str] = field(default_factory=list)
    """All jobs that go on waiting, in the order in which they would start."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why each of these waits, as a sentence for its owner."""
    promised: dict[str, float] = field(default_factory=dict)
    """When the head starts at the latest, if that is known."""
    head: str | None = None
    """The first job that does not fit; the next decision takes it as its `head`."""


def schedule(
    now: float,
    capacity: Capacity,
    waiting: Iterable[Waiting],
    running: Iterable[Running],
    shares: Mapping[str, float],
    closed: str = "",
    head: str | None = None,
) -> Plan:
    """Decides which jobs start now.

    Args:
        now: seconds since the epoch.
        capacity: the machine's slots.
        waiting: the jobs that wait.
        running: the jobs that hold slots.
        shares: past usage of each owner in decayed slot-seconds, without the running jobs.
        closed: why nothing starts at all; empty if something may.
        head: the head of the decision before, which keeps its place though usage has changed since.
    """
    active = list(running)
    order = _in_order(now, list(waiting), active, shares)
    order.sort(key=lambda job: (-job.priority, job.id != head))
    if closed:
        return Plan([], [job.id for job in order], {job.id: closed for job in order}, head=head)
    return _Walk(now, capacity, active).through(order)


def usage_now(now: float, slot_seconds: float, at: float) -> float:
    """Returns usage that was noted at a moment, as it counts now."""
    return float(slot_seconds * 0.5 ** (max(0.0, now - at) / HALF_LIFE))


def charged(slots: int) -> int:
    """Returns the slots that a job is charged for: on a machine with GPUs, one that takes none is no gift either."""
    return max(1, slots)


def _in_order(now: float, waiting: list[Waiting], running: list[Running], shares: Mapping[str, float]) -> list[Waiting]:
    used = {job.owner: float(shares.get(job.owner, 0.0)) for job in waiting}
    for job in running:
        if job.owner in used:
            used[job.owner] += charged(job.slots) * max(LEAST_CHARGE, now - job.since)
    lines: dict[str, list[Waiting]] = {}
    for waiter in sorted(waiting, key=lambda one: (one.priority, -one.number)):
        lines.setdefault(waiter.owner, []).append(waiter)
    order: list[Waiting] = []
    while lines:
        owner = min(lines, key=lambda name: (-lines[name][-1].priority, used[name], lines[name][-1].number))
        first = lines[owner].pop()
        order.append(first)
        # The same as for a job that has just begun, so that the order is that in which jobs would start.
        used[owner] += charged(first.slots) * LEAST_CHARGE
        if not lines[owner]:
            del lines[owner]
    return order


class _Walk:
    """Goes through the waiting jobs once, in their order."""

    def __init__(self, now: float, capacity: Capacity, running: list[Running]) -> None:
        self._now = now
        self._capacity = capacity
        self._running = running
        self._free = capacity.amounts
        for job in running:
            self._free = _less(self._free, job.amounts)
        self._head: Waiting | None = None
        self._promise = math.inf
        self._spare: Amounts = ()
        """What will be free beside the head when it starts."""
        self._first_of: dict[str, str] = {}
        """The first job of each owner that goes on waiting: no later one of them passes it."""

    def through(self, order: list[Waiting]) -> Plan:
        """Decides about each job."""
        starts: list[str] = []
        reasons: dict[str, str] = {}
        for job in order:
            if reason := self._why_not(job):
                reasons[job.id] = reason
            else:
                starts.append(job.id)
                self._start(job)
        head = None if self._head is None else self._head.id
        promised = {} if head is None or math.isinf(self._promise) else {head: self._promise}
        return Plan(starts, list(reasons), reasons, promised, head)

    def _why_not(self, job: Waiting) -> str:
        """Returns why a job does not start; empty if it does."""
        if job.slots > self._capacity.total:
            return f"it needs {_slots(job.slots)}, and this machine has {self._capacity.total}"
        if not _fits(job.beside, self._capacity.beside):
            return f"{self._lacks(job)}, and this machine has less"
        if job.owner in self._first_of:
            return f"after {self._first_of[job.owner]} of the same user or project"
        if self._head is None and _fits(job.amounts, self._free):
            return ""
        if job.slots > self._capacity.total - self._capacity.withheld:
            self._first_of[job.owner] = job.id
            return f"it needs {_slots(job.slots)}; {self._capacity.withheld} are withheld from the queue"
        if self._head is None:
            self._first_of[job.owner] = job.id
            return self._becomes_head(job)
        if self._passes(job):
            return ""
        self._first_of[job.owner] = job.id
        return self._why_behind(job)

    def _becomes_head(self, job: Waiting) -> str:
        self._head = job
        free = self._free
        for end, amounts in sorted((one.end(self._now), one.amounts) for one in self._running):
            # Runs that end at the promised moment leave their slots too.
            if end > self._promise:
                break
            free = _more(free, amounts)
            if math.isinf(self._promise) and _fits(job.amounts, free):
                self._promise = end
        self._spare = _less(free, job.amounts)
        return f"next: {self._lacks(job)}"

    def _passes(self, job: Waiting) -> bool:
        """Whether a job may start before the head without delaying it."""
        if not _fits(job.amounts, self._free) or not math.isfinite(self._promise):
            return False
        return self._ends_in_time(job) or _fits(job.amounts, self._spare)

    def _ends_in_time(self, job: Waiting) -> bool:
        return job.minutes is not None and self._now + 60 * job.minutes <= self._promise

    def _start(self, job: Waiting) -> None:
        if self._head is not None and not self._ends_in_time(job):
            self._spare = _less(self._spare, job.amounts)
        self._free = _less(self._free, job.amounts)
        self._running.append(Running(job.id, job.owner, job.slots, self._now, job.minutes, job.beside))

    def _why_behind(self, job: Waiting) -> str:
        assert self._head is not None
        if not _fits(job.amounts, self._free):
            return f"after {self._head.id}; {self._lacks(job)}"
        if not math.isfinite(self._promise):
            return f"after {self._head.id}, which starts when a run without a time limit ends"
        if job.minutes is None:
            return f"after {self._head.id}, which it would delay: it has no time limit"
        return f"after {self._head.id}, which it would delay"

    def _lacks(self, job: Waiting) -> str:
        """What is not free of what a job needs."""
        for need, free, name in zip(job.beside, self._free[1:], self._capacity.names, strict=True):
            if need > free and job.slots <= self._free[0]:
                return f"it needs {amount(name, need)}, {amount(name, max(0.0, free))} free"
        return f"it needs {_slots(job.slots)}, {max(0, round(self._free[0]))} free"


def amount(name: str, value: float) -> str:
    """Returns an amount of something in words."""
    if name in ("memory", "disk"):
        unit, shift = ("GiB", 30) if value >= 1 << 30 else ("MiB", 20)
        return f"{value / (1 << shift):,.1f} {unit} of {name}"
    return f"{value:,g} {name if value != 1 else name.removesuffix('s')}"


def _fits(needed: Amounts, free: Amounts) -> bool:
    return all(one <= max(0, other) for one, other in zip(needed, free, strict=True))


def _less(these: Amounts, others: Amounts) -> Amounts:
    return tuple(one - other for one, other in zip(these, others, strict=True))


def _more(these: Amounts, others: Amounts) -> Amounts:
    return tuple(one + other for one, other in zip(these, others, strict=True))


def _slots(count: int) -> str:
    return f"{count} slot{'' if count == 1 else 's'}"
