"""The trackers by name, built in and of installed packages, and those that a configuration chooses.

A further tracker is a module with a subclass of `Tracker`, and a line in `_BUILT_IN`.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from ortlaunch.base.errors import RequestError
from ortlaunch.config.load import first_line
from ortlaunch.config.schema import Config
from ortlaunch.tracking.tracker import Tracker

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "ortlaunch.trackers"
"""Group in which installed packages announce trackers."""
MAIN, NONE = "mlflow", "none"
"""Options of `tracking` whose keys are `tracking.KEY`; those of all others are `trackers.NAME.KEY`."""
_BUILT_IN = {
    MAIN: "ortlaunch.tracking.mlflow:MlflowTracker",
    "tensorboard": "ortlaunch.tracking.tensorboard:TensorboardTracker",
}
_FLUSH_SECONDS = 60


def names() -> list[str]:
    """All trackers: built-in ones first, then those of installed packages."""
    return [*_BUILT_IN, *(name for name in _announced() if name not in (*_BUILT_IN, NONE))]


def beside() -> list[str]:
    """The built-in trackers beside MLflow."""
    return [name for name in _BUILT_IN if name != MAIN]


def find(name: str) -> Tracker[Any]:
    """The tracker of a name.

    Raises:
        RequestError: there is none, or its module cannot be imported.
    """
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        built_in: Tracker[Any] = getattr(importlib.import_module(module), attribute)(name)
        return built_in
    point = _announced().get(name)
    if point is None:
        known = ", ".join([*names(), NONE])
        raise RequestError(f"tracking={name}: there is no such tracker here (there are {known})")
    try:
        tracker = point.load()(name)
    except Exception as error:
        cause = f"{type(error).__name__}: {first_line(error)}"
        raise RequestError(f"tracking={name}: {_origin(point)} cannot be loaded: {cause}") from error
    if not isinstance(tracker, Tracker):
        raise RequestError(f"tracking={name}: {_origin(point)} is no subclass of ortlaunch.tracking.tracker.Tracker")
    return tracker


def schema(name: str) -> type[Any]:
    """The dataclass of a tracker's configuration; it has the field `name`.

    Raises:
        RequestError: there is no such tracker, or it describes its configuration in another way.
    """
    config = find(name).config
    if isinstance(config, Mapping):
        fields = [(key, *_typed(value)) for key, value in config.items() if key != "name"]
        return dataclasses.make_dataclass(f"{name}_config", [("name", str, _default(name)), *fields])
    if not dataclasses.is_dataclass(config):
        raise RequestError(f"tracking={name}: the attribute 'config' of the tracker is neither dataclass nor mapping")
    if "name" in (field.name for field in dataclasses.fields(config)):
        return config
    return dataclasses.make_dataclass(config.__name__, [("name", str, _default(name))], bases=(config,), kw_only=True)


def node(name: str) -> Any:
    """The same for Hydra: with the tracker's defaults and types."""
    made: Any = OmegaConf.structured(schema(name))
    if OmegaConf.is_missing(made, "name"):
        made.name = name
    return made


def why_missing(name: str) -> str | None:
    """Why a tracker of an installed package cannot be chosen; None for a name that is unknown, or works."""
    try:
        if name in names():
            node(name)
    except RequestError as error:
        return str(error)
    return None


def configured(name: str, values: Mapping[str, Any]) -> Any:
    """The typed configuration of a tracker.

    Args:
        name: the tracker.
        values: its keys.

    Raises:
        RequestError: there is no such tracker, or a key is unknown, missing or of the wrong type.
    """
    node_ = node(name)
    prefix = _prefix(name)
    if unknown := sorted(set(map(str, values)) - set(map(str, node_))):
        known = ", ".join(f"{prefix}.{key}" for key in node_ if key != "name")
        raise RequestError(f"{prefix}.{unknown[0]}: the tracker has no such key (it has {known or 'none'})")
    for key, value in values.items():
        try:
            OmegaConf.update(node_, str(key), value)
        except Exception as error:
            raise RequestError(f"{prefix}.{key}={value}: {first_line(error)}") from error
    node_.name = name
    if missing := sorted(OmegaConf.missing_keys(node_)):
        key = f"{prefix}.{missing[0]}"
        raise RequestError(f"{key} is not set: give it on the command line, {key}=VALUE")
    try:
        return OmegaConf.to_object(node_)
    except Exception as error:  # The dataclass may be a user's, with rules of its own.
        raise RequestError(f"{prefix}: {first_line(error)}") from error


