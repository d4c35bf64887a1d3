"""Debian's Chromium, headless, driven by Playwright, with no way to any host but the loopback address."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from playwright.sync_api import Page, Response, sync_playwright

from tests.support.needs import needs

CHROMIUM = shutil.which("chromium")


@dataclass
class Visit:
    """A page that is open, and what it has said and asked for."""

    page: Page
    errors: list[str] = field(default_factory=list)
    """What the page's console shows as errors, and exceptions that nobody caught."""
    failed: list[str] = field(default_factory=list)
    """Requests without an answer, or with one of 400 and more."""
    hosts: set[str] = field(default_factory=set)
    """Who was asked."""

    def listen(self) -> None:
        """Begins to note."""
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("requestfailed", lambda asked: self.failed.append(f"{asked.url}: {asked.failure}"))
        self.page.on("response", self._note_status)
        self.page.on("request", lambda asked: self.hosts.add(urlsplit(asked.url).netloc))

    def _note_status(self, response: Response) -> None:
        if response.status >= 400:
            self.failed.append(f"{response.url}: {response.status}")


@contextmanager
def visiting(user: str | None = None, password: str = "", width: int = 1400, height: int = 1000) -> Iterator[Visit]:
    """Opens an empty page; `user` and `password` are for basic auth."""
    needs(CHROMIUM, "needs Debian's package chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"],
        )
        try:
            credentials = {"username": user, "password": password} if user is not None else None
            context = browser.new_context(http_credentials=credentials, viewport={"width": width, "height": height})
            visit = Visit(context.new_page())
            visit.listen()
            yield visit
        finally:
            browser.close()
