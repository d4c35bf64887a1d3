"""A machine on which jobs run as the queue decides, with a clock of its own."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ortlaunch.serve.queue.scheduling import Capacity, Plan, Running, Waiting, schedule, usage_now


@dataclass(frozen=True)
class Task:
    """A job that will be submitted."""

    number: int
    owner: str
    slots: int
    seconds: float
    """How long it really runs."""
    arrives: float = 0.0
    minutes: float | None = None
    priority: int = 0

    @property
    def id(self) -> str:
        return f"q{self.number}"


@dataclass
class Machine:
    """Runs jobs, and looks at what must hold after every decision."""

    capacity: Capacity
    now: float = 0.0
    running: dict[str, Running] = field(default_factory=dict)
    waiting: dict[str, Waiting] = field(default_factory=dict)
    usage: dict[str, tuple[float, float]] = field(default_factory=dict)
    began: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    most_in_use: int = 0
    _promised: dict[str, float] = field(default_factory=dict)
    _head: str | None = None
    _priority: dict[str, int] = field(default_factory=dict)
    _passed: int = 0

    @property
    def backfilled(self) -> int:
        """How many jobs started before the head."""
        return self._passed

    def run(self, tasks: Iterable[Task]) -> None:
        """Submits and runs all tasks to their ends."""
        known = {task.id: task for task in tasks}
        events = [(task.arrives, 0, task.id) for task in known.values()]
        heapq.heapify(events)
        while events:
            self.now = events[0][0]
            while events and events[0][0] == self.now:
                _, what, name = heapq.heappop(events)
                self._end(name) if what else self._arrive(known[name])
            for name in self._decide():
                heapq.heappush(events, (self.now + known[name].seconds, 1, name))

    def _arrive(self, task: Task) -> None:
        self._priority[task.id] = task.priority
        self.waiting[task.id] = Waiting(task.id, task.owner, task.number, task.slots, task.minutes, task.priority)

    def _end(self, name: str) -> None:
        job = self.running.pop(name)
        used, at = self.usage.get(job.owner, (0.0, self.now))
        self.usage[job.owner] = (usage_now(self.now, used, at) + job.slots * (self.now - job.since), self.now)
        self.ended[name] = self.now

    def _shares(self) -> Mapping[str, float]:
        return {owner: usage_now(self.now, used, at) for owner, (used, at) in self.usage.items()}

    def _plan(self) -> Plan:
        return schedule(
            self.now, self.capacity, self.waiting.values(), self.running.values(), self._shares(), head=self._head
        )

    def _decide(self) -> list[str]:
        plan = self._plan()
        self._head = plan.head
        assert sorted(plan.starts + plan.order) == sorted(self.waiting)
        assert set(plan.reasons) == set(plan.order)
        self._check_order(plan)
        for name in plan.starts:
            job = self.waiting.pop(name)
            self.running[name] = Running(name, job.owner, job.slots, self.now, job.minutes)
            self.began[name] = self.now
        in_use = sum(job.slots for job in self.running.values())
        self.most_in_use = max(self.most_in_use, in_use)
        assert in_use <= self.capacity.total - self.capacity.withheld, "more slots than there are"
        again = self._plan()
        assert again.starts == [], "a second look starts something that the first one held back"
        self._check_promises(plan, again)
        return plan.starts

    def _check_order(self, plan: Plan) -> None:
        """Within a user, a job starts only if none that was submitted before, of its priority or above, waits."""
        left = [self.waiting[name] for name in plan.order if self.waiting[name].slots <= self.capacity.total]
        for name in plan.starts:
            job = self.waiting[name]
            for other in left:
                if other.owner == job.owner and (-other.priority, other.number) < (-job.priority, job.number):
                    raise AssertionError(f"{name} started before {other.id} of the same user")

    def _check_promises(self, plan: Plan, again: Plan) -> None:
        """What was started beside a head does not move the moment that it is promised."""
        self._passed += len(plan.starts) if plan.promised and again.promised else 0
        for name, moment in plan.promised.items():
            assert again.promised.get(name) == moment, "what started beside the head delays it"
        # A promise ends when its job starts, or when a job of a higher priority comes before it.
        highest = max((self._priority[name] for name in plan.starts), default=0)
        highest = max([highest, *(job.priority for job in self.waiting.values())])
        kept = {name: at for name, at in self._promised.items() if name in self.waiting}
        self._promised = {name: at for name, at in kept.items() if self.waiting[name].priority == highest}
        for name, moment in again.promised.items():
            assert moment <= self._promised.get(name, math.inf) + 1e-6, "a promise was put off"
            self._promised = {name: moment}
