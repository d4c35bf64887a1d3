"""What stands before every route."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import pytest
from fastapi import APIRouter, Depends

from ortlaunch.serve.access import Caller, Role, needs, require_roles
from ortlaunch.serve.limits import LARGEST_BODY, Bucket, TooManyRequests
from tests.support.service import HOST, ORIGIN, InProcess, in_process


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> InProcess:
    return in_process(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize(
    ("host", "status"),
    [(HOST, 200), ("localhost:1", 200), ("[::1]:8470", 200), ("evil.example", 400), ("127.0.0.1.evil.example", 400)],
)
def test_only_names_of_the_service_are_answered(inside: InProcess, host: str, status: int) -> None:
    assert inside.client().get("/health", headers={"Host": host}).status_code == status


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, 201),
        ({"Sec-Fetch-Site": None}, 201),
        ({"Origin": None}, 201),
        ({"Origin": None, "Sec-Fetch-Site": None}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": f"http://{HOST}"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "none"}, 403),
        ({"X-CSRF-Token": None}, 403),
        ({"X-CSRF-Token": "0" * 64}, 403),
        ({"X-CSRF-Token": "ö"}, 403),
    ],
)
def test_a_forged_request_of_a_browser_is_refused(
    inside: InProcess, changes: dict[str, str | None], status: int
) -> None:
    inside.service.limits.login = Bucket(1000, 60.0)
    headers = {**inside.browser("ada", Role.admin), **changes}
    sent = [(name, value.encode()) for name, value in headers.items() if value is not None]
    answer = inside.client().post("/api/tokens", headers=sent, json={"name": "x", "role": "viewer"})
    assert answer.status_code == status, answer.text


def test_a_cookie_does_not_count_beside_a_token(inside: InProcess) -> None:
    headers = {**inside.browser("ada", Role.admin), "Authorization": "Bearer wrong"}
    assert inside.client().get("/api/session", headers=headers).status_code == 401


def test_nobody_logs_in_from_another_site(inside: InProcess) -> None:
    answer = inside.client({"Origin": "https://evil.example"}).post("/api/session", json={"name": "x", "password": "y"})
    assert answer.status_code == 403


@pytest.mark.parametrize("known", [True, False], ids=["length", "chunks"])
def test_a_body_is_bounded(inside: InProcess, known: bool) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(LARGEST_BODY // 1024 + 1):
            yield b" " * 1024

    content = b"".join(chunks()) if known else chunks()
    for headers in (inside.token("ada", Role.admin), inside.browser("ada", Role.admin)):
        answer = inside.client().post("/api/tokens", headers=headers, content=content)
        assert answer.status_code == 413, answer.text
        content = b"".join(chunks()) if known else chunks()


def test_every_answer_has_the_headers(inside: InProcess) -> None:
    for path in ("/health", "/nothing", "/api/session"):
        headers = inside.client().get(path).headers
        assert "'unsafe" not in headers["content-security-policy"]
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert "max-age" in headers["strict-transport-security"]


def test_the_cookie_is_for_this_host_over_https_and_not_for_scripts(inside: InProcess) -> None:
    inside.service.limits.login = Bucket(1000, 60.0)
    inside.person("ada", Role.admin)
    answer = inside.client({"Origin": ORIGIN}).post(
        "/api/session", json={"name": "ada", "password": "correct horse battery"}
    )
    parts = answer.headers["set-cookie"].lower().split("; ")
    assert parts[0].startswith("__host-ortlaunch=")
    assert {"secure", "httponly", "path=/", "samesite=lax"} <= set(parts)
    assert not any(part.startswith("domain") for part in parts)


def test_a_route_without_a_role_stops_the_start() -> None:
    router = APIRouter()

    @router.get("/open")
    def open_to_all() -> str:
        return "everybody"

    with pytest.raises(RuntimeError, match="GET /open: it has 0 roles"):
        require_roles(router.routes)


def test_a_route_with_two_roles_stops_the_start() -> None:
    router = APIRouter()

    @router.get("/two")
    def two(
        _one: Annotated[Caller, Depends(needs(Role.viewer))], _other: Annotated[Caller, Depends(needs(Role.admin))]
    ) -> str:
        return ""

    with pytest.raises(RuntimeError, match="2 roles"):
        require_roles(router.routes)


def test_a_page_that_is_not_there_is_called_so(inside: InProcess) -> None:
    answer = inside.client({"Accept": "text/html"}).get("/nosuch")
    assert answer.status_code == 404
    assert "The service has no page of this address: it may be misspelt." in answer.text


def test_the_schema_is_for_those_logged_in(inside: InProcess) -> None:
    assert inside.client().get("/api/openapi.json").status_code == 401
    schema = inside.client().get("/api/openapi.json", headers=inside.token("ada", Role.admin)).json()
    assert "/api/users" in schema["paths"]


def test_a_bucket_fills_again() -> None:
    bucket = Bucket(5, 60.0)
    for _ in range(5):
        bucket.take("one", now=0.0)
    with pytest.raises(TooManyRequests) as refused:
        bucket.take("one", now=0.0)
    assert refused.value.seconds == 12
    bucket.take("other", now=0.0)
    bucket.take("one", now=12.0)
    with pytest.raises(TooManyRequests):
        bucket.take("one", now=12.0)
