"""The service as a team has it: behind nginx with the documentation's own configuration, with TLS of its own, and with
the login of an OpenID Connect provider, all of them real programs and seen by Chromium."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from ortlaunch.run.identity import start_ticks
from ortlaunch.serve.access import COOKIE
from ortlaunch.serve.secret import csrf_of
from tests.launch.follow.conftest import Maker
from tests.support.browser import CHROMIUM, Visit
from tests.support.certificates import self_signed
from tests.support.needs import needs
from tests.support.servers import free_port
from tests.support.service import PASSWORD, Answer, Server, cookie_of, start
from tests.support.waiting import until

pytestmark = pytest.mark.nightly
NAME = "runs.example.org"
NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/sbin:/usr/local/bin")
DOCS = Path(__file__).parents[2] / "docs" / "serve.md"
WAIT = 30_000
expect.set_options(timeout=WAIT)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Chromium that finds the name of the service on this machine."""
    needs(CHROMIUM, "needs Debian's package chromium")
    rules = f"MAP {NAME} 127.0.0.1, MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"
    with sync_playwright() as playwright:
        words = ["--no-sandbox", f"--host-resolver-rules={rules}", "--ignore-certificate-errors"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=words)
        try:
            yield browser
        finally:
            browser.close()


def visit_of(browser: Browser) -> Visit:
    context = browser.new_context(ignore_https_errors=True)
    context.set_default_timeout(WAIT)
    visit = Visit(context.new_page())
    visit.listen()
    return visit


def ask(port: int, method: str, path: str, body: Any = None, *, source: str = "127.0.0.1", **headers: str) -> Answer:
    """A request over TLS, from an address of this machine."""
    context = ssl._create_unverified_context()
    connection = http.client.HTTPSConnection(
        "127.0.0.1", port, timeout=200, context=context, source_address=(source, 0)
    )
    sent = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    try:
        connection.request(method, path, None if body is None else json.dumps(body), sent)
        found = connection.getresponse()
        return Answer(found.status, found.headers, found.read())
    finally:
        connection.close()


