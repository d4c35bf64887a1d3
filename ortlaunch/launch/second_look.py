"""Finds the operator in which a signal has ended a process that trained or checked a model under ONNX Runtime.

Such a process cannot say it itself. A second one repeats its first steps with a note before each operator
(`ortlaunch.check.second_look`); it costs nothing where nothing has happened. This module does not import torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ortlaunch.base.note import read_note
from ortlaunch.base.own_code import last_frames, users_place
from ortlaunch.base.private_folder import PrivateFolder
from ortlaunch.base.processes import die_with_parent
from ortlaunch.base.programs import module_command
from ortlaunch.base.reading import read_tail
from ortlaunch.config.load import save_config
from ortlaunch.config.schema import Config, OrtConfig, RunConfig
from ortlaunch.run.failure import Failure
from ortlaunch.run.run import Run

NOTE = "operator.json"
PYTORCH, EXPORT, ORT = "PyTorch", "the export", "ONNX Runtime"
"""What a process was doing when it was ended."""
SECONDS = 180.0
"""The longest time of a second look."""
_DEFECTS = ("SIGSEGV", "SIGABRT", "SIGFPE", "SIGBUS", "SIGILL")
"""Signals by which defects of native code end a process. SIGKILL comes from a lack of memory, or from a person."""
_LOG_BYTES = 1 << 20
_CALLS = {"run_forward": ORT, "run_backward": ORT, "_get_exported_model": EXPORT, "_export_model": EXPORT}
"""Functions by which the stack of a process shows what it was doing."""


@dataclass(frozen=True)
class Death:
    """Where a signal has met a process; what is not known is empty."""

    signal: str
    during: str
    """`PYTORCH`, `EXPORT` or `ORT`."""
    operator: str
    module: str
    """Path of the module that contains the operator."""
    location: str
    """``file:line`` of the model."""
    statement: str

    @property
    def where(self) -> str:
        """Where it was, as the continuation of "ended by SIGSEGV"; empty where nothing is known."""
        places = [self.module, f"{self.location} `{self.statement}`" if self.statement else self.location]
        source = ", ".join(filter(None, places))
        source = f" ({source})" if source else ""
        if self.operator:
            who = "of PyTorch" if self.during == PYTORCH else "of ONNX Runtime's graph"
            return f"in the operator {self.operator} {who}{source}"
        return f"in {self.during}{source}" if self.during else source.strip()

    @property
    def remedy(self) -> str:
        """What the user can do."""
        if self.during == PYTORCH:
            return "PyTorch alone ends in it too, so change that part of the model"
        return "use backend=eager or backend=compile, or change that part of the model"


def look_again(config: Config, variables: Mapping[str, str], number: int, log: str) -> Death:
    """Repeats the first steps of a process that a signal has ended, in another process.

    Args:
        config: the configuration of the ended process, with an OrtConfig as its backend.
        variables: what was added to its environment.
        number: the signal.
        log: what it has written, with `faulthandler`'s report if there is one.
    """
    frames, _ = last_frames(log, number)
    during, place, note = _during(frames), users_place(frames), {}
    with PrivateFolder("look") as folder:
        save_config(config, folder / "config.yaml")
        output = folder / "look.log"
        with output.open("wb") as file:
            try:
                code = subprocess.run(
                    [*module_command("ortlaunch.check.second_look"), str(folder)],
                    env={**os.environ, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    preexec_fn=die_with_parent,
                    timeout=SECONDS,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                code = 0
        if code < 0:
            note = read_note(folder / NOTE)
            again, _ = last_frames(output.read_text(errors="replace"), -code)
            place = users_place(again) or place
    known = {key: str(note.get(key, "")) for key in ("operator", "module", "location", "statement")}
    known["location"] = known["location"] or place
    return Death(signal.Signals(number).name, str(note.get("during", "")) or during, **known)


def is_worth_it(found: Failure, config: RunConfig, run_dir: Path) -> bool:
    """Whether a second look can say more: a defect has ended the worker under ONNX Runtime, before its first step."""
    has_stepped = bool(Run(run_dir).beat(found.rank).get("step"))
    is_ort = isinstance(config, Config) and isinstance(config.backend, OrtConfig)
    return is_ort and found.ended_by in _DEFECTS and not has_stepped


def explained(found: Failure, config: RunConfig, variables: Mapping[str, str], run_dir: Path) -> Failure:
    """Returns a failed run's failure with the operator in which the worker was ended; for the others as `look_again`.

    Args:
        found: the failure; `is_worth_it` holds for it.
        run_dir: the run's folder.
    """
    assert isinstance(config, Config)
    log = read_tail(Run(run_dir).rank_log(found.rank), _LOG_BYTES)
    death = look_again(config, variables, signal.Signals[found.ended_by], log)
    return found.explained(f"{death.where}: {death.remedy}") if death.during else found


def _during(frames: list[tuple[str, int, str]]) -> str:
    return next((_CALLS[name] for _, _, name in frames if name in _CALLS), "")