def chosen(config: Config) -> list[Any]:
    """The typed configurations of the trackers that a run has chosen; each names its tracker by `name`.

    Raises:
        RequestError: one of them is unknown or misconfigured.
    """
    main = [] if config.tracking.name == NONE else [config.tracking]
    return [*main, *(configured(name, values) for name, values in config.trackers.items())]


def check(config: Config) -> None:
    """Refuses what a chosen tracker refuses.

    Raises:
        RequestError: with the key and what to do.
    """
    for cfg in chosen(config):
        try:
            find(cfg.name).check(cfg)
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(f"{_prefix(cfg.name)}: {type(error).__name__}: {first_line(error)}") from error


def resolved(config: Config, cwd: Path) -> Config:
    """The configuration with the trackers' relative paths made absolute."""
    return _with(config, [find(cfg.name).resolved(cfg, cwd) for cfg in chosen(config)])


def public(config: Config) -> Config:
    """The configuration without the credentials that trackers may carry."""
    return _with(config, [find(cfg.name).public(cfg) for cfg in chosen(config)])


def environment(config: Config) -> dict[str, str]:
    """Variables that carry those credentials to a job."""
    return {name: text for cfg in chosen(config) for name, text in find(cfg.name).environment(cfg).items()}


def restored(cfg: Any, carried: Mapping[str, str]) -> Any:
    """A configuration of a run folder with the credentials that an environment carries."""
    try:
        return find(cfg.name).restored(cfg, carried)
    except RequestError:
        return cfg  # The tracker is not installed here.


def files(config: Config) -> list[Path]:
    """What the chosen trackers write outside the run folder."""
    return [path for cfg in chosen(config) for path in find(cfg.name).files(cfg)]


def listing(config: Config) -> list[Any]:
    """The configurations of those that are an overview of runs, where queued runs and sweeps are shown too."""
    return [cfg for cfg in chosen(config) if find(cfg.name).lists_runs]


def compare_commands(config: Config, *words: str) -> list[str]:
    """The commands that compare runs where they are recorded.

    Args:
        config: the configuration of one of them.
        words: options of `ortlaunch compare` that choose them.
    """
    made = [find(cfg.name).compare_command(cfg, *words) for cfg in chosen(config)]
    return [command for command in made if command is not None]


def flush_seconds(cfgs: list[Any]) -> float:
    """Longest wait at the end of a run for all trackers together; MLflow's key decides where it is chosen."""
    return next((float(cfg.flush_seconds) for cfg in cfgs if cfg.name == MAIN), _FLUSH_SECONDS)


def _with(config: Config, cfgs: list[Any]) -> Config:
    main = next((cfg for cfg in cfgs if cfg.name == config.tracking.name), config.tracking)
    others = {cfg.name: _plain(cfg) for cfg in cfgs if cfg is not main}
    return dataclasses.replace(config, tracking=main, trackers=others)


def _plain(cfg: Any) -> dict[str, Any]:
    plain = OmegaConf.to_container(OmegaConf.structured(cfg), enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _prefix(name: str) -> str:
    return "tracking" if name == MAIN else f"trackers.{name}"


def _announced() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # 11 ms, a thirtieth of a command that asks for none

    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def _origin(point: EntryPoint) -> str:
    return f"{point.value} of the package {point.dist.name if point.dist is not None else point.module}"


def _typed(value: Any) -> tuple[Any, Any]:
    """Type and field of a key that is known by its default alone."""
    if isinstance(value, list):
        return list[Any], dataclasses.field(default_factory=lambda: list(value))
    if isinstance(value, Mapping):
        return dict[str, Any], dataclasses.field(default_factory=lambda: dict(value))
    return (type(value) if isinstance(value, str | bool | int | float) else Any), _default(value)


def _default(value: Any) -> Any:
    return dataclasses.field(default=value)