def plainly(port: int, body: Any, source: str, **headers: str) -> Answer:
    """A login that does not come by the proxy."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=200, source_address=(source, 0))
    sent = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    try:
        connection.request("POST", "/api/session", json.dumps(body), sent)
        found = connection.getresponse()
        return Answer(found.status, found.headers, found.read())
    finally:
        connection.close()


def documented_nginx(certificate: Path, key: Path, outside: int, inside: int) -> str:
    """The server block of docs/serve.md, with files and ports of this test."""
    found = re.search(r"```nginx\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert found is not None
    block = found[1]
    changes = {
        "listen 443 ": f"listen 127.0.0.1:{outside} ",
        "/etc/ssl/runs.pem": str(certificate),
        "/etc/ssl/runs.key": str(key),
        "127.0.0.1:8470": f"127.0.0.1:{inside}",
    }
    for old, new in changes.items():
        assert block.count(old) == 1, old
        block = block.replace(old, new)
    return block


@contextmanager
def nginx(folder: Path, block: str) -> Iterator[None]:
    place = folder / "nginx"
    place.mkdir()
    temporary = "\n".join(f"{kind}_temp_path {place}/{kind};" for kind in ("client_body", "proxy", "fastcgi"))
    temporary += f"\nuwsgi_temp_path {place}/uwsgi;\nscgi_temp_path {place}/scgi;"
    (place / "nginx.conf").write_text(
        f"daemon off;\nmaster_process off;\npid {place}/pid;\nerror_log {place}/error.log;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{temporary}\n{block}}}\n"
    )
    words = [NGINX, "-p", str(place), "-c", str(place / "nginx.conf"), "-e", str(place / "error.log")]
    tried = subprocess.run([*words, "-t"], capture_output=True, text=True, check=False)
    assert tried.returncode == 0, tried.stderr
    process = subprocess.Popen(words)
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)


def wait_for(holds: Any) -> None:
    until(holds)


def open_port(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def log_in(page: Page, url: str) -> None:
    page.goto(url)
    page.get_by_label("Name").fill("ada")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(f"{url}/")


def test_nginx_as_the_documentation_sets_it_up(tmp_path: Path, make_run: Maker) -> None:
    if NGINX is None:
        pytest.skip("needs nginx (Debian's package nginx-light)")
    alive = {"pid": os.getpid(), "host": socket.gethostname(), "start_ticks": start_ticks(os.getpid())}
    run = make_run("followed", run_id="00aa00", end=None, launcher=alive)
    (run / "logs" / "rank-0.log").write_text("line 0\n")
    outside, inside = free_port(), free_port()
    public = f"https://{NAME}:{outside}"
    block = documented_nginx(*self_signed(tmp_path), outside, inside)
    server = start(tmp_path, "--trusted-proxy=127.0.0.1", f"--public-url={public}", port=inside)
    try:
        with nginx(tmp_path, block), chromium() as browser:
            wait_for(lambda: open_port(outside))
            own = {"Host": f"{NAME}:{outside}", "Origin": public}
            first = ask(outside, "POST", "/api/link", {"link": server.link, "name": "ada", "password": PASSWORD}, **own)
            assert first.status == 200, first.body
            # A browser takes such a cookie only over https, for the whole host, and for this host alone.
            kept = first.headers["Set-Cookie"]
            assert kept.startswith(f"{COOKIE}=")
            assert all(word in kept for word in ("; Secure", "; HttpOnly", "; Path=/")) and "Domain" not in kept
            assert first.headers["Strict-Transport-Security"]
            secret = cookie_of(first)
            session = {**own, "Cookie": f"{COOKIE}={secret}", "X_CSRF_Token": csrf_of(secret)}
            # Addresses come from nginx, and from nobody before it.
            known = {"name": "ada", "password": PASSWORD}
            login = ask(
                outside, "POST", "/api/session", known, source="127.0.0.2", X_Forwarded_For="203.0.113.9", **own
            )
            assert login.status == 200, login.body
            # Who is not the proxy is not believed: neither the address nor that there is TLS.
            forged = {"X_Forwarded_For": "203.0.113.9", "X_Forwarded_Proto": "https"}
            past = plainly(inside, known, "127.0.0.3", **own, **forged)
            assert past.status == 200 and "Strict-Transport-Security" not in past.headers
            entries = ask(outside, "GET", "/api/audit", **session).json["entries"]
            addresses = [json.loads(one["detail"])["address"] for one in entries if one["action"] == "login"]
            assert addresses == ["127.0.0.3", "127.0.0.2", "127.0.0.1"]
            foreign = {**own, "Origin": "https://elsewhere.example.org"}
            assert ask(outside, "POST", "/api/session", known, **foreign).status == 403
            assert ask(outside, "GET", "/login", Host="elsewhere.example.org").status == 400
            assert ask(outside, "POST", "/api/session", {"name": "x" * 300_000}, **own).status == 413
            followed_in_a_browser(browser, public, run)
    finally:
        server.kill()


def followed_in_a_browser(browser: Browser, public: str, run: Path) -> None:
    """Logs in by the form, and sees the lines that come while the page is open: nginx passes the stream on at once."""
    visit = visit_of(browser)
    log_in(visit.page, public)
    visit.page.goto(f"{public}/runs/00aa00")
    visit.page.wait_for_selector('.log[data-ready="yes"]')
    for line in ("line 1", "line 2"):
        with (run / "logs" / "rank-0.log").open("a") as log:
            log.write(f"{line}\n")
        expect(visit.page.locator(".log div").last).to_have_text(line)
    assert visit.errors == []


def test_the_service_speaks_tls_itself(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    server = start(tmp_path, f"--tls-certificate={certificate}", f"--tls-key={key}")
    try:
        own = {"Origin": f"https://127.0.0.1:{server.port}"}
        first = ask(server.port, "POST", "/api/link", {"link": server.link, "name": "ada", "password": PASSWORD}, **own)
        assert first.status == 200, first.body
        assert first.headers["Set-Cookie"].startswith(f"{COOKIE}=")
        assert first.headers["Strict-Transport-Security"]
        # Who speaks no TLS gets no answer.
        with pytest.raises((http.client.HTTPException, OSError)):
            server.ask("GET", "/health")
    finally:
        server.kill()


@contextmanager
def provider(folder: Path) -> Iterator[str]:
    """An OpenID Connect provider of another project (oidc-provider-mock) with three people; yields its address."""
    if importlib.util.find_spec("oidc_provider_mock") is None:
        pytest.skip("needs the package oidc-provider-mock")
    port, people = free_port(), {"1": "ada", "2": "eve", "3": None}
    words = [sys.executable, "-W", "ignore", "-m", "oidc_provider_mock", f"--port={port}"]
    for subject, name in people.items():
        claims = {"sub": subject, **({"preferred_username": name} if name else {})}
        words += ["--user-claims", json.dumps(claims)]
    with (folder / "provider.log").open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        wait_for(lambda: open_port(port))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


def test_login_by_a_provider(tmp_path: Path) -> None:
    with provider(tmp_path) as issuer, chromium() as browser:
        described = json.load(urlopen(f"{issuer}/.well-known/openid-configuration", timeout=10))
        options = (f"--oidc-issuer={described['issuer']}", "--oidc-client=ortlaunch")
        server = start(tmp_path, *options, ORTLAUNCH_OIDC_SECRET="secret")
        try:
            server.first_administrator("ada")
            logs_in(browser, server, "1")
            says(browser, server, "2", "eve is no user of this service: ask an administrator")
            says(browser, server, "3", "the provider gives no preferred_username that can be relied on")
            says(browser, server, None, "the provider did not log you in: access_denied")
        finally:
            server.kill()


def at_the_provider(browser: Browser, server: Server, subject: str | None) -> Visit:
    """Goes to the provider from the login page, and says there who one is; None refuses."""
    visit = visit_of(browser)
    visit.page.goto(f"{server.url}/login")
    visit.page.get_by_role("link", name="Log in by your organization").click()
    if subject is None:
        visit.page.get_by_role("button", name="Deny").click()
    else:
        visit.page.locator("input[name=sub]").fill(subject)
        visit.page.get_by_role("button", name="Authorize").first.click()
    return visit


def logs_in(browser: Browser, server: Server, subject: str) -> None:
    visit = at_the_provider(browser, server, subject)
    visit.page.wait_for_url(f"{server.url}/")
    expect(visit.page.locator(".who")).to_have_text("ada, admin")
    # The provider's own page asks for a style of the internet.
    assert not [one for one in visit.failed if one.startswith(server.url)]


def says(browser: Browser, server: Server, subject: str | None, words: str) -> None:
    page = at_the_provider(browser, server, subject).page
    page.wait_for_url(f"{server.url}/oidc/callback**")
    expect(page.locator("main p").first).to_have_text(words)
    assert not [one for one in page.context.cookies() if one["name"] == COOKIE]
