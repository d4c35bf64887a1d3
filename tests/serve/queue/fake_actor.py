"""An actor that starts no children: runs begin and end as a test says."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortlaunch.run.identity import Process
from ortlaunch.serve.actor import Refused
from ortlaunch.serve.unfit import Unavailable

GONE = {"host": "h", "pid": 2**22 + 1, "start_ticks": 1, "machine": ""}
"""A process that there cannot be."""


class FakeActor:
    """Answers as the children do."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, dict[str, Any]]] = []
        self.begun: Counter[tuple[str, int]] = Counter()
        """The starts that were asked for, by token and attempt."""
        self.ended: dict[str, dict[str, Any]] = {}
        """What `outcome` says of a run, by its folder."""
        self.start_refuses = ""
        self.silent = 0
        """So many calls of `start` get no answer, though the run has begun."""
        self.lives = True
        self.slots = 1
        self.on_gpu = False
        self.needs = {"cores": 1, "memory": 1, "disk": 1}
        self.own_code = ""
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def folder_of(self, unix_user: str) -> Path:
        return Path("/nowhere")

    def may_act_for(self, unix_user: str) -> bool:
        return unix_user != "stranger"

    def call(self, unix_user: str, action: str, request: Mapping[str, Any]) -> dict[str, Any]:
        with self._lock:
            self.calls.append((unix_user, action, dict(request)))
            found: dict[str, Any] = getattr(self, f"_{action}")(dict(request))
            return found

    def actions(self, action: str) -> list[dict[str, Any]]:
        """The requests of one action."""
        return [request for _, name, request in self.calls if name == action]

    def _check(self, request: dict[str, Any]) -> dict[str, Any]:
        if "train.steps=13" in request["words"]:
            raise Refused("train.steps=13 brings bad luck", "train.steps")
        shown = {"command": "ortlaunch", "plan": "text", "name": "n", "experiment": "e", "launcher": "local"}
        place = f"/nowhere/e/{request['run_key'].rpartition('-')[0]}-n-{request['run_key'][-6:]}"
        return {**shown, "steps": 3, "words": request["words"], "run_dir": place, "slots": self.slots, **self._needs()}

    def _check_sweep(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"runs": [self._check(one) for one in request["runs"]]}

    def _needs(self) -> dict[str, Any]:
        return {"needs": self.needs if self.slots else {}, "on_gpu": self.on_gpu}

    def _check_resume(self, request: dict[str, Any]) -> dict[str, Any]:
        found = self._check({"words": request["words"], "run_key": "20260101-000000-abcdef"})
        return {**found, "run_dir": request["run_dir"], "begun_before": 1, "own_code": self.own_code}

    def _start(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["stopped"] and not self.begun[request["token"], request["attempt"]]:
            return {"withdrawn": True}
        if self.start_refuses:
            raise Refused(self.start_refuses)
        self.begun[request["token"], request["attempt"]] += 1
        if self.silent:
            self.silent -= 1
            raise Unavailable("start: no answer")
        return {"process": vars(Process.this()) if self.lives else GONE, "lives": self.lives}

    def _outcome(self, request: dict[str, Any]) -> dict[str, Any]:
        never = {"began": False, "is_over": True, "state": "", "reason": "", "refusal": ""}
        return {"jobs": {job["id"]: never | self.ended.get(job["run_dir"], {}) for job in request["jobs"]}}

    def _cancel(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"said": "asked"}

    def _delete(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"place": "/nowhere/.bin"}

    def _compare(self, _request: dict[str, Any]) -> dict[str, Any]:
        table: dict[str, Any] = {"columns": [], "rows": []}
        return {"facts": [], "warnings": [], "doubtful": [], "each": table, "differences": table, **table}

    def _keys(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"job": "gpt2_ort", "keys": {"train.steps": 3, "run_root": "x"}, "script": "", "left_out": ["a,b"]}
