"""A real service with runs, and people who look at it with Chromium."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from ortlaunch.run.identity import start_ticks
from ortlaunch.run.journal import Journal
from ortlaunch.serve.access import COOKIE
from tests.launch.follow.conftest import Maker
from tests.support.browser import CHROMIUM, Visit
from tests.support.needs import needs
from tests.support.servers import free_port
from tests.support.service import PASSWORD, Server, start

HOSTILE = '<img src=x onerror="document.title=1">\u202egpj'
"""A name that is code where it is not escaped, and turns the text's direction."""
HOSTILE_LINE = '<script>document.title="taken"</script> \x1b[31mred\x1b[0m \u202eabc'
STEPS = 50
PATIENCE = 30_000
"""Milliseconds for what takes far less on a machine with nothing else to do."""
expect.set_options(timeout=PATIENCE)


@dataclass
class Site:
    """The service, its runs, and who may log in with `PASSWORD`."""

    folder: Path
    server: Server
    running: Path
    ended: Path
    names: list[str] = field(default_factory=list)

    def restart(self) -> None:
        """Starts the service again on the same port."""
        cookie = self.server.cookie
        self.server = start(self.folder, "--shared-account", f"--port={self.server.port}")
        self.server.cookie = cookie

    def add(self, name: str, role: str) -> None:
        """Adds a user as the administrator does."""
        made = self.server.ask("POST", "/api/users", {"name": name, "role": role})
        assert made.status == 201, made.body
        link = made.json["link"].rpartition("/")[2]
        used = self.server.ask("POST", "/api/link", {"link": link, "password": PASSWORD}, {"Cookie": ""})
        assert used.status == 200, used.body
        self.names.append(name)

    def streams(self) -> int:
        """How many event streams are open."""
        figures = self.server.ask("GET", "/metrics").body.decode()
        found = re.search(r"^ortlaunch_streams (\d+)", figures, re.MULTILINE)
        assert found is not None, figures
        return int(found[1])

    def log(self, *lines: str, rank: int = 0) -> None:
        """What a worker of the running run says."""
        with (self.running / "logs" / f"rank-{rank}.log").open("a") as log:
            log.write("".join(f"{line}\n" for line in lines))

    def measure(self, step: int, loss: float) -> None:
        """A log step of the running run."""
        with Journal(self.running / "journal.jsonl") as journal:
            journal.metrics(step, {"train/loss": loss, "throughput/tokens_per_second": 1000.0 + step})


@dataclass
class Person:
    """Somebody with a browser of their own."""

    context: BrowserContext
    site: Site
    visits: list[Visit] = field(default_factory=list)

    def tab(self, path: str = "/") -> Page:
        """Another tab."""
        visit = Visit(self.context.new_page())
        visit.listen()
        self.visits.append(visit)
        visit.page.goto(self.site.server.url + path)
        return visit.page

    def log_in(self, name: str, path: str = "/") -> Page:
        """Logs in by the form, and ends on the page that was asked for."""
        page = self.tab(path)
        page.get_by_label("Name").fill(name)
        page.get_by_label("Password").fill(PASSWORD)
        page.get_by_role("button", name="Log in").click()
        page.wait_for_url(self.site.server.url + path)
        return page

    def is_logged_in(self, cookie: str) -> None:
        """Has the session of somebody who has logged in elsewhere: five logins a minute are all that a name gets."""
        place = {"domain": "127.0.0.1", "path": "/", "secure": True, "httpOnly": True}
        self.context.add_cookies([{"name": COOKIE, "value": cookie, **place}])  # type: ignore[typeddict-item]

    @property
    def errors(self) -> list[str]:
        """What the consoles of all tabs say."""
        return [error for visit in self.visits for error in visit.errors]

    @property
    def hosts(self) -> set[str]:
        """Who was asked by any tab."""
        return {host for visit in self.visits for host in visit.hosts}


def _runs(root: Path) -> tuple[Path, Path]:
    make = Maker(root)
    ended = make("gpt2-eager", steps=STEPS, step=STEPS)
    make(HOSTILE, steps=STEPS, end="FAILED")
    for number in range(60):
        make(f"sweep-{number}", experiment="sweeps", steps=STEPS)
    alive = {"pid": os.getpid(), "host": socket.gethostname(), "start_ticks": start_ticks(os.getpid())}
    running = make("gpt2-ort", steps=STEPS, step=None, end=None, launcher=alive)
    for run_dir in (ended, running):
        (run_dir / "logs" / "rank-0.log").write_text("".join(f"line {n}\n" for n in range(3000)))
    return running, ended


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The service with an administrator, ada, and 63 runs."""
    needs(CHROMIUM, "needs Debian's package chromium")
    folder = tmp_path_factory.mktemp("site")
    running, ended = _runs(folder / "runs")
    # On a port that no connection of another test is given before the service listens there again.
    server = start(folder, "--shared-account", port=free_port())
    site = Site(folder, server, running, ended)
    try:
        server.first_administrator("ada")
        site.measure(1, 4.0)
        yield site
    finally:
        site.server.kill()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Debian's Chromium, which reaches no host but this one."""
    needs(CHROMIUM, "needs Debian's package chromium")
    with sync_playwright() as playwright:
        rules = "MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", f"--host-resolver-rules={rules}"]
        )
        try:
            yield browser
        finally:
            browser.close()


@pytest.fixture
def person(chromium: Browser, site: Site) -> Iterator[Callable[..., Person]]:
    """Makes people, each with cookies of their own."""
    contexts: list[BrowserContext] = []

    def make(width: int = 1280, scheme: str = "light") -> Person:
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        return Person(context, site)

    yield make
    for context in contexts:
        context.close()
