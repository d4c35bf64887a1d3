"""The page in headless Chromium: the curves are really drawn, the console is silent, nobody is asked for anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.compare.command import main
from ortlaunch.config.schema import MlflowConfig
from tests.support.browser import visiting
from tests.support.servers import serving

COLOURS = [(0x2F, 0x7E, 0xD8), (0xE0, 0x7B, 0x00), (0x2A, 0x9D, 0x55)]
"""Of the first three groups."""
COUNTED = """
(colours) => [...document.querySelectorAll("canvas")].map((canvas) => {
  const copy = Object.assign(document.createElement("canvas"), { width: canvas.width, height: canvas.height });
  const context = copy.getContext("2d", { willReadFrequently: true });
  context.drawImage(canvas, 0, 0);
  const pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
  const found = colours.map(() => 0);
  for (let at = 0; at < pixels.length; at += 4) {
    colours.forEach((c, n) => { if (c.every((value, part) => pixels[at + part] === value)) found[n] += 1; });
  }
  return found;
})"""
"""How many pixels of each colour every plot has."""
SETTLED = 300
"""Milliseconds after which a click has been drawn."""


@dataclass
class Site:
    """One page on the loopback address, and what is asked of it."""

    page: bytes = b""
    url: str = ""
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            site.asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(site.page)

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    with serving(Handler) as address:
        site.url = f"{address}/page.html"
        yield site


def test_three_curves_are_drawn_and_can_be_hidden(
    store: MlflowConfig, make: Callable[..., str], experiment: str, tmp_path: Path, site: Site
) -> None:
    evil = "</script><img src=http://127.0.0.1:1/x onerror=wrong()>"
    for number, name in enumerate(("one", evil, "three")):
        rates = [100.0 * (number + 1) + 20 * math.sin(step / 3) for step in range(60)]
        losses = [5.0 + number - step / 20 for step in range(60)]
        curves = {"throughput/tokens_per_second": rates, "train/loss": losses, "memory/rss_gib": [1.0 + number] * 60}
        make(name, rates[0], params={"optimizer.lr": str(number)}, curves=curves, peak_memory_gib=1.0 + number)
    page = tmp_path / "page.html"
    assert main(["--experiment", experiment, "--html", str(page)], store.uri, "") == 0
    site.page = page.read_bytes()
    counts = []
    with visiting(width=1400, height=1200) as visit:
        visit.page.goto(site.url)
        boxes = visit.page.locator("#runs input")
        for _ in range(3):  # As it is, without the second, and with it again.
            visit.page.wait_for_timeout(SETTLED)
            counts.append(visit.page.evaluate(COUNTED, COLOURS))
            boxes.nth(1).click()
        titles = visit.page.locator("h3").all_text_contents()
        labels = visit.page.locator("#runs label").all_text_contents()
        wide = visit.page.evaluate("document.documentElement.scrollWidth > innerWidth")
    assert visit.errors == [] and visit.failed == []
    assert site.asked == ["/page.html"] and {f"http://{host}/page.html" for host in visit.hosts} == {site.url}
    plots = ("Throughput (tokens/s)", "Resident memory (GiB)", "Training loss")
    assert titles == [f"{title} over {axis}" for title in plots for axis in ("steps", "time")]
    assert labels == ["1 one (baseline)", f"2 {evil}", "3 three"]
    drawn, without, again = counts
    assert len(drawn) == 6
    for found in drawn:
        assert min(found) > 150, found
    for found in without:
        assert found[1] == 0 and found[0] > 150 and found[2] > 150, found
    assert [min(found) > 150 for found in again] == [True] * 6
    assert not wide, "only the tables scroll sideways"
