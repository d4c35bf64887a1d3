"""The trackers by name, built in or of installed packages, and the trackers that a configuration chooses.

To add a built-in tracker, add a module with a subclass of `Tracker`, and a line in `_BUILT_IN`.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from ortlaunch.base.errors import RequestError
from ortlaunch.base.modules import announced
from ortlaunch.base.secrets import hidden, is_hidden
from ortlaunch.config.bounds import check_numbers
from ortlaunch.config.hidden import carrier, check_whole
from ortlaunch.config.load import first_line, to_dict, without_keys
from ortlaunch.config.schema import AnyRun, RunConfig, TrackingConfig
from ortlaunch.tracking.tracker import Tracker

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "ortlaunch.trackers"
"""The entry-point group in which installed packages announce trackers."""
MAIN, NONE = "mlflow", "none"
"""The options of `tracking` whose keys are `tracking.KEY`. The keys of all other trackers are `trackers.NAME.KEY`."""
_BUILT_IN = {
    MAIN: "ortlaunch.tracking.mlflow:MlflowTracker",
    "tensorboard": "ortlaunch.tracking.tensorboard:TensorboardTracker",
}
_FLUSH_SECONDS = 60


def names() -> list[str]:
    """The names of all trackers: the built-in ones first, then those of installed packages."""
    return [*_BUILT_IN, *(name for name in _announced() if name not in (*_BUILT_IN, NONE))]


def built_in_besides_mlflow() -> list[str]:
    """The names of the built-in trackers other than MLflow."""
    return [name for name in _BUILT_IN if name != MAIN]


def find(name: str) -> Tracker[Any]:
    """The tracker of this name.

    Raises:
        RequestError: there is no such tracker, or its module cannot be imported.
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
    """The dataclass of a tracker's configuration, which has the field `name`.

    Raises:
        RequestError: there is no such tracker, or its `config` is neither a dataclass nor a mapping.
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
    """A tracker's configuration as a node for Hydra, with its defaults and types."""
    made: Any = OmegaConf.structured(schema(name))
    if OmegaConf.is_missing(made, "name"):
        made.name = name
    return made


def why_missing(name: str) -> str | None:
    """Why a tracker of an installed package cannot be chosen; None if it can be, or if the name is unknown."""
    try:
        if name in names():
            node(name)
    except RequestError as error:
        return str(error)
    return None


def configured(name: str, values: Mapping[str, Any]) -> Any:
    """The typed configuration of a tracker.

    Args:
        name: the tracker's name.
        values: its keys and their values.

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
    except Exception as error:  # The dataclass may be a user's, which may raise any exception.
        raise RequestError(f"{prefix}: {first_line(error)}") from error


def chosen(config: RunConfig) -> list[Any]:
    """The typed configurations of the trackers that a run uses. The field `name` is the tracker's name.

    Raises:
        RequestError: one of them is unknown or misconfigured.
    """
    main = [] if config.tracking.name == NONE else [config.tracking]
    return [*main, *(configured(name, values) for name, values in config.trackers.items())]


def check(config: RunConfig) -> None:
    """Checks the configurations of the chosen trackers.

    Raises:
        RequestError: a tracker refuses its configuration. The message names the key and the remedy.
    """
    for cfg in chosen(config):
        tracker = find(cfg.name)
        if type(cfg) is TrackingConfig:
            raise without_keys("tracking", cfg.name)
        check_numbers(cfg, f"{_prefix(cfg.name)}.")
        try:
            tracker.check(cfg)
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(f"{_prefix(cfg.name)}: {type(error).__name__}: {first_line(error)}") from error


def resolved(config: AnyRun, cwd: Path) -> AnyRun:
    """The configuration with absolute paths for the trackers."""
    return _with_trackers(config, [find(cfg.name).resolved(cfg, cwd) for cfg in chosen(config)])


def public(config: AnyRun) -> AnyRun:
    """The configuration without the trackers' credentials."""
    return _with_trackers(config, [find(cfg.name).public(cfg) for cfg in chosen(config)])


