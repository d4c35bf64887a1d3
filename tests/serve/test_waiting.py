"""The threads in which routes wait for children."""

from __future__ import annotations

import inspect
import threading
from pathlib import Path

import anyio

from ortlaunch.serve.access import Caller, Role
from ortlaunch.serve.waiting import in_thread
from tests.support.service import in_process

ANN, BOB = (Caller(number, name, Role.runner, None) for number, name in ((1, "ann"), (2, "bob")))


def test_one_person_keeps_neither_others_nor_short_requests_waiting() -> None:
    gate, begun = threading.Event(), []

    def wait(number: int) -> None:
        begun.append(number)
        assert gate.wait(200)

    async def ask() -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(40):
                tasks.start_soon(lambda number=number: in_thread(ANN, wait, number, is_long=True))
            with anyio.fail_after(150):
                while len(begun) < 3:
                    await anyio.sleep(0.01)
                assert await in_thread(BOB, len, "long", is_long=True) == 4
                assert await in_thread(ANN, len, "short") == 5
            assert len(begun) == 3
            gate.set()

    try:
        anyio.run(ask)
    finally:
        gate.set()
    assert sorted(begun) == list(range(40))


def test_what_waits_for_a_child_takes_no_thread_of_those_that_all_routes_use(tmp_path: Path) -> None:
    routes = {getattr(route, "path", ""): route for route in in_process(tmp_path).app.router.routes}
    actions = [f"/api/runs/{{run_id}}/{name}" for name in ("keys", "cancel", "resume", "delete", "export")]
    for path in ("/submit", "/compare/tables", "/api/compare", "/api/fields", "/api/runs/check", *actions):
        assert inspect.iscoroutinefunction(routes[path].endpoint), path  # type: ignore[attr-defined]
