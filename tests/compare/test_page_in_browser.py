"""The page in headless Chromium: the curves are really drawn, the console is silent, nobody is asked for anything."""

from __future__ import annotations

import base64
import json
import math
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.compare.command import main
from ortlaunch.config.schema import MlflowConfig

COLOURS = [(0x2F, 0x7E, 0xD8), (0xE0, 0x7B, 0x00), (0x2A, 0x9D, 0x55)]
"""Of the first three groups."""
EARLY = "<script>window.wrong = []; addEventListener('error', (event) => wrong.push(event.message));</script>"
PROBE = """<script>
const colours = COLOURS;
const count = (canvas) => {
  const copy = Object.assign(document.createElement("canvas"), { width: canvas.width, height: canvas.height });
  const context = copy.getContext("2d", { willReadFrequently: true });
  context.drawImage(canvas, 0, 0);
  const pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
  const found = colours.map(() => 0);
  for (let at = 0; at < pixels.length; at += 4) {
    colours.forEach((c, n) => { if (c.every((value, part) => pixels[at + part] === value)) found[n] += 1; });
  }
  return found;
};
const all = () => [...document.querySelectorAll("canvas")].map(count);
const box = (n) => document.querySelectorAll("#runs input")[n];
const wait = () => new Promise((done) => setTimeout(done, 300));
(async () => {
  await wait();
  const drawn = all();
  box(1).click();
  await wait();
  const without = all();
  box(1).click();
  await wait();
  const said = {
    drawn, without, again: all(), wrong, titles: [...document.querySelectorAll("h3")].map((h) => h.textContent),
    labels: [...document.querySelectorAll("#runs label")].map((l) => l.textContent),
    asked: performance.getEntriesByType("resource").map((entry) => entry.name),
    wide: document.documentElement.scrollWidth > innerWidth,
  };
  const place = document.createElement("pre");
  place.id = "probe";
  place.textContent = btoa(unescape(encodeURIComponent(JSON.stringify(said))));
  document.body.append(place);
})();
</script></body>"""


@pytest.fixture(scope="session")
def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        message = "needs a browser: apt-get install chromium"
        if os.environ.get("CI") == "1":
            pytest.fail(message)
        pytest.skip(message)
    return found


class Site:
    """Serves one page on the loopback, and keeps what is asked of it."""

    def __init__(self) -> None:
        self.page = b""
        self.asked: list[str] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked.append(self.path)
                self.send_response(200)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.end_headers()
                self.wfile.write(site.page)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/page.html"


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    threading.Thread(target=site.server.serve_forever, daemon=True).start()
    yield site
    site.server.shutdown()


def opened(chromium: str, url: str, profile: Path) -> tuple[dict[str, Any], list[str]]:
    """What the probe in the page found, and the browser's console."""
    command = [
        chromium,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        f"--user-data-dir={profile}",
    ]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1", "--enable-logging=stderr", "--v=0"]
    command += ["--window-size=1400,1200", "--virtual-time-budget=10000", "--dump-dom", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="probe">([^<]+)</pre>', done.stdout)
    assert found, done.stderr[-2000:] + done.stdout[-500:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(base64.b64decode(found[1])), console


def test_three_curves_are_drawn_and_can_be_hidden(
    store: MlflowConfig,
    make: Callable[..., str],
    experiment: str,
    tmp_path: Path,
    chromium: str,
    site: Site,
    capsys: Any,
) -> None:
    evil = "</script><img src=http://127.0.0.1:1/x onerror=wrong.push('ran')>"
    for number, name in enumerate(("one", evil, "three")):
        rates = [100.0 * (number + 1) + 20 * math.sin(step / 3) for step in range(60)]
        losses = [5.0 + number - step / 20 for step in range(60)]
        curves = {"throughput/tokens_per_second": rates, "train/loss": losses, "memory/rss_gib": [1.0 + number] * 60}
        make(name, rates[0], params={"optimizer.lr": str(number)}, curves=curves, peak_memory_gib=1.0 + number)
    page = tmp_path / "page.html"
    assert main(["--experiment", experiment, "--html", str(page)], store.uri, "") == 0
    text = page.read_text()
    text = text.replace("<head>\n", f"<head>\n{EARLY}", 1)
    text = text.replace("</body>", PROBE.replace("COLOURS", json.dumps(COLOURS)))
    site.page = text.encode()
    said, console = opened(chromium, site.url, tmp_path / "profile")
    assert said["wrong"] == [] and console == []
    assert said["asked"] == [] and site.asked == ["/page.html"]
    plots = ("Throughput (tokens/s)", "Resident memory (GiB)", "Training loss")
    assert said["titles"] == [f"{title} over {axis}" for title in plots for axis in ("steps", "time")]
    assert said["labels"] == ["1 one (baseline)", f"2 {evil}", "3 three"]
    assert len(said["drawn"]) == 6
    for counts in said["drawn"]:
        assert min(counts) > 150, counts
    for counts in said["without"]:
        assert counts[1] == 0 and counts[0] > 150 and counts[2] > 150, counts
    assert [min(counts) > 150 for counts in said["again"]] == [True] * 6
    assert not said["wide"], "only the tables scroll sideways"
