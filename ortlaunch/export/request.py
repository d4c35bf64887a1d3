"""The request for an export: its own keys, its flags, and the configuration of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf.errors import OmegaConfBaseException

from ortlaunch.base.errors import RequestError
from ortlaunch.base.ownership import require_own
from ortlaunch.compose.changes import changed
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.compose.rules import check
from ortlaunch.config.bounds import check_numbers
from ortlaunch.config.load import first_line, load_config, to_config
from ortlaunch.config.schema import (
    GROUPS,
    Config,
    Device,
    EagerConfig,
    LocalConfig,
    NoTrackingConfig,
    Precision,
)
from ortlaunch.config.trainers import TRAINERS
from ortlaunch.follow.find import run_or_folder
from ortlaunch.run import manifest
from ortlaunch.run.run import Run

OWN_KEYS = ("from_run", "from_weights", "out", "loss", "trainable", "frozen")
LOSSES = ("own", "cross_entropy", "mse", "bce")
_EXCHANGEABLE = ("data", "optimizer")
"""Config groups of a trained run for which an export may choose another option."""
_KEPT = ("backend", "trainer", "scheduler", "launcher", "tracking")


@dataclass(frozen=True)
class Request:
    """One export."""

    verb: str
    config: Config
    out: Path
    from_run: Path | None = None
    """The run folder that the weights come from."""
    checkpoint: Path | None = None
    """The checkpoint that the user named; None takes the newest weights of the run."""
    from_weights: Path | None = None
    loss: str | None = None
    """One of `LOSSES`; None lets the model and the data decide."""
    trainable: tuple[str, ...] = ("*",)
    """Globs of parameter names."""
    frozen: tuple[str, ...] = ()
    options: Mapping[str, str | bool] = field(default_factory=dict)
    """Flags by name, without the dashes."""

    def has(self, flag: str) -> bool:
        """Whether a flag without a value was given."""
        return bool(self.options.get(flag))


def parse(verb: str, arguments: list[str], keys: tuple[str, ...], flags: Mapping[str, bool]) -> Request:
    """Reads the command line after ``export VERB``.

    Args:
        verb: the kind of export, for messages.
        arguments: KEY=VALUE and flags, in any order.
        keys: the keys among `OWN_KEYS` that this verb takes.
        flags: the flags that this verb takes, and whether each has a value.

    Raises:
        RequestError: the command line is wrong; the message names the first error.
    """
    options, words = _split(verb, arguments, flags)
    own, overrides = _own_keys(verb, words, keys)
    _check_own_keys(verb, own)
    run_dir, checkpoint = _run_of(own["from_run"]) if "from_run" in own else (None, None)
    config = _composed(overrides) if run_dir is None else _of_run(verb, run_dir, overrides)
    check_numbers(config)
    if not config.adapter.trains_all:
        raise RequestError(
            f"export {verb}: adapter={config.adapter.name} is beside the model, and an export has one model: write "
            "both as one by ortlaunch export weights RUN --merged --out FOLDER, then from_weights=FOLDER"
        )
    check(_neutral(config))
    return Request(
        verb,
        config,
        Path(own["out"]).expanduser().absolute(),
        from_run=run_dir,
        checkpoint=checkpoint,
        from_weights=_existing("from_weights", own["from_weights"]) if "from_weights" in own else None,
        loss=own.get("loss"),
        trainable=_globs(own.get("trainable", "*")),
        frozen=_globs(own.get("frozen", "")),
        options=options,
    )


def _own_keys(verb: str, words: list[str], keys: tuple[str, ...]) -> tuple[dict[str, str], list[str]]:
    """Separates the keys of an export from those of the configuration.

    Returns:
        The export's own keys with their values, and the overrides of the configuration.
    """
    own: dict[str, str] = {}
    overrides = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise RequestError(f"export {verb}: {word} is not of the form KEY=VALUE (ortlaunch export {verb} --help)")
        if key not in OWN_KEYS:
            overrides.append(word)
        elif key not in keys:
            raise RequestError(f"export {verb}: {key}= is not for this export (ortlaunch export {verb} --help)")
        elif not value:
            raise RequestError(f"export {verb}: {key}= is empty")
        else:
            own[key] = value
    return own, overrides


def _check_own_keys(verb: str, own: dict[str, str]) -> None:
    if "out" not in own:
        raise RequestError(f"export {verb}: name the output folder with out=FOLDER")
    if "from_run" in own and "from_weights" in own:
        raise RequestError(f"export {verb}: from_run and from_weights both give the weights: drop one of them")
    if own.get("loss", LOSSES[0]) not in LOSSES:
        raise RequestError(f"loss={own['loss']}: must be one of {', '.join(LOSSES)}")


def _split(verb: str, arguments: list[str], flags: Mapping[str, bool]) -> tuple[dict[str, str | bool], list[str]]:
    options: dict[str, str | bool] = {}
    words = []
    left = list(arguments)
    while left:
        word = left.pop(0)
        if not word.startswith("-"):
            words.append(word)
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if name not in flags:
            raise RequestError(f"export {verb}: there is no option {word} (ortlaunch export {verb} --help)")
        if flags[name] and not equals:
            if not left:
                raise RequestError(f"export {verb}: --{name} needs a value")
            value = left.pop(0)
        if not flags[name] and equals:
            raise RequestError(f"export {verb}: --{name} takes no value")
        options[name] = value if flags[name] else True
    return options, words


def _globs(text: str) -> tuple[str, ...]:
    return tuple(part for part in (piece.strip() for piece in text.strip("[]").split(",")) if part)


def _existing(key: str, value: str) -> Path:
    path = Path(value).expanduser().absolute()
    if not path.exists():
        raise RequestError(f"{key}={value}: no such file or folder")
    return path


def _run_of(value: str) -> tuple[Path, Path | None]:
    """Returns the run folder, and the checkpoint in it if the user named one."""
    try:
        path = run_or_folder(value)
    except RequestError as error:
        raise RequestError(f"from_run={value}: {error}") from error
    if Run(path).exists:
        Run(path).require_own("export")
        return path.resolve(), None
    if (path / manifest.NAME).is_file():
        # The path is resolved first: checkpoints/step-… is always inside the run folder, but a link to it may not be.
        checkpoint = path.resolve()
        Run(checkpoint.parents[1]).require_own("export")
        require_own(checkpoint, checkpoint / manifest.NAME, use="export")
        return checkpoint.parents[1], checkpoint
    raise RequestError(f"from_run={value}: neither a run folder nor a checkpoint in one")


def _neutral(config: Config) -> Config:
    """Removes settings that only a run needs, so that a run trained on a GPU can be exported on any machine."""
    train = dataclasses.replace(config.train, precision=Precision.fp32, tf32=False, resume="never")
    return dataclasses.replace(
        config,
        device=Device.cpu,
        train=train,
        model=dataclasses.replace(config.model, weights=None),
        backend=EagerConfig(),
        trainer=TRAINERS["single"].schema(),
        optimizer=GROUPS["optimizer"]["adamw"](),
        launcher=LocalConfig(),
        tracking=NoTrackingConfig(),
    )


def _composed(overrides: list[str]) -> Config:
    return to_config(compose(overrides))


def _of_run(verb: str, run_dir: Path, overrides: list[str]) -> Config:
    """Returns the run's configuration with the overrides applied; the model cannot be changed."""
    try:
        config = load_config(Run(run_dir).config_file)
    except (OmegaConfBaseException, KeyError, OSError) as error:
        raise RequestError(f"{Run(run_dir).config_file} cannot be read: {first_line(error)}") from error
    single = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key in _KEPT or (key == "model" and value != config.model.name):
            raise RequestError(
                f"export {verb}: {override} does not go with from_run: the run has model={config.model.name}, "
                f"and of its groups only {', '.join(_EXCHANGEABLE)} can be changed"
            )
        if key in _EXCHANGEABLE:
            if value not in GROUPS[key]:
                raise RequestError(f"{override}: no such option (there are {', '.join(GROUPS[key])})")
            if value != getattr(config, key).name:
                config = dataclasses.replace(config, **{key: GROUPS[key][value]()})
        elif key != "model":
            single.append(override)
    return changed(config, single, f"export {verb}")
