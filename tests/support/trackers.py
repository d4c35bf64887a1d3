"""A user's own trackers: a module, and the metadata of a distribution that announces it."""

from __future__ import annotations

from pathlib import Path

from tests.support.packages import install_metadata

MODULE = '''
"""A user's trackers: one that writes what it is told into a file, and some that fail."""
import json
import time
from dataclasses import dataclass, field
from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.tracking.tracker import Sink, Tracker


@dataclass
class Config:
    file: str = "kept.jsonl"
    port: int = 80
    labels: list[str] = field(default_factory=list)
    api_token: str = ""
    fails: str = ""


class KeptSink(Sink):
    def __init__(self, cfg, context):
        self.cfg, self.context = cfg, context
        self._fail("constructor")

    def _fail(self, where):
        if (self.context.run_dir / "mend").exists() or self.cfg.fails != where:
            return
        if where == "hang":
            time.sleep(600)
        raise ConnectionError(f"no answer in {where}, token {self.cfg.api_token}")

    def open(self, identity, mark):
        self._write("open", identity.name, mark)
        return mark or "first"

    def send(self, operation):
        self._fail("send")
        self._fail("hang")
        if self.cfg.fails == "refuse":
            self.context.refuse("a kind", "not wanted")
        self._write(type(operation).__name__, str(operation))

    def commit(self):
        return "committed"

    def _write(self, *words):
        with (self.context.run_dir / self.cfg.file).open("a") as file:
            file.write(json.dumps(words) + "\\n")


class Kept(Tracker):
    title = "Kept"
    config = Config

    def check(self, cfg):
        if cfg.port == 0:
            raise RequestError("trackers.kept.port=0: must be at least 1")
        if cfg.port == 1:
            raise KeyError("no such port")

    def sink(self, cfg, context):
        return KeptSink(cfg, context)


class Plain(Kept):
    title = ""
    config = {"file": "plain.jsonl", "port": 8, "fails": "", "api_token": ""}


class Rude(Kept):
    """Whose every answer is an exception."""

    def place(self, cfg):
        raise ValueError("no place")

    where = lines = scrubbed = place


def not_a_tracker(name):
    return object()
'''


def install(folder: Path, *lines: str) -> None:
    """Puts the module into a folder of `sys.path`, with entry points such as ``kept = their_trackers:Kept``."""
    (folder / "their_trackers.py").write_text(MODULE)
    install_metadata(folder, "their-trackers", {"ortlaunch.trackers": list(lines)})
