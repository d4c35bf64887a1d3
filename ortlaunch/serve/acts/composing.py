"""Composes a request, checks it by all rules and shows what would be started. Writes nothing."""

from __future__ import annotations

import dataclasses
import io
import shlex
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ortlaunch.base.errors import RequestError
from ortlaunch.base.secrets import without_secrets_in_words
from ortlaunch.base.start import split_script
from ortlaunch.compose.attached import with_command, words_beside
from ortlaunch.compose.composing import SCRIPT
from ortlaunch.compose.hydra_tree import compose, compose_with_reason
from ortlaunch.compose.overrides import parsed, quoted
from ortlaunch.compose.prepare import prepared
from ortlaunch.config.devices import resolve_device
from ortlaunch.config.load import to_dict, to_run_config
from ortlaunch.config.schema import GROUPS, OPTIONAL_GROUPS, Config, Device, RunConfig
from ortlaunch.launch.auto import chosen
from ortlaunch.launch.launcher import QueueLauncher
from ortlaunch.launch.plan import LaunchPlan
from ortlaunch.launch.planning import make_plan
from ortlaunch.launch.table import launcher_of
from ortlaunch.launch.work import work_of
from ortlaunch.run.key import RunKey
from ortlaunch.run.run import Run
from ortlaunch.run.settings import read_words
from ortlaunch.serve.acts.needs import needs_of
from ortlaunch.serve.fields import PROFILE_OF_SLURM, key_of_own_code

_LONGEST_TEXT = 60_000


def fields(request: dict[str, Any]) -> dict[str, Any]:
    """The values that keys have after composing.

    Args:
        request: ``words`` of the command line.

    Returns:
        ``chosen``, the option of each group, and ``values`` by dotted keys.
    """
    tree = compose(request["words"])
    chosen = {group: _name_of(tree, group) for group in ("model", *GROUPS)}
    values = {key: value for key, value in _leaves(_plain(tree, resolve=False)) if value != "???"}
    return {"chosen": {group: name for group, name in chosen.items() if name}, "values": values}


def check(request: dict[str, Any]) -> dict[str, Any]:
    """Composes a new run, checks it, and says what would be started.

    Args:
        request: ``words`` and the ``run_key`` that the run will have.

    Returns:
        ``words`` (all of the command line), ``command``, ``plan`` (the text of the dry run), ``name``, ``experiment``,
        ``run_dir``, ``launcher``, ``slots`` (0 for a scheduler's job), ``needs`` (see `needs_of`), ``steps``.
    """
    words, script = split_script(request["words"])
    last = [] if script is None else ["--", *script]
    words = [*words, f"run_root={quoted(request['root'])}"]
    plan = planned([*words, *last], request["run_key"])
    config = plan.config
    require_one_machine(config, "choose launcher=slurm")
    if not isinstance(launcher_of(config), QueueLauncher):
        words = [*words, f"launcher.run={request['run_key']}"]
    words = [*words, *last]
    return {
        "words": words,
        "command": shlex.join(["ortlaunch", *without_secrets_in_words(request["words"])]),
        "plan": _dry_run(plan),
        "name": plan.name,
        "experiment": config.experiment,
        "run_dir": str(plan.run_dir),
        "launcher": config.launcher.name,
        "slots": slots_of(config),
        "on_gpu": resolve_device(config.device) is Device.cuda,
        "needs": needs_of(config),
        "steps": work_of(config).steps or None,
    }


def check_sweep(request: dict[str, Any]) -> dict[str, Any]:
    """Checks several new runs.

    Args:
        request: ``runs``, of each the ``words`` and the ``run_key``.

    Returns:
        ``runs``, of each what `check` returns.
    """
    return {"runs": [check({**request, **one}) for one in request["runs"]]}


def planned(words: list[str], run_key: str) -> LaunchPlan:
    """Returns the plan of a new run, with its checked configuration, in the folder that belongs to its key."""
    given, script = split_script(words)
    if script is None:
        tree, reason = compose_with_reason(given)
    else:
        tree, reason = compose_with_reason(words_beside(given), SCRIPT)
    config = prepared(with_command(to_run_config(tree), script))
    return make_plan(config, reason, words, RunKey.parsed(run_key))


