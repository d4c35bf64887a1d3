"""``ortlaunch check``: composes the configuration as ``run`` does, starts the checking process and prints its report.

This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ortlaunch.base import exit_codes
from ortlaunch.base.errors import RequestError
from ortlaunch.base.own_code import last_frames, where_it_ended
from ortlaunch.base.reading import read_json
from ortlaunch.check.render import render
from ortlaunch.check.report import BEGUN, Ended
from ortlaunch.compose.hydra_tree import run_with_hydra
from ortlaunch.compose.prepare import prepared
from ortlaunch.config.backends import require_ort
from ortlaunch.config.bounds import check_numbers
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import Config, LocalConfig, OrtConfig
from ortlaunch.launch.local.launcher import node_part
from ortlaunch.launch.planning import make_plan
from ortlaunch.launch.report_process import report_of
from ortlaunch.tracking import trackers

if TYPE_CHECKING:
    from omegaconf import DictConfig

_FORMATS = ("table", "json")

_HELP = """\
ortlaunch check: whether a model computes under ONNX Runtime what it computes in PyTorch, and what that costs

Usage:
  ortlaunch check [KEY=VALUE ...] [--format table|json] [--no-cost]

Takes the keys of ortlaunch run. Builds the model and a small batch of its own data, exports, compares outputs,
gradients, weights and buffers with PyTorch, and times eager, compile and ORT (not with --no-cost). Takes a minute or
two; starts no run.

Exit codes: 0 fit for backend=ort, 1 not fit, 2 the request is wrong"""


def main(arguments: list[str]) -> int:
    """Runs the verb.

    Args:
        arguments: the command line after ``check``.

    Returns:
        0 if the model is fit for ONNX Runtime, 1 if it is not.

    Raises:
        RequestError: the configuration is wrong, or the model or the data cannot be loaded.
    """
    if {"-h", "--help"} & set(arguments):
        print(_HELP)
        return exit_codes.DONE
    no_cost = "--no-cost" in arguments
    chosen, overrides = _format([argument for argument in arguments if argument != "--no-cost"])
    if {"-m", "--multirun"} & set(overrides):
        raise RequestError("ortlaunch check looks at one configuration: leave --multirun out")
    composed: list[DictConfig] = []
    run_with_hydra(overrides, composed.append)
    if not composed:
        # Hydra has printed what an option such as --cfg asked for.
        return exit_codes.DONE
    config = to_config(composed[0])
    # Those of a launcher that `_here` replaces, too.
    check_numbers(config)
    require_ort("ortlaunch check", otherwise="")
    report = look(_for_ort(_here(config)), with_cost=not no_cost, quiet=chosen == "json")
    if chosen == "json":
        print(json.dumps(report, indent=2))
    else:
        render(report, Console())
    return exit_codes.DONE if report["fit"] else exit_codes.FAILED


def look(config: Config, *, with_cost: bool, quiet: bool, timeout: float | None = None) -> dict[str, Any]:
    """Runs the check in another process and returns its report.

    Args:
        config: the configuration of the run, with an OrtConfig as its backend and a LocalConfig of one machine.
        with_cost: whether to measure the backends, too.
        quiet: whether to show no progress.
        timeout: seconds that the check may take; None for no limit.

    Raises:
        RequestError: that process refused the request, ended early, or did not end in time.
    """
    config = prepared(config)
    variables = node_part(make_plan(config)).start.environment | trackers.worker_environment(config)
    return report_of(
        "check",
        config,
        variables,
        status="looking at export, parity, randomness and cost ...",
        quiet=quiet,
        words=[] if with_cost else ["--no-cost"],
        ended=_of_ended,
        timeout=timeout,
    )


def _of_ended(folder: Path, number: int, log: str) -> dict[str, Any] | None:
    """Returns the report of a check that a signal has ended; None if it was ended before it had a model."""
    report = read_json(folder / BEGUN)
    if report is None:
        return None
    ended = Ended(signal.Signals(number).name, where_it_ended(last_frames(log, number)[0]).lstrip())
    report["ended"] = dataclasses.asdict(ended)
    hint = " (out of memory?)" if number == signal.SIGKILL else ""
    report["verdict"] = f"the check was ended by {ended.signal}{hint} {ended.where}".rstrip()
    return report


def _here(config: Config) -> Config:
    """The same run on this machine: what is checked does not depend on what launches it."""
    launcher = config.launcher
    if isinstance(launcher, LocalConfig) and launcher.nodes == 1:
        return config
    if not isinstance(launcher, LocalConfig):
        print(
            f"ortlaunch: launcher={launcher.name}: the check looks on this machine, not on the nodes", file=sys.stderr
        )
    return dataclasses.replace(config, launcher=LocalConfig())


def _for_ort(config: Config) -> Config:
    """Returns the same configuration with ONNX Runtime as its backend, so that the backend's rules are checked."""
    return config if isinstance(config.backend, OrtConfig) else dataclasses.replace(config, backend=OrtConfig())


def _format(arguments: list[str]) -> tuple[str, list[str]]:
    """Returns the chosen format and the arguments for Hydra."""
    chosen, rest, waiting = "table", [], False
    for argument in arguments:
        if waiting:
            chosen, waiting = argument, False
        elif argument == "--format":
            waiting = True
        elif argument.startswith("--format="):
            chosen = argument.removeprefix("--format=")
        else:
            rest.append(argument)
    if waiting or chosen not in _FORMATS:
        raise RequestError(f"--format takes one of {', '.join(_FORMATS)}")
    return chosen, rest
