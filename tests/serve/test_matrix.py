"""Every route, and who may use it: nobody, viewer, runner, author, admin; of a run also its owner and others."""

from __future__ import annotations

import re
import secrets
from typing import Any

import httpx
import jsonschema
import pytest
from fastapi.routing import APIRoute
from sqlalchemy import func, select
from starlette.routing import Mount, Route

from ortlaunch.run.run import Run
from ortlaunch.serve import accounts
from ortlaunch.serve.access import PUBLIC, Role, role_of, takes_tokens
from ortlaunch.serve.actor import Refused
from ortlaunch.serve.database import writing
from ortlaunch.serve.openapi import described
from ortlaunch.serve.queue.tables import Job, JobState
from tests.support.service import PASSWORD, InProcess, in_process

PEOPLE = {"vera": Role.viewer, "rob": Role.runner, "aude": Role.author, "ada": Role.admin}
LEAST = {
    Role.viewer: """
        GET /
        GET /compare
        GET /queue
        GET /runs/{run}
        GET /sweeps/{sweep}
        GET /runs/{run}/panel
        GET /compare/tables
        GET /tokens
        GET /metrics
        GET /api/compare
        GET /api/events
        GET /api/facets
        GET /api/fields
        GET /api/openapi.json
        GET /machine
        GET /api/limits
        GET /api/machine
        GET /api/queue
        GET /api/projects
        GET /api/ready-jobs
        GET /api/runs
        GET /api/runs/{id}
        GET /api/runs/{id}/config
        GET /api/runs/{id}/files/{name:path}
        GET /api/runs/{id}/logs/{rank}
        GET /api/runs/{id}/logs/{rank}/text
        GET /api/runs/{id}/metrics
        GET /api/runs/{run_id}/keys
        GET /api/session
        DELETE /api/session
        DELETE /api/session/others
        POST /api/session/password
        GET /api/tokens
        POST /api/tokens
        DELETE /api/tokens/{token_id}
    """,
    Role.runner: """
        GET /submit
        POST /api/runs
        POST /api/runs/check
        POST /api/runs/{run_id}/cancel
        POST /api/runs/{run_id}/delete
        POST /api/runs/{run_id}/export
        POST /api/runs/{run_id}/resume
        PUT /api/runs/{run_id}/note
    """,
    Role.admin: """
        GET /audit
        GET /users
        GET /api/audit
        PUT /api/limits/{role}
        GET /api/users
        POST /api/users
        PATCH /api/users/{user_id}
        POST /api/users/{user_id}/link
        PUT /api/projects/{name}
        DELETE /api/projects/{name}
        POST /api/queue/continue
        POST /api/queue/drain
        POST /api/queue/pause
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
WITHOUT_TOKENS = {
    ("POST", "/api/tokens"),
    ("POST", "/api/users"),
    ("PATCH", "/api/users/{user_id}"),
    ("POST", "/api/users/{user_id}/link"),
    ("POST", "/api/session/password"),
    ("DELETE", "/api/session/others"),
    ("DELETE", "/api/session"),
    ("PUT", "/api/limits/{role}"),
    ("PUT", "/api/projects/{name}"),
    ("DELETE", "/api/projects/{name}"),
}
"""What somebody who has stolen a token may not do with it: what outlives the token."""


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
        assert_described(inside, method, path, answer)
    least = EXPECTED[method, path]
    for name, role in PEOPLE.items():
        if role >= least and path in STREAMS:
            continue  # A stream does not end.
        sent = inside.browser(name, role) if (method, path) in WITHOUT_TOKENS else token(inside, name)
        answer = client.request(method, address, headers=sent, json={} if method != "GET" else None)
        assert (answer.status_code == 403) == (role < least), f"{name}: {answer.status_code} {answer.text}"
        assert answer.status_code != 401
        assert answer.status_code < 500, answer.text
        assert_described(inside, method, path, answer)


def assert_described(inside: InProcess, method: str, path: str, answer: httpx.Response) -> None:
    """An answer of the API is one that its description has, also in how it refuses."""
    if not path.startswith("/api/") or path == "/api/openapi.json":
        return
    document = described(inside.app)
    operation = document["paths"][path.replace(":path", "")][method.lower()]
    kinds = {kind for one in operation["security"] for kind in one}
    assert kinds == ({"session"} if (method, path) in WITHOUT_TOKENS else {"token", "session"})
    told = operation["responses"].get(str(answer.status_code))
    assert told is not None, f"{answer.status_code} is not described"
    if answer.status_code >= 400:
        assert told["content"]["application/json"]["schema"]["$ref"].endswith("/Problems")
        jsonschema.validate(answer.json(), document["components"]["schemas"]["Problems"])


def test_a_token_does_nothing_that_outlives_it(inside: InProcess) -> None:
    found = {
        (method, route.path)
        for route in inside.app.router.routes
        if isinstance(route, APIRoute) and not takes_tokens(route)
        for method in route.methods
    }
    assert found == WITHOUT_TOKENS
    for method, path in sorted(WITHOUT_TOKENS):
        address = path.replace("{user_id}", str(inside.person("ada", Role.admin).user_id))
        address = address.replace("{role}", "admin").replace("{name}", "eve")
        body = {"name": "eve", "role": "admin", "old": PASSWORD, "new": "another good password"}
        answer = inside.client().request(method, address, headers=token(inside, "ada"), json=body)
        assert (answer.status_code, "a token may not do this" in answer.text) == (403, True), f"{method} {path}"
    assert "eve" not in [user.name for user in accounts.users(inside.service)]


class _NoChild:
    """Stands for the children that act: a request that comes this far was allowed."""

    def may_act_for(self, _user: str) -> bool:
        return True

    def call(self, _user: str, action: str, _request: object) -> dict[str, Any]:
        raise Refused(f"{action} is not done in this test")


@pytest.fixture
def run_of_rob(inside: InProcess, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run that has ended, of the runner rob; a folder in the run root and a job of the queue."""
    monkeypatch.setattr(inside.service, "actor", _NoChild())
    key = f"20260101-000000-{secrets.token_hex(3)}"
    run_dir = inside.service.settings.root / "default" / f"{key[:15]}-mine-{key[16:]}"
    run_dir.mkdir(parents=True)
    for path in (Run(run_dir).config_file, Run(run_dir).journal_file):
        path.write_text("")
    with writing(inside.service.engine) as session:
        rob = inside.person("rob", Role.runner)
        number = (session.scalar(select(func.max(Job.number))) or 0) + 1
        job = Job(
            id=f"q{number}",
            number=number,
            user_id=rob.user_id,
            owner="rob",
            unix_user="rob",
            state=JobState.ENDED,
            submitted=1.0,
            run_id=key[16:],
            run_key=key,
            run_dir=str(run_dir),
            request={"job": None, "keys": {}},
            words=[],
            token="",
            slots=1,
            name="mine",
            experiment="default",
        )
        session.add(job)
    return f"q{number}"


@pytest.mark.parametrize("action", ["cancel", "delete", "export", "resume"])
def test_a_run_is_changed_by_its_owner_and_administrators_alone(
    inside: InProcess, run_of_rob: str, action: str
) -> None:
    client = inside.client()
    answers = {
        name: client.post(f"/api/runs/{run_of_rob}/{action}", headers=token(inside, name), json={}) for name in PEOPLE
    }
    assert {name for name, answer in answers.items() if answer.status_code == 403} == {"vera", "aude"}
    for name in ("rob", "ada"):
        assert answers[name].status_code in (409, 422), answers[name].text
    seen = client.get(f"/api/runs/{run_of_rob}/keys", headers=token(inside, "vera"))
    assert seen.status_code == 200, "everybody may look"


def token(inside: InProcess, name: str, made: dict[tuple[int, str], dict[str, str]] = {}) -> dict[str, str]:  # noqa: B006
    """One token for each person, for all tests of this file."""
    if (id(inside), name) not in made:
        made[id(inside), name] = inside.token(name, PEOPLE[name])
    return made[id(inside), name]
