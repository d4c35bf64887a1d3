"""Every route, and who may use it: nobody, viewer, runner, author, admin; of a run also its owner and others."""

from __future__ import annotations

import re

import pytest
from fastapi.routing import APIRoute
from starlette.routing import Mount, Route

from ortlaunch.serve.access import PUBLIC, Role, role_of
from tests.support.service import InProcess, in_process

PEOPLE = {"vera": Role.viewer, "rob": Role.runner, "aude": Role.author, "ada": Role.admin}
LEAST = {
    Role.viewer: """
        GET /metrics
        GET /api/compare
        GET /api/events
        GET /api/facets
        GET /api/runs
        GET /api/runs/{id}
        GET /api/runs/{id}/config
        GET /api/runs/{id}/files/{name:path}
        GET /api/runs/{id}/logs/{rank}
        GET /api/runs/{id}/metrics
        GET /api/openapi.json
        GET /api/session
        DELETE /api/session
        GET /api/tokens
        POST /api/tokens
        DELETE /api/tokens/{token_id}
        GET /api/fields
        GET /api/ready-jobs
        GET /api/queue
        GET /api/runs/{run_id}/keys
    """,
    Role.runner: """
        POST /api/runs
        POST /api/runs/check
        POST /api/runs/{run_id}/cancel
        POST /api/runs/{run_id}/resume
        POST /api/runs/{run_id}/delete
        POST /api/runs/{run_id}/export
    """,
    Role.author: "",
    Role.admin: """
        GET /api/webhooks
        POST /api/webhooks
        DELETE /api/webhooks/{webhook_id}
        GET /api/audit
        GET /api/users
        POST /api/users
        PATCH /api/users/{user_id}
        POST /api/users/{user_id}/link
        POST /api/queue/pause
        POST /api/queue/continue
        POST /api/queue/drain
        POST /api/queue/{job_id}/priority
    """,
}
"""The least role of each route. A route that is not here fails a test, so that its role is a decision."""
EXPECTED = {
    (line.split()[0], line.split()[1]): role
    for role, text in LEAST.items()
    for line in text.splitlines()
    if line.strip()
}
STREAMS = {"/api/events"}


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> InProcess:
    return in_process(tmp_path_factory.mktemp("runs"))


def routes(inside: InProcess) -> dict[tuple[str, str], Role | None]:
    """All routes but folders of static files, and the role that each names."""
    found: dict[tuple[str, str], Role | None] = {}
    for route in inside.app.router.routes:
        assert isinstance(route, Route | APIRoute | Mount)
        if not isinstance(route, Mount):
            role = role_of(route) if isinstance(route, APIRoute) else None
            found |= {(method, route.path): role for method in route.methods or set() if method != "HEAD"}
    return found


def test_every_route_has_the_role_that_was_decided(inside: InProcess) -> None:
    found = routes(inside)
    assert {key for key, role in found.items() if role is None} <= PUBLIC
    assert {key: role for key, role in found.items() if role is not None} == EXPECTED


@pytest.mark.parametrize(("method", "path"), EXPECTED, ids=lambda value: value)
def test_a_lower_role_is_refused_and_a_higher_one_is_not(inside: InProcess, method: str, path: str) -> None:
    address = re.sub(r"\{\w+(:\w+)?\}", "99999", path)
    client = inside.client()
    for headers in ({}, {"Authorization": "Bearer ort_wrong"}, {"Cookie": "__Host-ortlaunch=wrong"}):
        answer = client.request(method, address, headers={"Origin": "https://127.0.0.1:8470", **headers}, json={})
        assert answer.status_code in (401, 403), f"nobody: {answer.status_code}"
    least = EXPECTED[method, path]
    for name, role in PEOPLE.items():
        if role >= least and path in STREAMS:
            continue  # A stream does not end.
        answer = client.request(method, address, headers=token(inside, name), json={} if method != "GET" else None)
        assert (answer.status_code == 403) == (role < least), f"{name}: {answer.status_code} {answer.text}"
        assert answer.status_code != 401
        assert answer.status_code < 500, answer.text


def token(inside: InProcess, name: str, made: dict[tuple[int, str], dict[str, str]] = {}) -> dict[str, str]:  # noqa: B006
    """One token for each person, for all tests of this file."""
    if (id(inside), name) not in made:
        made[id(inside), name] = inside.token(name, PEOPLE[name])
    return made[id(inside), name]
