"""Login by an OpenID Connect provider, which is a small one of this file with a key of its own."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from joserfc import jwk, jwt
from starlette.testclient import TestClient

from ortlaunch.serve import accounts
from ortlaunch.serve.access import Role
from ortlaunch.serve.identity import ByProxy
from ortlaunch.serve.oidc import Provider
from tests.support.cli import answer
from tests.support.service import ORIGIN, InProcess, in_process

CALLBACK = f"{ORIGIN}/oidc/callback"


class Fake:
    """A provider that vouches for whom the test says, with claims that the test may change."""

    def __init__(self) -> None:
        self.key = jwk.RSAKey.generate_key(2048, {"kid": "one"})
        self.claims: dict[str, Any] = {}
        self.challenges: dict[str, tuple[str, str]] = {}
        self.algorithm, self.signing = "RS256", self.key
        handler = type("Handler", (_Handler,), {"fake": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.issuer = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def authorize(self, url: str, code: str = "code") -> str:
        """What the person does at the provider; returns the state."""
        query = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
        assert query["code_challenge_method"] == "S256"
        self.challenges[code] = (query["code_challenge"], query["nonce"])
        return query["state"]

    def token(self, code: str, verifier: str) -> dict[str, Any] | None:
        challenge, nonce = self.challenges.pop(code, ("", ""))
        if _encoded(hashlib.sha256(verifier.encode()).digest()) != challenge:
            return None
        now = int(time.time())
        claims = {"iss": self.issuer, "aud": "ortlaunch", "sub": "1", "iat": now, "exp": now + 60, "nonce": nonce}
        claims |= {"preferred_username": "ada", **self.claims}
        claims = {name: value for name, value in claims.items() if value is not None}
        if self.algorithm == "RS256":
            token = jwt.encode({"alg": "RS256", "kid": "one"}, claims, self.signing)
        else:
            token = self.forged(claims)
        return {"access_token": "x", "token_type": "Bearer", "id_token": token}

    def forged(self, claims: dict[str, Any]) -> str:
        """A token that is not signed, or with the public key as a shared secret."""
        header = {"alg": self.algorithm, "kid": "one"}
        signed = ".".join(_encoded(json.dumps(part).encode()) for part in (header, claims))
        made = hmac.digest(self.key.as_pem(private=False), signed.encode(), "sha256")
        return f"{signed}.{_encoded(made) if self.algorithm == 'HS256' else ''}"


def _encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


class _Handler(BaseHTTPRequestHandler):
    fake: Fake

    def do_GET(self) -> None:
        issuer = self.fake.issuer
        pages = {
            "/.well-known/openid-configuration": {
                "issuer": issuer,
                "authorization_endpoint": f"{issuer}/authorize",
                "token_endpoint": f"{issuer}/token",
                "jwks_uri": f"{issuer}/keys",
            },
            "/keys": {"keys": [self.fake.key.as_dict(private=False)]},
            "/odd/.well-known/openid-configuration": ["not", "what", "a provider describes"],
        }
        self._answer(pages[self.path])

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        found = self.fake.token(form["code"][0], form["code_verifier"][0])
        self._answer(found or {"error": "invalid_grant"}, 200 if found else 400)

    def _answer(self, document: Any, status: int = 200) -> None:
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def fake() -> Iterator[Fake]:
    made = Fake()
    yield made
    made.server.shutdown()


@pytest.fixture
def inside(tmp_path: Path, fake: Fake) -> InProcess:
    fake.claims, fake.algorithm, fake.signing = {}, "RS256", fake.key
    made = in_process(tmp_path, oidc_issuer=fake.issuer, oidc_client="ortlaunch")
    made.person("ada", Role.runner)
    return made


def login(inside: InProcess, fake: Fake, **changes: str) -> Any:
    """The whole way of a browser, with changes of what it brings back."""
    client = inside.client()
    began = client.get("/oidc", follow_redirects=False)
    assert began.status_code == 303, began.text
    state = fake.authorize(began.headers["location"])
    if "browser" in changes:
        client.cookies.clear()
        client.cookies.set("__Host-ortlaunch-oidc", changes["browser"])
    query = {"state": changes.get("state", state), "code": changes.get("code", "code")}
    return client.get("/oidc/callback", params=query, follow_redirects=False)


@pytest.mark.parametrize("claims", [{}, {"aud": ["ortlaunch"]}, {"aud": ["ortlaunch", "other"], "azp": "ortlaunch"}])
def test_a_user_whom_the_provider_vouches_for_is_logged_in(
    inside: InProcess, fake: Fake, claims: dict[str, Any]
) -> None:
    fake.claims = claims
    ended = login(inside, fake)
    assert ended.status_code == 303, ended.text
    assert ended.headers["location"] == "/"
    cookie = next(one for one in ended.headers.get_list("set-cookie") if one.startswith("__Host-ortlaunch="))
    who = inside.client({"Cookie": cookie.partition(";")[0]}).get("/api/session").json()
    assert (who["name"], who["role"]) == ("ada", "runner")


@pytest.mark.parametrize(
    ("claims", "words"),
    [
        ({"preferred_username": "eve"}, "no user of this service"),
        ({"preferred_username": None}, "gives no preferred_username"),
        ({"preferred_username": ["ada"]}, "gives no preferred_username"),
        ({"iss": "https://evil.example"}, "does not vouch"),
        ({"aud": "another"}, "does not vouch"),
        ({"aud": "another", "azp": "ortlaunch"}, "does not vouch"),
        ({"aud": ["ortlaunch", "another"]}, "does not vouch"),
        ({"aud": ["ortlaunch", "another"], "azp": "another"}, "does not vouch"),
        ({"exp": 1}, "does not vouch"),
        ({"exp": None}, "does not vouch"),
        ({"nonce": "of another login"}, "does not vouch"),
        ({"nonce": None}, "does not vouch"),
    ],
)
def test_what_does_not_prove_who_it_is_logs_nobody_in(
    inside: InProcess, fake: Fake, claims: dict[str, Any], words: str
) -> None:
    fake.claims = claims
    ended = login(inside, fake)
    assert ended.status_code == 422
    assert words in ended.text
    assert not [one for one in ended.headers.get_list("set-cookie") if one.startswith("__Host-ortlaunch=")]


@pytest.mark.parametrize("kind", ["none", "HS256", "another key"])
def test_a_signature_that_is_not_the_providers_is_refused(inside: InProcess, fake: Fake, kind: str) -> None:
    if kind == "another key":
        fake.signing = jwk.RSAKey.generate_key(2048, {"kid": "one"})
    else:
        fake.algorithm = kind
    assert "does not vouch" in login(inside, fake).text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"browser": "of another"}, "not begun in this browser"),
        ({"state": "guessed"}, "not begun in this browser"),
        ({"code": "guessed"}, "does not vouch"),
    ],
)
def test_a_login_that_another_browser_began_is_refused(
    inside: InProcess, fake: Fake, changes: dict[str, str], words: str
) -> None:
    ended = login(inside, fake, **changes)
    assert ended.status_code == 422
    assert words in ended.text


@pytest.mark.parametrize(("error", "shown"), [("access_denied", "access_denied"), ("Call 0800", "it gave no reason")])
def test_what_the_provider_refuses_is_said(inside: InProcess, error: str, shown: str) -> None:
    ended = inside.client().get("/oidc/callback", params={"error": error, "error_description": "Call 0800"})
    assert ended.status_code == 422
    assert ended.json()["problems"] == [{"key": None, "message": f"the provider did not log you in: {shown}"}]


def test_a_user_is_the_subject_of_the_first_login(inside: InProcess, fake: Fake) -> None:
    assert login(inside, fake).status_code == 303
    fake.claims = {"sub": "2"}
    assert "was another person of the provider" in login(inside, fake).text, "the name was given to somebody else"
    fake.claims = {"sub": "1", "preferred_username": "renamed"}
    assert login(inside, fake).status_code == 303, "the same person has another name"
    accounts.new_link(inside.service, inside.person("root", Role.admin), inside.person("ada", Role.runner).user_id)
    fake.claims = {"sub": "2"}
    assert login(inside, fake).status_code == 303, "an administrator has let the other one in"
    fake.claims = {"sub": "1"}
    assert login(inside, fake).status_code == 422


def from_address(inside: InProcess, address: str, *names: str) -> Any:
    """Asks for the page of a login through a proxy, or past it, with headers that say who it is."""
    app = ByProxy(inside.app, "10.0.0.0/8", "X-Forwarded-User")
    client = TestClient(app, base_url=ORIGIN, client=(address, 5000), raise_server_exceptions=False)
    client.headers = httpx.Headers([("X-Forwarded-User", one) for one in names])
    return client, client.get("/login", params={"next": "/queue"}, follow_redirects=False)


@pytest.mark.parametrize(
    ("address", "names", "status"),
    [
        ("10.1.2.3", ["ada"], 303),
        ("10.1.2.3", ["eve"], 422),
        ("10.1.2.3", ["ada", "ada"], 422),
        ("10.1.2.3", [], 200),
        ("192.0.2.1", ["ada"], 200),
    ],
)
def test_the_proxy_alone_says_who_it_is(inside: InProcess, address: str, names: list[str], status: int) -> None:
    client, answer = from_address(inside, address, *names)
    assert answer.status_code == status, answer.text
    assert (client.get("/api/session").status_code == 200) == (status == 303)
    if status == 303:
        assert answer.headers["location"] == "/queue"
        # Another person has logged in at the proxy, in the same browser.
        client.headers["X-Forwarded-User"] = "bob"
        assert client.get("/api/session").status_code == 401


@pytest.mark.parametrize("wanted", ["//evil.example", "https://evil.example", "/\\evil.example"])
def test_a_login_by_the_proxy_leads_to_a_page_of_the_service(inside: InProcess, wanted: str) -> None:
    client, _ = from_address(inside, "10.1.2.3", "ada")
    assert client.get("/login", params={"next": wanted}, follow_redirects=False).headers["location"] == "/"


def test_an_address_counts_only_where_it_was_verified(inside: InProcess, fake: Fake) -> None:
    inside.service.provider = Provider(fake.issuer, "ortlaunch", "secret", claim="email")
    fake.claims = {"email": "ada"}
    assert "gives no email" in login(inside, fake).text
    fake.claims = {"email": "ada", "email_verified": True}
    assert login(inside, fake).status_code == 303


def test_a_provider_whose_description_is_none_is_said_to_be_at_fault(inside: InProcess, fake: Fake) -> None:
    inside.service.provider = Provider(f"{fake.issuer}/odd", "ortlaunch", "secret")
    refused = inside.client().get("/oidc", follow_redirects=False)
    assert refused.status_code == 422
    assert "cannot be asked" in refused.text


def test_without_a_provider_there_is_no_such_login(tmp_path: Path) -> None:
    assert in_process(tmp_path).client().get("/oidc").status_code == 404


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--identity-header=X-Forwarded-User"], "needs --trusted-proxy"),
        (["--oidc-issuer=https://id.example"], "go together"),
        (["--oidc-issuer=http://id.example", "--oidc-client=x"], "must begin with https://"),
        (["--oidc-issuer=https://[id.example", "--oidc-client=x"], "must begin with https://"),
        (["--oidc-issuer=https://", "--oidc-client=x"], "must begin with https://"),
        (["--oidc-issuer=https://id.example", "--oidc-client=x"], "ORTLAUNCH_OIDC_SECRET"),
    ],
)
def test_a_provider_is_named_whole(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    result = answer(tmp_path, capfd, "serve", *arguments)
    assert result.returncode == 2
    assert words in result.stderr
