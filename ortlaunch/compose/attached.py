"""The configuration of a script that calls `ortlaunch.attach()`: how its own loop is to run.

Its keys are those of ortlaunch's own loop, as far as a script leaves them open. On the command line they stand among
the others, before ``--``; the run keeps them below ``script.attach``. The script may have defaults for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.compose.overrides import quoted
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import Config, ModelConfig, OptimizerConfig, RunConfig, ScriptRun

KEY = "script.attach"
"""Where a run keeps these keys."""
_GROUPS = ("backend", "trainer", "train", "seed")
TRAIN = (
    *("steps", "grad_accumulation", "precision", "clip_grad_norm", "log_every", "steady_after", "checkpoint_every"),
    *("keep_checkpoints", "checkpoint_async", "resume", "activation_checkpointing", "deterministic", "tf32"),
    "gc_every",
)
"""The keys of ``train`` that hold in a script, whose loop has the rest in itself."""
_DEFAULTS = ("backend=eager", "train.clip_grad_norm=null", "train.save_weights=false")
"""What a script gets that says nothing: what plain PyTorch would compute."""


def is_for_attach(word: str) -> bool:
    """Whether a word of the command line is a key that `ortlaunch.attach()` follows.

    Raises:
        RequestError: it is one of ``train`` that has no meaning in a script.
    """
    key = word.partition("=")[0]
    group, _, name = key.partition(".")
    if "=" not in word or group not in _GROUPS:
        return False
    if group == "train" and name not in TRAIN:
        raise RequestError(
            f"{word}: a script has a loop of its own: of train there are {', '.join(TRAIN)} for one that calls "
            "ortlaunch.attach()"
        )
    return True


def kept(word: str) -> str:
    """The word that keeps a key of `ortlaunch.attach()` with a script's run."""
    key, _, value = word.partition("=")
    # A choice of an option is kept as its name.
    return f"{KEY}.{key}{'' if '.' in key or key == 'seed' else '.name'}={value}"


def words_beside(words: list[str]) -> list[str]:
    """The words beside a script, with those of `ortlaunch.attach()` as the run keeps them.

    Raises:
        RequestError: a key belongs to ortlaunch's own loop, in whose place a script has its own.
    """
    words = [kept(word) if is_for_attach(word) else word for word in words]
    of_loop = Config.__dataclass_fields__.keys() - RunConfig.__dataclass_fields__.keys()
    for word in words:
        key = word.lstrip("+~").partition("=")[0].partition(".")[0]
        if key in of_loop and not word.startswith("-"):
            raise RequestError(
                f"{word}: {key} is a key of ortlaunch's own loop: give the script what it takes, after --"
            )
    return words


def with_command(config: RunConfig, command: list[str] | None) -> RunConfig:
    """The configuration of a run whose workers are a script, with the script's command, which starts in this folder."""
    if command is None or not isinstance(config, ScriptRun):
        return config
    script = dataclasses.replace(config.script, command=command, folder=str(Path.cwd()))
    return dataclasses.replace(config, script=script)


def words_of(attach: Mapping[str, Any]) -> list[str]:
    """The words of the command line that a run has kept."""
    found = dict(_leaves(attach, ""))
    chosen = {key: value for key, value in found.items() if key.endswith(".name") and key.count(".") == 1}
    rest = {key: value for key, value in found.items() if key not in chosen}
    return [f"{key.partition('.')[0]}={value}" for key, value in chosen.items()] + [
        f"{key}={_written(value)}" for key, value in rest.items()
    ]


def attached(given: Iterable[str], attach: Mapping[str, Any], run: RunConfig | None, workers: int) -> Config:
    """The configuration by which a script's loop runs.

    Args:
        given: the script's own defaults, the arguments of `ortlaunch.attach`.
        attach: what the run has kept of its command line, which comes before them.
        run: the run's configuration; None where the script is started without ortlaunch, whose defaults may then hold
            for the run, too.
        workers: how many workers there are.

    Raises:
        RequestError: a key is none, or has no meaning in a script.
    """
    for word in given:
        if not is_for_attach(word) and (word.partition("=")[0].partition(".")[0] not in _RUN):
            raise RequestError(
                f"ortlaunch.attach({word!r}): no key for a script: it has model, data and optimizer itself"
            )
    words = [*_DEFAULTS, f"trainer={'ddp' if workers > 1 else 'single'}"]
    for more in (list(given), words_of(attach)):
        words = _over(words, more)
    config = to_config(compose(words))
    own = {} if run is None else {field.name: getattr(run, field.name) for field in dataclasses.fields(RunConfig)}
    return dataclasses.replace(
        config, model=ModelConfig(name="script"), optimizer=OptimizerConfig(name="script"), **own
    )


_RUN = {field.name for field in dataclasses.fields(RunConfig)}


def _over(words: list[str], more: list[str]) -> list[str]:
    """Words under others, which choose options anew, and set keys again."""
    chosen = {word.partition("=")[0] for word in more}
    return [
        word for word in words if word.partition("=")[0] not in chosen and word.partition(".")[0] not in chosen
    ] + more


def _leaves(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _written(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return quoted(value) if isinstance(value, str) else repr(value)
