"""What the workers of a run do: train in ortlaunch's own loop, or run a script. Other code does not ask which."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from ortlaunch.base.errors import RequestError
from ortlaunch.base.text import counted
from ortlaunch.config.backends import why_no_ort
from ortlaunch.config.schema import GROUPS, Config, OrtConfig, RunConfig, ScriptRun
from ortlaunch.config.trainers import trainer_of
from ortlaunch.run.key import RunKey
from ortlaunch.run.run import Run
from ortlaunch.run.state import SCRIPT_TAG, STEPS_KEY

STORE_SCHEME = "ortlaunch"
"""The scheme of the MLflow tracking URI by which a script logs into its own run."""
_MOVABLE = ("path", "tokenizer", "workers")
"""Keys of a data source that may change between two attempts: the data may have been moved to another place."""
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_PLACE = re.compile(r"\{([A-Za-z_]\w*)\}")


class Work(Protocol):
    """What the workers of a run do."""

    @property
    def name(self) -> str:
        """The default name of a run."""

    @property
    def one_worker(self) -> bool:
        """Whether a machine has one worker, whatever it has of GPUs."""

    @property
    def steps(self) -> int:
        """The steps that the run is to make; 0 where that is not known."""

    @property
    def stopping(self) -> str:
        """What the workers do when they are asked to stop in order, for the user."""

    @property
    def stops_before_first_step(self) -> bool:
        """Whether workers that have made no step yet can stop in order, too."""

    @property
    def counts_launches(self) -> bool:
        """Whether ``ortlaunch resume`` is a further attempt to the workers, as a restart without it always is."""

    def command(self) -> list[str]:
        """Returns the words after the worker's own, which name what it becomes."""

    def agent_options(self, run: Run) -> list[str]:
        """Returns the options of the program around torchrun."""

    def environment(self, run: Run, experiment: str) -> dict[str, str]:
        """Returns the variables that the workers get for this work."""

    def params(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the parameters to compare by, from the configuration without its secrets."""

    def tags(self) -> dict[str, str]:
        """Returns the tags of the run for this work."""

    def notes(self) -> list[str]:
        """Returns what the user may not mean."""

    def files(self) -> list[Path]:
        """Returns the files of the user's that are kept with the record."""

    def missing_here(self) -> list[str]:
        """Returns what the work lacks on this machine, one line each."""

    def progress(self, run: Run) -> str:
        """Returns a text that changes whenever the run has more to go on from."""

    def nothing_left(self, now: Work) -> str:
        """Returns that this work, once finished, leaves nothing to do for `now`; empty if there is something."""

    def identity(self, now: Work, *, has_checkpoint: bool) -> Iterator[tuple[str, object, object]]:
        """Yields each key that a resumed run keeps, with its value in this work and in `now`."""


def work_of(config: RunConfig) -> Work:
    """Returns the work that a configuration describes."""
    if isinstance(config, ScriptRun):
        return Script(config)
    assert isinstance(config, Config)
    return Training(config)


class Training:
    """Trains a model in ortlaunch's own loop."""

    stopping = "finishing the step and writing a checkpoint"
    stops_before_first_step = False
    counts_launches = False

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def name(self) -> str:
        """A name made of model, backend, trainer and ZeRO stage, which distinguish most runs."""
        config = self.config
        return f"{config.model.name}-{config.backend.name}-{trainer_of(config.trainer).run_suffix(config.trainer)}"

    @property
    def one_worker(self) -> bool:
        """See `Work.one_worker`."""
        return trainer_of(self.config.trainer).has_one_worker

    @property
    def steps(self) -> int:
        """See `Work.steps`."""
        train = self.config.train
        return train.steps if train.counts_steps else 0

    def command(self) -> list[str]:
        """See `Work.command`."""
        return []

    def agent_options(self, run: Run) -> list[str]:
        """See `Work.agent_options`."""
        return []

    def environment(self, run: Run, experiment: str) -> dict[str, str]:
        """See `Work.environment`."""
        variables = {"TOKENIZERS_PARALLELISM": "false"}
        if self.config.backend.name != "compile":
            # DeepSpeed decorates one of its functions with torch.compile. Older versions of torch then start a pool of
            # compile processes for every worker, one per core. With 0 the pool starts only when something is compiled.
            variables["TORCH_WARM_POOL"] = os.environ.get("TORCH_WARM_POOL", "0")
        return variables

    def params(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Work.params`."""
        # Of a run whose length is given in epochs or tokens, the number of steps means nothing.
        unused = () if self.steps else (STEPS_KEY,)
        return {key: value for key, value in settings.items() if key not in unused}

    def tags(self) -> dict[str, str]:
        """See `Work.tags`."""
        return {"ortlaunch.backend": self.config.backend.name, "ortlaunch.trainer": self.config.trainer.name}

    def notes(self) -> list[str]:
        """See `Work.notes`."""
        warmup, steps = self.config.scheduler.warmup_steps, self.config.train.steps
        if warmup < steps or not self.steps:
            return []
        least = f"scheduler.warmup_steps={warmup}: the learning rate does not reach optimizer.lr by train.steps={steps}"
        return [f"{least}, at which the run ends: lower scheduler.warmup_steps or raise train.steps"]

    def files(self) -> list[Path]:
        """See `Work.files`."""
        return []

    def missing_here(self) -> list[str]:
        """See `Work.missing_here`."""
        why = why_no_ort("backend=ort") if isinstance(self.config.backend, OrtConfig) else None
        return [] if why is None else [why]

    def progress(self, run: Run) -> str:
        """See `Work.progress`."""
        return run.newest_checkpoint()

    def nothing_left(self, now: Work) -> str:
        """See `Work.nothing_left`."""
        assert isinstance(now, Training)
        then, more = self.config.train, now.config.train
        if not self.steps or not now.steps:
            if (then.steps, then.epochs, then.tokens) != (more.steps, more.epochs, more.tokens):
                return ""
            return "has finished: give it more to do, for example by train.epochs or train.tokens"
        if now.steps > self.steps:
            return ""
        return (
            f"has finished its {counted(self.steps, 'step')}: give it more to do, for example "
            f"train.steps={2 * self.steps}"
        )

    def identity(self, now: Work, *, has_checkpoint: bool) -> Iterator[tuple[str, object, object]]:
        """See `Work.identity`."""
        assert isinstance(now, Training)
        old, new = self.config, now.config
        for key in ("name", "target", "params"):
            yield f"model.{key}", getattr(old.model, key), getattr(new.model, key)
        for group in GROUPS:
            then, after = getattr(old, group), getattr(new, group)
            yield f"{group}.name", getattr(then, "name", None), getattr(after, "name", None)
        if has_checkpoint:
            yield from self._state(old, new)

    def _state(self, old: Config, new: Config) -> Iterator[tuple[str, object, object]]:
        """Each key that the state in a checkpoint depends on, with its value before and after the change."""
        for name in old.data.__dataclass_fields__:
            if name not in _MOVABLE:
                yield f"data.{name}", getattr(old.data, name), getattr(new.data, name)
        then, now = (trainer_of(config.trainer).checkpoint_kind(config.trainer) for config in (old, new))
        yield "trainer", then, now
        if trainer_of(old.trainer).keeps_precision:
            yield "train.precision", old.train.precision.value, new.train.precision.value
        before, after = old.optimizer.state_facts(), new.optimizer.state_facts()
        yield from ((key, before.get(key), value) for key, value in after.items())
        yield "seed", old.seed, new.seed


class Script:
    """Runs a script of the user's own in every worker."""

    one_worker = False
    steps = 0
    stops_before_first_step = True
    counts_launches = True

    def __init__(self, config: ScriptRun) -> None:
        self.config = config
        self._script = config.script

    @property
    def name(self) -> str:
        """The script's or module's own name."""
        words = self._script.command
        return words[1].rpartition(".")[2] if words[0] == "-m" else Path(words[0]).stem

    @property
    def stopping(self) -> str:
        """See `Work.stopping`."""
        return f"the workers get {self._script.signal.value} and {self.config.launcher.grace_seconds} s to end"

    def words(self) -> list[str]:
        """Returns the script and its arguments, with the values of `script.params` in their places.

        Raises:
            RequestError: a parameter has no place among the arguments.
        """
        params, used = self._script.params, set()

        def filled(found: re.Match[str]) -> str:
            if found[1] not in params:
                return found[0]
            used.add(found[1])
            value = params[found[1]]
            return str(value).lower() if isinstance(value, bool) else str(value)

        words = [_PLACE.sub(filled, word) for word in self._script.command]
        if unused := [name for name in params if name not in used]:
            raise RequestError(
                f"script.params.{unused[0]}: no argument has {{{unused[0]}}} in it: write it where the value belongs, "
                f"for example --{unused[0]} '{{{unused[0]}}}'"
            )
        return words

    def command(self) -> list[str]:
        """See `Work.command`."""
        return [self._script.folder, sys.executable, "-u", *self.words()]

    def agent_options(self, run: Run) -> list[str]:
        """See `Work.agent_options`."""
        return ["--watch", str(run.path)]

    def environment(self, run: Run, experiment: str) -> dict[str, str]:
        """See `Work.environment`."""
        return {
            "ORTLAUNCH_RUN_DIR": str(run.path),
            "ORTLAUNCH_CHECKPOINTS": str(run.checkpoints),
            "MLFLOW_TRACKING_URI": f"{STORE_SCHEME}://{quote(str(run.path))}",
            "MLFLOW_EXPERIMENT_NAME": experiment,
            "MLFLOW_RUN_ID": str(RunKey.of_folder(run.path.name)),
            "PYTHONFAULTHANDLER": "1",
        }

    def params(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Work.params`."""
        # The arguments say the same as the command and its parameters, each under its name.
        shown = dict(settings["script"])
        words = Script(_with_public(self.config, shown)).words()
        script = {key: value for key, value in shown.items() if key not in ("command", "params")}
        args = arguments_of(_arguments(words))
        return {**settings, "script": {**script, "file": _file(words)}, **({"args": args} if args else {})}

    def tags(self) -> dict[str, str]:
        """See `Work.tags`."""
        return {SCRIPT_TAG: _file(self._script.command)}

    def notes(self) -> list[str]:
        """See `Work.notes`."""
        return []

    def files(self) -> list[Path]:
        """See `Work.files`."""
        place = self._place()
        return [] if place is None else [place]

    def missing_here(self) -> list[str]:
        """See `Work.missing_here`."""
        folder = Path(self._script.folder)
        if not folder.is_dir():
            return [f"{folder} is not there, where the script starts: all nodes must share it"]
        if self._script.command[0] != "-m" and self._place() is None:
            return [f"{folder / self._script.command[0]} is not there: all nodes must share it"]
        return []

    def check(self, *, same_system: bool) -> None:
        """Checks that there is a script to run.

        Args:
            same_system: whether the workers see the files that this process sees.

        Raises:
            RequestError: there is none, or it is no Python file.
        """
        words = self.words()
        if strange := [word for word in words if "${" in word]:
            raise RequestError(f"{strange[0]}: an argument with ${{ cannot be recorded: let the script read a file")
        if words[0] == "-m":
            if len(words) < 2:
                raise RequestError("-m names no module: write -- -m PACKAGE.MODULE ARGUMENTS")
            return
        if words[0].startswith("-"):
            raise RequestError(
                f"-- {words[0]}: a script or -m and a module comes first, then its arguments; Python's own options "
                "go into variables such as PYTHONOPTIMIZE"
            )
        path = Path(self._script.folder, words[0])
        if same_system and path.is_dir():
            raise RequestError(f"{words[0]} is a folder: give a Python file in it, or -m and a module")
        if same_system and not path.exists():
            raise RequestError(f"{words[0]}: no such file (started in {self._script.folder})")
        if same_system and not os.access(path, os.R_OK):
            raise RequestError(f"{words[0]}: it may not be read by this user")
        if path.suffix != ".py":
            raise RequestError(
                f"{words[0]}: no Python file: its name must end in .py (a program of another kind can be started by a "
                "Python file that calls it)"
            )

    def progress(self, run: Run) -> str:
        """See `Work.progress`."""
        newest = 0
        with suppress(OSError):
            for path in run.checkpoints.rglob("*"):
                # The script may remove an old one at this moment.
                with suppress(OSError):
                    newest = max(newest, path.stat().st_mtime_ns)
        return str(newest) if newest else ""

    def nothing_left(self, now: Work) -> str:
        """See `Work.nothing_left`."""
        return "has finished: its script ended with exit code 0: start a new run"

    def identity(self, now: Work, *, has_checkpoint: bool) -> Iterator[tuple[str, object, object]]:
        """See `Work.identity`."""
        assert isinstance(now, Script)
        yield "script.command", shlex.join(self._script.command), shlex.join(now._script.command)
        yield "launcher.name", self.config.launcher.name, now.config.launcher.name

    def _place(self) -> Path | None:
        """The script's file, or that of a module in the folder that it starts in; None where there is none."""
        words, folder = self._script.command, Path(self._script.folder)
        if words[0] != "-m":
            places = [folder / words[0]]
        else:
            module = folder.joinpath(*words[1].split("."))
            places = [module.with_name(f"{module.name}.py"), module / "__main__.py"]
        return next((place for place in places if place.is_file()), None)


def _with_public(config: ScriptRun, shown: Mapping[str, Any]) -> ScriptRun:
    """The run with the command and the parameters as the record shows them, without secrets."""
    script = dataclasses.replace(config.script, command=list(shown["command"]), params=dict(shown["params"]))
    return dataclasses.replace(config, script=script)


def _file(words: Sequence[str]) -> str:
    return " ".join(words[: 2 if words[0] == "-m" else 1])


def _arguments(words: Sequence[str]) -> Sequence[str]:
    return words[2 if words[0] == "-m" else 1 :]


def arguments_of(words: Sequence[str]) -> dict[str, str]:
    """Parses a script's arguments as parameters: ``--name value``, ``--name=value``, ``--flag`` and ``name=value``.

    Args:
        words: the arguments. Words that belong to no name are left out.
    """
    found: dict[str, str] = {}
    name = ""
    for word in words:
        key, equals, value = word.lstrip("-+~").partition("=")
        if word.startswith("-") and _NAME.fullmatch(key):
            name = "" if equals else key
            found[key] = value if equals else "true"
        elif equals and _NAME.fullmatch(key):
            found[key], name = value, ""
        elif name:
            found[name] = word if found[name] == "true" else f"{found[name]} {word}"
    return found
