"""Takes the pictures in docs/images: the page of a real bench, and the service's pages with a run that trains.

``python -m tests.serve.pages.pictures`` needs Chromium and takes some minutes.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from ortlaunch.serve.access import COOKIE
from tests.support.browser import CHROMIUM
from tests.support.service import Server, start

IMAGES = Path(__file__).parents[3] / "docs" / "images"
_KEYS = {"model": "gpt2_nano", "trainer": "single", "experiment": "nano", "train.log_every": 5, "device": "cpu"}
_RUNS = (
    ("nano-eager", {"backend": "eager", "train.steps": 100_000}),
    ("nano-ort", {"backend": "ort", "train.steps": 60}),
    ("nano-lr", {"backend": "eager", "train.steps": 60, "optimizer.lr": 0.001}),
)
_BENCH = ("model=gpt2_nano", "backend=eager,ort", "trainer=ddp", "train.steps=100", "train.log_every=10", "device=cpu")
_TOP = 730
"""Pixels of the comparison that the documentation's first page shows."""
_STEPS = 40
"""So many steps are in the curves."""
_SECONDS = 600
_COLORS = 64
"""A page has few colours, and a picture with few of them is a third as large."""


def main() -> None:
    """Runs a bench, starts the service, lets a run train, and replaces the pictures."""
    with tempfile.TemporaryDirectory(prefix="pictures-", ignore_cleanup_errors=True) as folder:
        _take_comparison(Path(folder) / "bench")
        server = start(Path(folder), "--shared-account", "--slots=1")
        try:
            server.first_administrator("ada")
            _take(server)
        finally:
            server.kill()
            for process in psutil.process_iter(["cmdline"]):
                if folder in " ".join(process.info["cmdline"] or ()):
                    process.kill()


def _take_comparison(folder: Path) -> None:
    """The page of a comparison, as a browser shows the file."""
    folder.mkdir()
    command = [sys.executable, "-m", "ortlaunch", "bench", *_BENCH, "repeat=3", "--html", "page.html"]
    subprocess.run(command, cwd=folder, check=True)
    page = folder / "page.html"
    page.write_text(page.read_text().replace(str(folder), "/home/you/project"))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            _picture_comparison(browser, page)
        finally:
            browser.close()


def _picture_comparison(browser: Browser, file: Path) -> None:
    """As a wide window shows it, made smaller: in a narrow one the plots are below each other."""
    page = browser.new_page(viewport={"width": 1200, "height": 1500}, color_scheme="light")
    page.goto(file.as_uri())
    page.locator("canvas").first.wait_for()
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB").resize((960, 1200), Image.Resampling.LANCZOS)
    image = image.quantize(2 * _COLORS)
    image.save(IMAGES / "compare.png", optimize=True)
    image.crop((0, 0, image.width, _TOP)).save(IMAGES / "compare-top.png", optimize=True)


def _take(server: Server) -> None:
    for name, keys in _RUNS:
        made = server.ask("POST", "/api/runs", {"keys": {**_KEYS, "name": name, **keys}})
        assert made.status == 201, made.body
    row = _until(server, "nano-eager", lambda one: (one["step"] or 0) > _STEPS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            _picture(browser, server, "/", "serve-runs", 1280, 560)
            _picture(browser, server, f"/runs/{row['id']}", "serve-run", 1280, 1250, "#curves canvas")
            _picture(browser, server, "/queue", "serve-queue", 1280, 860)
            stopped = server.ask("POST", f"/api/runs/{row['id']}/cancel", {})
            assert stopped.status < 300, stopped.body
            _until(server, "nano-eager", lambda one: one["state"] == "stopped")
            _picture(browser, server, f"/runs/{row['id']}", "serve-narrow", 400, 860, "#curves canvas")
        finally:
            browser.close()


def _until(server: Server, name: str, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The run's row of the list, as soon as it is so."""
    deadline, row = time.monotonic() + _SECONDS, None
    while time.monotonic() < deadline:
        rows = server.ask("GET", "/api/runs").json["runs"]
        row = next((one for one in rows if one["name"] == name), None)
        if row is not None and is_so(row):
            return row
        time.sleep(1.0)
    sys.exit(f"{name} did not come so far: {row}")


def _picture(browser: Browser, server: Server, path: str, name: str, width: int, height: int, until: str = "") -> None:
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme="light")
    place = {"domain": "127.0.0.1", "path": "/", "secure": True, "httpOnly": True}
    context.add_cookies([{"name": COOKIE, "value": server.cookie, **place}])
    page: Page = context.new_page()
    page.goto(server.url + path)
    if until:
        page.locator(until).first.wait_for()
    # Curves and rows come by the event stream.
    page.wait_for_timeout(4000)
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(_COLORS)
    image.save(IMAGES / f"{name}.png", optimize=True)
    context.close()


if __name__ == "__main__":
    main()