def require_one_machine(config: RunConfig, advice: str) -> None:
    """Refuses a run of several machines, unless a scheduler starts it: here one of them would wait for the others.

    Args:
        config: its configuration.
        advice: what to do instead.

    Raises:
        RequestError: it needs several machines.
    """
    if config.launcher.nodes > 1 and not isinstance(launcher_of(config), QueueLauncher):
        raise RequestError(
            f"launcher.nodes={config.launcher.nodes}: the queue of this machine starts runs of one machine: {advice}"
        )


def slots_of(config: RunConfig) -> int:
    """Returns how many slots of this machine a run takes: its GPUs, or one for a group of workers on the CPU.

    The CPU of a machine with GPUs has no slots; the service knows which it is.
    """
    launcher = launcher_of(config)
    if isinstance(launcher, QueueLauncher):
        return 0
    return launcher.workers_per_node(config) if resolve_device(config.device) is Device.cuda else 1


def keys(request: dict[str, Any]) -> dict[str, Any]:
    """The request by which a run could have been submitted, for doing it again.

    Args:
        request: ``run_dir``.

    Returns:
        ``job``, ``keys`` and ``script``, and in ``left_out`` the words that the service does not take.
    """
    run = Run(Path(request["run_dir"]))
    words, script = split_script(read_words(run.overrides_file))
    job, found, left_out = None, dict[str, Any](), list[str]()
    for word in words[1:] if words[:1] == ["run"] else words:
        if "=" not in word or word.startswith(("-", "~")):
            left_out.append(word)
            continue
        override = parsed(word)
        value: Any = override.value()
        if override.key_or_group == "jobs":
            job = str(value)
        elif override.is_sweep_override() or not isinstance(value, str | int | float | bool | None):
            left_out.append(word)
        else:
            found[override.key_or_group] = value
    return {"job": job, "keys": found, "script": shlex.join(script or []), "left_out": left_out}


def own_code_in(run: Run, config: RunConfig) -> str:
    """Returns the key by which a run executes what only an author may choose; empty if there is none.

    Args:
        run: the run, whose ready job and options are taken as they are.
        config: its configuration, with the keys that change.
    """
    if not isinstance(config, Config):
        return "script.command"
    choices = {"jobs", PROFILE_OF_SLURM, "model", *GROUPS}
    words = [word for word in read_words(run.overrides_file) if word.partition("=")[0].lstrip("+") in choices]
    try:
        ready = dict(_leaves(_plain(compose(words))))
    except (RequestError, OmegaConfBaseException):
        # Without its files, nobody can say what they gave.
        ready = {}
    launcher = dict(_leaves(to_dict(type(config.launcher)()), "launcher."))
    return key_of_own_code(dict(_leaves(to_dict(config))), launcher | ready) or ""


def _name_of(tree: DictConfig, group: str) -> str | None:
    node = None if group in OPTIONAL_GROUPS and tree.get(group) is None else tree[group]
    return None if node is None else str(node.name)


def _plain(tree: DictConfig, *, resolve: bool = True) -> dict[Any, Any]:
    found = OmegaConf.to_container(tree, resolve=resolve, enum_to_str=True)
    assert isinstance(found, dict)
    return found


def _leaves(node: dict[Any, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            found += _leaves(value, f"{key}.")
        elif isinstance(value, list):
            found.append((key, "\n".join(map(str, value))))
        else:
            found.append((key, value))
    return found


def _dry_run(plan: LaunchPlan) -> str:
    """Returns what a dry run prints."""
    config = plan.config
    dry = dataclasses.replace(config, launcher=dataclasses.replace(config.launcher, dry_run=True))
    said, noted = io.StringIO(), io.StringIO()
    with redirect_stdout(said), redirect_stderr(noted):
        dry, why = chosen(dry)
        reason = why or plan.backend_reason
        launcher_of(dry).submit(dataclasses.replace(plan, config=dry, backend_reason=reason, arguments=()))
    return (said.getvalue() + noted.getvalue())[:_LONGEST_TEXT]
