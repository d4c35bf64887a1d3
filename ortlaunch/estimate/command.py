"""``ortlaunch estimate``: composes the configuration as ``run`` does, starts the tracing process and prints its report.

This module does not import torch.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ortlaunch.base import exit_codes
from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import run_with_hydra
from ortlaunch.compose.prepare import prepared
from ortlaunch.config.devices import resolve_device, visible_gpus
from ortlaunch.config.load import to_config
from ortlaunch.config.neighbours import NO_CHANGE, further_changes, in_words, none_is_enough
from ortlaunch.config.schema import Config, Device, LocalConfig
from ortlaunch.estimate.render import render
from ortlaunch.estimate.request import Request, variables_of
from ortlaunch.estimate.trials import untraced, with_trials
from ortlaunch.launch.limits import limit_of, parsed
from ortlaunch.launch.planning import make_plan
from ortlaunch.launch.report_process import report_of

if TYPE_CHECKING:
    from omegaconf import DictConfig

_FORMATS = ("table", "json")

_HELP = """\
ortlaunch estimate: how much memory a run needs, and whether it fits, without starting it

Usage:
  ortlaunch estimate [KEY=VALUE ...] [--memory SIZE] [--quick] [--format table|json]

Takes the keys of ortlaunch run. Traces start, steps, evaluation, checkpoint and end with the run's own trainer and
optimizer on tensors without content, so that no weights are allocated. backend=ort, backend=compile and models that
cannot be traced are tried: runs of six steps with two micro-batches, each within a memory limit.

With device=cuda the memory is that of a worker's GPU. It needs no GPU, but for what is tried: --memory 80GiB asks for
one that is elsewhere.

Options:
  --memory SIZE  memory of a machine, such as 80GiB; by default what this machine has free, or launcher.memory on SLURM;
                 with device=cuda that of each GPU
  --quick        leave out trials, the largest micro-batch, what checkpointing saves, and what makes it fit
  --format       table (default) or json

Exit codes: 0 fits, or no limit is known; 1 tight or does not fit; 2 the request is wrong"""


def main(arguments: list[str]) -> int:
    """Runs the verb.

    Args:
        arguments: the command line after ``estimate``.

    Returns:
        0 if the run fits or no limit is known, 1 if it is tight or does not fit.

    Raises:
        RequestError: the configuration is wrong, or the model or the data cannot be loaded.
    """
    if {"-h", "--help"} & set(arguments):
        print(_HELP)
        return exit_codes.DONE
    quick = "--quick" in arguments
    options, overrides = _options([argument for argument in arguments if argument != "--quick"])
    if {"-m", "--multirun"} & set(overrides):
        raise RequestError("ortlaunch estimate looks at one configuration: leave --multirun out")
    memory = parsed(options["--memory"], "--memory") if "--memory" in options else None
    composed: list[DictConfig] = []
    run_with_hydra(overrides, composed.append)
    if not composed:
        # Hydra has printed what an option such as --cfg asked for.
        return exit_codes.DONE
    is_json = options.get("--format") == "json"
    config = prepared(to_config(composed[0]), starts=False)
    report = estimate(config, memory, quick=quick, quiet=is_json)
    if report["change"] == NO_CHANGE:
        report["change"] = _further_change(config, memory, quiet=is_json)
    if is_json:
        print(json.dumps(report, indent=2))
    else:
        render(report, Console())
    return exit_codes.FAILED if report["verdict"] in ("tight", "does not fit") else exit_codes.DONE


def estimate(
    config: Config, memory: int | None, *, quick: bool, quiet: bool, timeout: float | None = None
) -> dict[str, Any]:
    """Makes the trials that a run needs, traces it in another process, and returns the report.

    Args:
        config: the configuration of the run, prepared to be launched.
        memory: bytes of each machine; None for this machine's, or for what the launcher requests.
        quick: whether to leave out what could be changed about the run.
        quiet: whether to show no progress.
        timeout: seconds that the trace may take; None for no limit.

    Raises:
        RequestError: that process refused the request, ended early, or did not end in time.
    """
    on_gpu = resolve_device(config.device) is Device.cuda
    if on_gpu:
        config = _with_gpus(config)
    plan = make_plan(config)
    limit, source = (memory, "--memory") if memory is not None else limit_of(config)
    request = Request(plan.workers, plan.nodes, limit, source, quick, on_gpu=on_gpu)
    request = with_trials(request, config, quiet=quiet)
    report = report_of(
        "estimate",
        config,
        variables_of(config),
        status="tracing the run ...",
        quiet=quiet,
        add_files=request.write,
        timeout=timeout,
    )
    if (reason := report.get("untraceable")) is not None:
        return untraced(request, config, reason, quiet=quiet)
    return report


def _further_change(config: Config, memory: int | None, *, quiet: bool) -> str:
    """A change of workers or trainer that makes a run fit, in words; what was tried if none does.

    Another trainer is another process: it imports other packages.
    """
    on_gpu = resolve_device(config.device) is Device.cuda
    config = _with_gpus(config) if on_gpu else config
    kinds = further_changes(config, make_plan(config).workers, on_gpu=on_gpu)

    def fits(changed: Config) -> bool | None:
        """None where the change is refused: not every model supports checkpointing, or a batch of one sample."""
        with contextlib.suppress(RequestError):
            return bool(estimate(prepared(changed, starts=False), memory, quick=True, quiet=quiet)["verdict"] == "fits")
        return None

    for *smaller, last in kinds.values():
        # What saves the most says whether to look at the others.
        is_enough = fits(last)
        if is_enough is not False and (found := next(filter(fits, smaller), last if is_enough else None)):
            return in_words(found, config)
    return none_is_enough(kinds)


def _with_gpus(config: Config) -> Config:
    """The configuration with a number of workers where this machine has no GPU to count."""
    launcher = config.launcher
    if not isinstance(launcher, LocalConfig) or launcher.workers_per_node is not None or visible_gpus():
        return config
    return replace(config, launcher=replace(launcher, workers_per_node=1))


def _options(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the verb's own options by name, and the arguments for Hydra."""
    found: dict[str, str] = {}
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        name, has_value, value = word.partition("=")
        if name not in ("--memory", "--format"):
            rest.append(word)
            continue
        found[name] = value if has_value else next(words, "")
    if found.get("--format", "table") not in _FORMATS:
        raise RequestError(f"--format takes one of {', '.join(_FORMATS)}")
    return found, rest
