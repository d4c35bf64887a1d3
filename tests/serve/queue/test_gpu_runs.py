"""Runs on the GPUs of a machine that has none: a program stands in for nvidia-smi, and the workers train nothing.

The service, its queue and the processes that it starts are real. Each of them notes the GPUs that it was given.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.service import Server, start

_NOTING = """
import json, os, sys
words = sys.orig_argv
if "ortlaunch" in words[:5] and "serve" not in words[:6]:
    key = next(word for word in words if word.startswith("launcher.run="))
    given = [os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")]
    with open({ledger!r}, "a") as file:
        file.write(json.dumps([key.partition("=")[2], *given]) + "\\n")
    os.execv(sys.executable, [sys.executable, "-P", "-m", "tests.support.stand_in", "100000", "none", *words[4:]])
"""
"""Every Python reads this when it begins. What would become a run notes its GPUs, and has a worker that trains
nothing."""
_KEYS = {"model": "mlp", "backend": "eager", "trainer": "ddp", "tracking": "none", "device": "cuda"}
_PATIENCE = 120.0


@dataclass
class Machine:
    """A service on a machine with GPUs."""

    folder: Path
    server: Server

    @property
    def program(self) -> Path:
        """What stands in for nvidia-smi."""
        return self.folder / "bin" / "nvidia-smi"

    def says(self, gpus: str, used: str = "") -> None:
        """Makes nvidia-smi know some GPUs by the letters of their UUIDs, of which processes use some."""
        own = f"GPU-{os.getpid()}"
        listing = "\n".join(f"{number}, {own}{letter}" for number, letter in enumerate(gpus))
        apps = "\n".join(f"{own}{letter}, 4242" for letter in used)
        lines = "\n".join(f"GPU {number}: stand-in (UUID: {own}{letter})" for number, letter in enumerate(gpus))
        self.does(
            f"case $1 in\n*query-gpu=*) echo '{listing}';;\n*compute-apps*) echo '{apps}';;\n*) echo '{lines}';;\nesac"
        )

    def does(self, script: str) -> None:
        """Makes nvidia-smi another program, between two of its calls."""
        made = self.folder / "nvidia-smi.new"
        made.write_text(f"#!/bin/sh\n{script}\n")
        made.chmod(0o755)
        made.rename(self.program)

    def submit(self, name: str, workers: int) -> str:
        keys = _KEYS | {"name": name, "launcher.workers_per_node": workers}
        answer = self.server.ask("POST", "/api/runs", {"keys": keys})
        assert answer.status == 201, answer.body
        return str(answer.json["id"])

    def cancel(self, run: str) -> None:
        """Stops a run, and waits until it has left its slots."""
        assert self.server.ask("POST", f"/api/runs/{run}/cancel").status == 202
        self.until(lambda queue: run not in self.running(queue))

    def queue(self) -> dict[str, Any]:
        found: dict[str, Any] = self.server.ask("GET", "/api/queue").json
        return found

    def until(self, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Waits until something holds for the queue."""
        deadline = time.monotonic() + _PATIENCE
        while not holds(found := self.queue()):
            assert time.monotonic() < deadline, found
            time.sleep(0.2)
        return found

    def given(self, run: str) -> list[str]:
        """The GPUs that a run was given, once it has begun."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            text = (self.folder / "ledger").read_text() if (self.folder / "ledger").exists() else ""
            if found := [line[1:] for line in map(json.loads, text.splitlines()) if line[0] == run]:
                assert len(found) == 1
                return list(found[0])
            assert time.monotonic() < deadline, self.queue()
            time.sleep(0.1)

    @staticmethod
    def running(queue: dict[str, Any]) -> dict[str, list[str]]:
        """The slots of each run that holds some."""
        return {job["id"]: job["slots_held"] for job in queue["running"]}

    @staticmethod
    def slots(queue: dict[str, Any]) -> dict[str, tuple[str, str]]:
        """The state of each slot, with its note."""
        return {slot["name"]: (slot["state"], slot["note"]) for slot in queue["slots"]}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    for name in ("bin", "site"):
        (tmp_path / name).mkdir()
    code = _NOTING.format(ledger=str(tmp_path / "ledger"))
    (tmp_path / "site" / "sitecustomize.py").write_text(code.replace("\\\\n", "\\n"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    made = Machine(tmp_path, None)  # type: ignore[arg-type]
    made.says("ab", used="b")
    paths = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    made.server = start(tmp_path, PYTHONPATH=":".join([str(tmp_path / "site"), *filter(None, sys.path)]), **paths)
    try:
        made.server.first_administrator()
        yield made
    finally:
        for run in made.running(made.queue()):
            made.cancel(run)
        made.server.end()


def test_runs_get_gpus_that_nobody_else_uses(machine: Machine) -> None:
    first, both, last = (machine.submit(f"run{number}", workers) for number, workers in enumerate((1, 2, 1)))
    assert machine.given(first) == ["0", "PCI_BUS_ID"]
    withheld = "it needs 2 slots; 1 are withheld from the queue"
    queue = machine.until(lambda queue: [one["reason"] for one in queue["waiting"]][:-1] == [withheld])
    assert machine.slots(queue)["gpu1"] == ("foreign", "a process that is not of this queue uses it")
    machine.says("ab", used="a")  # The other process has ended. The run's own one is listed.
    machine.until(lambda queue: machine.slots(queue)["gpu1"][0] == "free")
    machine.says("ab")
    machine.cancel(first)
    assert machine.given(both) == ["0,1", "PCI_BUS_ID"]
    machine.cancel(both)
    assert machine.given(last) == ["0", "PCI_BUS_ID"]
    assert machine.running(machine.queue()) == {last: ["gpu0"]}


def test_no_run_gets_a_gpu_that_has_gone(machine: Machine) -> None:
    machine.says("a")
    machine.until(lambda queue: machine.slots(queue)["gpu1"] == ("foreign", "nvidia-smi does not find it"))
    first, second = machine.submit("first", 1), machine.submit("second", 1)
    assert machine.given(first) == ["0", "PCI_BUS_ID"]
    machine.until(lambda queue: [job["reason"] for job in queue["waiting"]] == ["next: it needs 1 slot, 0 free"])
    asked = machine.folder / "asked"
    machine.does(
        f"case $1 in --query*) touch {asked}; echo No devices were found; exit 6;; esac\necho 'GPU 0: stand-in'"
    )
    # Until then the first run's GPU counts as being there, and would be given to the second.
    machine.until(lambda _: asked.exists())
    machine.cancel(first)
    machine.until(lambda queue: machine.slots(queue)["gpu0"] == ("foreign", "nvidia-smi does not find it"))
    machine.until(lambda queue: [job["id"] for job in queue["waiting"]] == [second])
    hangs, gate = machine.folder / "hangs", machine.folder / "gate"
    wait = f"touch {hangs}; until [ -e {gate} ]; do sleep 0.1; done; exit 255"
    machine.does(f"case $1 in --query*) {wait};; esac\necho 'GPU 0: stand-in'")
    try:
        machine.until(lambda _: hangs.exists())
        time.sleep(4)  # Longer than the service waits for an answer.
        assert [job["id"] for job in machine.queue()["waiting"]] == [second]
        machine.says("ab")
    finally:
        gate.touch()
    assert machine.given(second) == ["0", "PCI_BUS_ID"]