def public_settings(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain values, and without any secret: of the trackers and of all other keys."""
    settings: dict[str, Any] = hidden("", to_dict(public(config)))
    return settings


def environment(config: RunConfig) -> dict[str, str]:
    """The environment variables that pass the configuration's secrets to a job."""
    own = {name: text for cfg in chosen(config) for name, text in find(cfg.name).environment(cfg).items()}
    return own | carrier(to_dict(config), public_settings(config))


def worker_environment(config: RunConfig) -> dict[str, str]:
    """The environment variable that passes the configuration's secrets to workers, which use no tracker."""
    settings = to_dict(config) | {"tracking": {}, "trackers": {}}
    return carrier(settings, hidden("", settings))


def restored(cfg: Any, carried: Mapping[str, str]) -> Any:
    """A tracker's configuration from a run folder, with the credentials from environment variables."""
    try:
        return find(cfg.name).restored(cfg, carried)
    except RequestError:
        return cfg  # The tracker is not installed here.


def with_credentials(config: AnyRun, carried: Mapping[str, str]) -> AnyRun:
    """A run folder's configuration, with the trackers' credentials from environment variables.

    Args:
        config: the configuration as `public` left it.
        carried: the environment variables.

    Raises:
        RequestError: a tracker is unknown or misconfigured.
    """
    return _with_trackers(config, [restored(cfg, carried) for cfg in chosen(config)])


def check_credentials(config: RunConfig) -> None:
    """Refuses a configuration from a run folder in which a credential is still hidden.

    Raises:
        RequestError: a value holds *** instead of a credential. The message names the key and the remedy.
    """
    for cfg in chosen(config):
        for key, value in _plain(cfg).items():
            if is_hidden(str(value)):
                variable = find(cfg.name).variable
                remedy = f", or set {variable} to it" if variable else ""
                key = f"{_prefix(cfg.name)}.{key}"
                raise RequestError(
                    f"{key}: the run folder holds *** instead of the credentials: give the whole value, "
                    f"{key}=VALUE{remedy}"
                )
    check_whole(to_dict(config))


def files(config: RunConfig) -> list[Path]:
    """The files that the chosen trackers write outside the run folder."""
    return [path for cfg in chosen(config) for path in find(cfg.name).files(cfg)]


def listing(config: RunConfig) -> list[Any]:
    """The configurations of the chosen trackers that list runs, and so show queued runs and sweeps too."""
    return [cfg for cfg in chosen(config) if find(cfg.name).lists_runs]


def compare_commands(config: RunConfig, *words: str) -> list[str]:
    """The commands that compare runs in their trackers.

    Args:
        config: the configuration of one of the runs.
        words: the options of `ortlaunch compare` that choose the runs.
    """
    made = [find(cfg.name).compare_command(cfg, *words) for cfg in chosen(config)]
    return [command for command in made if command is not None]


def flush_seconds(cfgs: list[Any]) -> float:
    """The longest wait at the end of a run for all trackers together. If MLflow is chosen, its key decides."""
    return next((float(cfg.flush_seconds) for cfg in cfgs if cfg.name == MAIN), _FLUSH_SECONDS)


def _with_trackers(config: AnyRun, cfgs: list[Any]) -> AnyRun:
    """The configuration with other configurations of its trackers, as `chosen` returns them."""
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
    return {point.name: point for point in announced(ENTRY_POINTS)}


def _origin(point: EntryPoint) -> str:
    return f"{point.value} of the package {point.dist.name if point.dist is not None else point.module}"


def _typed(value: Any) -> tuple[Any, Any]:
    """The type and the field of a key, derived from its default."""
    if isinstance(value, list):
        return list[Any], dataclasses.field(default_factory=lambda: list(value))
    if isinstance(value, Mapping):
        return dict[str, Any], dataclasses.field(default_factory=lambda: dict(value))
    return (type(value) if isinstance(value, str | bool | int | float) else Any), _default(value)


def _default(value: Any) -> Any:
    return dataclasses.field(default=value)
