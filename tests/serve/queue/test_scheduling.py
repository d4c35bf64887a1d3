"""The queue's decisions: each rule by an example, and all of them over thousands of simulated jobs."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ortlaunch.serve.queue.scheduling import HALF_LIFE, Capacity, Running, Waiting, schedule, usage_now
from tests.serve.queue.simulation import Machine, Task


def waits(name: str, owner: str, slots: int, minutes: float | None = None, priority: int = 0) -> Waiting:
    return Waiting(name, owner, int(name[1:]), slots, minutes, priority)


def runs(name: str, slots: int, minutes: float | None = None, owner: str = "zoe", since: float = 0.0) -> Running:
    return Running(name, owner, slots, since, minutes)


def starts(slots: int, waiting: list[Waiting], running: list[Running] = [], shares: dict[str, float] = {}) -> list[str]:  # noqa: B006
    return schedule(0.0, Capacity(slots), waiting, running, shares).starts


def test_a_job_gets_all_of_its_slots_at_once() -> None:
    assert starts(4, [waits("q1", "ann", 3), waits("q2", "bob", 2)]) == ["q1"]


def test_within_a_user_the_oldest_comes_first_and_none_passes_it() -> None:
    assert starts(4, [waits("q2", "ann", 1), waits("q1", "ann", 1)]) == ["q1", "q2"]
    assert starts(4, [waits("q1", "ann", 4), waits("q2", "ann", 1, 1)], [runs("q0", 1, 60)]) == []


def test_the_user_with_less_usage_comes_first() -> None:
    both = [waits("q1", "ann", 4), waits("q2", "bob", 4)]
    assert starts(4, both) == ["q1"]
    assert starts(4, both, shares={"ann": 1000.0}) == ["q2"]


def test_slots_that_are_free_at_one_moment_go_to_several_users() -> None:
    queue = [*(waits(f"q{n}", "ann", 1) for n in range(1, 5)), *(waits(f"q{n}", "bob", 1) for n in range(5, 9))]
    assert starts(4, queue) == ["q1", "q5", "q2", "q6"]


def test_a_priority_comes_before_usage_and_age() -> None:
    assert starts(4, [waits("q1", "ann", 4), waits("q2", "bob", 4, priority=1)], shares={"bob": 1e9}) == ["q2"]


def test_a_later_job_passes_the_head_only_if_it_ends_in_time() -> None:
    head, running = waits("q1", "ann", 4), [runs("q0", 3, 60)]
    assert starts(4, [head, waits("q2", "bob", 1, 60)], running) == ["q2"]
    assert starts(4, [head, waits("q2", "bob", 1, 61)], running) == []
    assert starts(4, [head, waits("q2", "bob", 1)], running) == []


def test_a_slot_that_the_head_will_not_need_is_for_any_job() -> None:
    running = [runs("q0", 3, 60), runs("q9", 3, 90)]
    assert starts(8, [waits("q1", "ann", 4), waits("q2", "bob", 1)], running) == ["q2"]
    assert starts(8, [waits("q1", "ann", 4), waits("q2", "bob", 1), waits("q3", "eve", 1)], running) == ["q2"]


def test_nothing_passes_a_head_that_waits_for_a_run_without_a_time_limit() -> None:
    plan = schedule(0.0, Capacity(4), [waits("q1", "ann", 4), waits("q2", "bob", 1, 1)], [runs("q0", 1)], {})
    assert plan.starts == []
    assert plan.promised == {}
    assert plan.reasons["q2"] == "after q1, which starts when a run without a time limit ends"


def test_a_job_held_by_foreign_processes_does_not_hold_others() -> None:
    plan = schedule(0.0, Capacity(4, withheld=2), [waits("q1", "ann", 3), waits("q2", "bob", 2)], [], {})
    assert plan.starts == ["q2"]
    assert plan.reasons["q1"] == "it needs 3 slots; 2 are withheld from the queue"


def test_a_job_too_large_for_the_machine_holds_nobody() -> None:
    plan = schedule(0.0, Capacity(2), [waits("q1", "ann", 3), waits("q2", "ann", 2)], [], {})
    assert plan.starts == ["q2"]
    assert plan.reasons["q1"] == "it needs 3 slots, and this machine has 2"


def test_a_closed_queue_starts_nothing_and_says_why() -> None:
    plan = schedule(0.0, Capacity(4), [waits("q1", "ann", 1)], [], {}, closed="the queue is paused")
    assert (plan.starts, plan.order, plan.reasons) == ([], ["q1"], {"q1": "the queue is paused"})


def test_usage_counts_half_after_the_half_life() -> None:
    assert usage_now(HALF_LIFE, 100.0, 0.0) == pytest.approx(50.0)


tasks = st.lists(
    st.tuples(
        st.sampled_from(["ann", "bob", "eve"]),
        st.integers(1, 6),
        st.floats(1, 5000),
        st.floats(0, 20_000),
        st.one_of(st.none(), st.floats(1, 3)),
        st.sampled_from([0, 0, 0, 1]),
    ),
    min_size=1,
    max_size=80,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(tasks, st.integers(1, 6), st.integers(0, 2))
def test_the_rules_hold_for_any_jobs(drawn: list, total: int, withheld: int) -> None:
    machine = Machine(Capacity(total, min(withheld, total - 1)))
    # Jobs are numbered as they arrive.
    drawn.sort(key=lambda one: one[3])
    made = [
        Task(number, owner, slots, seconds, arrives, None if factor is None else factor * seconds / 60, priority)
        for number, (owner, slots, seconds, arrives, factor, priority) in enumerate(drawn, start=1)
    ]
    machine.run(made)
    usable = machine.capacity.total - machine.capacity.withheld
    assert {task.id for task in made if task.slots <= usable} >= set(machine.ended)
    held = {task.owner for task in made if usable < task.slots <= total}
    for task in made:
        if task.slots <= usable and task.owner not in held:
            assert task.id in machine.ended, "starved"


def load_of_10_000() -> list[Task]:
    rng, moment, made = random.Random(17), 0.0, []
    for number in range(1, 10_001):
        moment += rng.expovariate(1 / 130)
        seconds = min(20_000.0, rng.expovariate(1 / 300) + 1)
        minutes = None if rng.random() < 0.05 else seconds / 60 * rng.uniform(1, 4)
        slots = rng.choices([1, 2, 4, 8], [60, 20, 15, 5])[0]
        owner = rng.choices(["ann", "bob", "eve", "dan", "zoe"], [50, 20, 15, 10, 5])[0]
        made.append(Task(number, owner, slots, seconds, moment, minutes, rng.random() < 0.02))
    return made


def test_10_000_jobs_all_end_and_the_machine_was_full() -> None:
    machine, made = Machine(Capacity(8)), load_of_10_000()
    machine.run(made)
    assert len(machine.ended) == 10_000
    assert machine.most_in_use == 8
    assert machine.backfilled > 100
    wait = max(machine.began[task.id] - task.arrives for task in made)
    assert wait < 24 * 3600, "somebody starves"


@settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.integers(0, 10_000), st.integers(2, 4), st.integers(2, 8))
def test_equal_backlogs_end_within_ten_percent(seed: int, users: int, total: int) -> None:
    rng = random.Random(seed)
    shape = [(rng.randint(1, 2), rng.uniform(300, 1200)) for _ in range(40)]
    made = []
    # One user's jobs stand wholly before the next one's, which is the worst order for a queue without shares.
    for user in range(users):
        jobs = rng.sample(shape, len(shape))
        made += [
            Task(user * 40 + n, f"user{user}", slots, seconds, 0.0, seconds / 60 * 1.5)
            for n, (slots, seconds) in enumerate(jobs, start=1)
        ]
    machine = Machine(Capacity(total))
    machine.run(made)
    ends = [max(machine.ended[task.id] for task in made if task.owner == f"user{user}") for user in range(users)]
    assert max(ends) <= 1.1 * min(ends), ends


def test_a_user_with_one_job_does_not_wait_for_anothers_thousand() -> None:
    made = [Task(n, "ann", 1, 600, 0.0, 11) for n in range(1, 1001)]
    made.append(Task(1001, "bob", 4, 600, 1000.0, 11))
    machine = Machine(Capacity(4))
    machine.run(made)
    assert machine.began["q1001"] - 1000.0 <= 2 * 660
