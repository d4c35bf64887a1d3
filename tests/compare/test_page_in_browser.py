"""The page in headless Chromium: the curves are really drawn, the console is silent, nobody is asked for anything."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Metric
from PIL import Image

from ortlaunch.compare.command import main
from ortlaunch.config.schema import MlflowConfig
from tests.support.browser import Visit, visiting
from tests.support.servers import serving
from tests.support.waiting import until

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
HOLES = """
(colour) => [...document.querySelectorAll("canvas")].map((canvas) => {
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const columns = new Set();
  for (let at = 0; at < pixels.length; at += 4) {
    if (colour.every((value, part) => pixels[at + part] === value)) columns.add((at / 4) % canvas.width);
  }
  const found = [...columns].sort((a, b) => a - b);
  return Math.max(...found.slice(1).map((column, n) => column - found[n])) / (found.at(-1) - found[0]);
})"""
"""How much of a curve's width, in each plot, its widest hole takes."""


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


def drawn_pixels(visit: Visit, holds: Callable[[list[int]], bool]) -> list[list[int]]:
    """How many pixels of each colour every plot has, once something holds for all: a page draws when it has time."""
    found: list[list[int]] = []

    def look() -> bool:
        visit.page.wait_for_timeout(100)
        found[:] = visit.page.evaluate(COUNTED, COLOURS)
        return bool(found) and all(map(holds, found))

    until(look, said=lambda: found)
    return found


def inks_of(picture: Image.Image) -> Counter[Any]:
    """How many pixels of each colour it has."""
    return Counter({ink: count for count, ink in picture.getcolors(1 << 24) or []})


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
        boxes = visit.page.locator("#legend input")
        for is_whole in (True, False, True):  # As it is, without the second, and with it again.
            counts.append(drawn_pixels(visit, lambda found, is_whole=is_whole: (found[1] > 0) is is_whole))
            boxes.nth(1).click()
        boxes.nth(2).click()
        with visit.page.expect_download() as saved:
            visit.page.locator(".save").first.click()
        saved.value.save_as(tmp_path / saved.value.suggested_filename)
        titles = visit.page.locator("h3").all_text_contents()
        labels = visit.page.locator("#legend label").all_text_contents()
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
    picture = Image.open(tmp_path / "Throughput-tokens-s-over-steps.png").convert("RGB")
    inks = inks_of(picture)
    assert inks[COLOURS[0]] > 150 and not inks[COLOURS[2]], "as it is shown, without the third curve"
    assert inks_of(picture.crop((0, 268, 40, picture.height)))[COLOURS[0]] > 20, "beside the name of its curve"


def test_no_line_crosses_the_pause_before_a_run_was_resumed(
    store: MlflowConfig, make: Callable[..., str], experiment: str, client: Any, tmp_path: Path, site: Site
) -> None:
    start = 1_800_000_000_000
    for name, loss, pause in (("whole", 9.0, 0), ("resumed", 12.0, 60_000)):
        run_id = make(name, 1.0, params={"optimizer.lr": name})
        # The other run has points of its own within the pause.
        times = [start + 1000 * step + (pause if step > 30 else 0) for step in range(1, 61)]
        points = [Metric("train/loss", loss - step / 10, at, step) for step, at in enumerate(times, 1)]
        begun = {0: times[0] - 5} | ({28: times[30] - 5} if pause else {})
        points += [Metric("startup/time_to_first_step_seconds", 9.0, at, step) for step, at in begun.items()]
        client.log_batch(run_id, metrics=points)
    page = tmp_path / "page.html"
    assert main(["--experiment", experiment, "--html", str(page)], store.uri, "") == 0
    site.page = page.read_bytes()
    with visiting() as visit:
        visit.page.goto(site.url)
        drawn_pixels(visit, lambda found: found[1] > 0)
        (steps, times_whole), (steps_resumed, times_resumed) = (visit.page.evaluate(HOLES, c) for c in COLOURS[:2])
        hint = visit.page.locator("p", has_text="Drag to zoom").text_content()
    assert visit.errors == []
    assert max(steps, steps_resumed, times_whole) < 0.05, "one line from its first point to its last"
    assert 0.4 < times_resumed < 0.6, "a pause as long as the training"
    assert hint is not None and "broken where a run had ended and was resumed" in hint
