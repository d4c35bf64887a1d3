"""The keys of a run as typed fields, made of the schema, each with the role that may set it.

A key that no field stands for cannot be set through the service at all: the place of run folders, Hydra's own keys,
further options of sbatch, addresses of servers.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, Literal

import yaml
from omegaconf import MISSING

from ortlaunch.config.bounds import Bounds, bounds_of
from ortlaunch.config.default_options import default_options
from ortlaunch.config.keys import schemas_of
from ortlaunch.config.paths import conf_dir, group_options, headline, ready_jobs, slurm_profiles
from ortlaunch.config.schema import GROUPS, OPTIONAL_GROUPS, Config, EvalConfig, ModelConfig, TrainConfig
from ortlaunch.serve.access import Role
from ortlaunch.serve.texts import texts_of

Kind = Literal["integer", "number", "flag", "choice", "text", "lines"]
"""The type of a field. A text of ``lines`` is a list with one entry on each line."""

CHOICES = "choices"
"""The group of the fields that choose an option of a config group."""
_MEANINGS = {
    "model": "The model that is trained.",
    "adapter": "Whether all weights are trained, or small matrices beside them.",
    "data": "What it is trained on.",
    "backend": "What computes it: ONNX Runtime, torch.compile or PyTorch as it is; `auto` finds out which is fastest.",
    "trainer": "How several workers train one model.",
    "optimizer": "What makes a step of the gradients.",
    "scheduler": "How the learning rate changes over the steps.",
    "launcher": "Where it runs: on this machine or on a cluster.",
    "tracking": "Where the record of the run is sent.",
}
PROFILE_OF_SLURM = "launcher/slurm_profile"
_OF_ONE_START = frozenset(
    ["launcher.dry_run", "launcher.run", "launcher.node_rank", "launcher.master_addr", "launcher.master_port"]
)
"""Keys of the launcher that say how and where it starts, and not what."""
_NEVER = _OF_ONE_START | {
    *("run_root", "trackers", "tracking.uri", "tracking.artifacts"),
    *("launcher.extra", "launcher.srun_extra", "launcher.env"),
}
"""Keys that say where the service's machine writes, whom it talks to, or which options another program gets."""
_CODE = (
    *("model.target", "model.imports", "model.params.trust_remote_code", "train.items", "data.target"),
    *("train.step", "train.hooks", "eval.step", "eval.metrics"),
    *("optimizer.target", "scheduler.target"),
)
_TEXTS_OF_RUNNERS = frozenset(
    [
        *("name", "experiment", "backend.mode"),
        *("launcher.partition", "launcher.account", "launcher.qos", "launcher.reservation", "launcher.constraint"),
        *("launcher.time", "launcher.memory", "launcher.gpu_type", "launcher.gres"),
    ]
)
"""All other texts name files, code or commands, which are an author's to choose."""
OPEN_MODELS = ("factory", "hf")
"""Models that take parameters which no file lists."""
_OPTIONS_OF_AUTHORS = {
    "model": OPEN_MODELS,
    "data": ("chat", "factory", "hf", "text", "tokens"),
    "optimizer": ("factory",),
    "scheduler": ("factory",),
}
"""Options that load code or files which a key names."""
PARAMS = "model.params."


_OPEN = Bounds()


@dataclasses.dataclass(frozen=True)
class Field:
    """One key."""

    key: str
    group: str
    """The config group that it belongs to, such as ``train``; ``run`` for the keys of the run itself."""
    kind: Kind
    default: Any
    meaning: str
    role: Role
    """The least role that may set it."""
    nullable: bool = False
    bounds: Bounds = _OPEN
    choices: tuple[str, ...] = ()
    option: str | None = None
    """The option of the group that has the key; None if all have it."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the field for JSON."""
        return {
            "key": self.key,
            "group": self.group,
            "type": self.kind,
            "default": self.default,
            "meaning": self.meaning,
            "nullable": self.nullable,
            "least": self.bounds.least if self.bounds.least is not None else self.bounds.above,
            "most": self.bounds.most if self.bounds.most is not None else self.bounds.below,
            "bounds": str(self.bounds),
            "choices": list(self.choices),
        }


@functools.cache
def catalogue() -> Mapping[str, tuple[Field, ...]]:
    """Returns every key that the service takes; a key may have a field for each option of its group."""
    found: dict[str, tuple[Field, ...]] = {}
    for field in _all():
        found[field.key] = (*found.get(field.key, ()), field)
    return found


def fields_of(chosen: Mapping[str, str]) -> list[Field]:
    """Returns the fields of a run whose groups have these options, in the order of the schema."""
    fields = (field for several in catalogue().values() for field in several)
    return [field for field in fields if field.option is None or chosen.get(field.group) == field.option]


def is_choice(key: str) -> bool:
    """Whether a key chooses an option of a group."""
    return any(field.group == CHOICES for field in catalogue().get(key, ()))


def may_choose(group: str, option: str, role: Role) -> bool:
    """Whether somebody of a role may choose an option of a group."""
    return role >= Role.author or option not in _OPTIONS_OF_AUTHORS.get(group, ())


def key_of_own_code(values: Mapping[str, Any], ready: Mapping[str, Any]) -> str | None:
    """Returns the key by which a run executes what an author has chosen: code, commands, a program or its options.

    Args:
        values: the run's values by dotted keys; a list is one value.
        ready: what the ready job and the options that the run has chosen give by themselves. Administrators write them.
    """
    for key, value in values.items():
        if not value or value == ready.get(key):
            continue
        of_launcher = key.startswith("launcher.") and key not in _OF_ONE_START and key != "launcher.name"
        least = min((one.role for one in catalogue().get(key, ())), default=Role.author)
        if key in _CODE or (of_launcher and least >= Role.author):
            return key
    return None


def jobs_to_choose() -> list[dict[str, str]]:
    """Returns the ready jobs by name, with what they are. Those that are sweeps are left out: they are many runs."""
    found = sorted(ready_jobs().items())
    return [{"name": name, "meaning": headline(path)} for name, path in found if not _is_sweep(name)]


@functools.lru_cache(maxsize=256)
def _is_sweep(job: str) -> bool:
    try:
        content = yaml.safe_load(ready_jobs()[job].read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return True
    # A job that changes Hydra itself is left out too: it could name code that runs while it composes.
    return not isinstance(content, dict) or "hydra" in content


def _all() -> Iterator[Field]:
    yield from _choices()
    yield from _of_node(Config, "", "run", None)
    yield from _of_node(TrainConfig, "train.", "train", None)
    yield from _of_node(EvalConfig, "eval.", "train", None)
    yield from _of_node(ModelConfig, "model.", "model", None)
    for option in group_options("model"):
        yield from _of_model(option)
    for group in GROUPS:
        for option, node in schemas_of(group).items():
            yield from _of_node(node, f"{group}.", group, option)


def _choices() -> Iterator[Field]:
    defaults = default_options()
    for group in ("model", *GROUPS):
        options = group_options("model") if group == "model" else list(schemas_of(group))
        optional = group in OPTIONAL_GROUPS
        meaning = texts_of(Config).get(group) or _MEANINGS.get(group) or f"The option of the group `{group}`."
        yield Field(
            group, CHOICES, "choice", defaults.get(group), meaning, Role.runner, optional, choices=tuple(options)
        )
    profiles = tuple(sorted(slurm_profiles()))
    yield Field(PROFILE_OF_SLURM, CHOICES, "choice", "none", "The cluster's profile.", Role.runner, choices=profiles)


def _of_node(node: type[Any], prefix: str, group: str, option: str | None) -> Iterator[Field]:
    hints, texts = typing.get_type_hints(node), texts_of(node)
    for field in dataclasses.fields(node):
        hint, key = hints[field.name], f"{prefix}{field.name}"
        if key in _NEVER or (field.name == "name" and prefix):
            continue
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            if prefix:
                yield from _of_node(hint, f"{key}.", group, option)
            continue
        kind, nullable, choices = _kind(hint)
        if kind is None:
            continue
        meaning = texts.get(field.name) or (_summary(hint) if kind == "choice" else "")
        bounds = bounds_of(node, field.name) or Bounds()
        yield Field(key, group, kind, _default(field), meaning, _role(key, kind), nullable, bounds, choices, option)


def _of_model(option: str) -> Iterator[Field]:
    """The parameters that a model lists in its file. Models that take any parameter list only some."""
    content = yaml.safe_load((conf_dir() / "model" / f"{option}.yaml").read_text(encoding="utf-8"))
    for name, default in (content.get("params") or {}).items():
        kind: Kind
        if isinstance(default, bool):
            kind = "flag"
        elif isinstance(default, int) or default is None:
            kind = "integer"
        elif isinstance(default, float):
            kind = "number"
        elif isinstance(default, str):
            kind = "text"
        else:
            continue
        key = f"{PARAMS}{name}"
        shown = None if default == MISSING else default
        yield Field(key, "model", kind, shown, "", _role(key, kind), default is None, option=option)


def _kind(hint: Any) -> tuple[Kind | None, bool, tuple[str, ...]]:
    """The type of a field from its annotation, whether it may be null, and its choices."""
    parts = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        inner = next(part for part in parts if part is not type(None))
        return _kind(inner)[0], type(None) in parts, _kind(inner)[2]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "choice", False, tuple(member.name for member in hint)
    if typing.get_origin(hint) is list:
        return "lines" if parts[0] is str else None, False, ()
    plain: dict[Any, Kind] = {bool: "flag", int: "integer", float: "number", str: "text"}
    return plain.get(hint), False, ()


def _role(key: str, kind: Kind) -> Role:
    if kind == "lines" or (kind == "text" and key not in _TEXTS_OF_RUNNERS):
        return Role.author
    return Role.author if key.startswith("launcher.container.") else Role.runner


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is dataclasses.MISSING:
        value = field.default_factory() if field.default_factory is not dataclasses.MISSING else None
    else:
        value = field.default
    if value == MISSING:
        return None
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return value.name if isinstance(value, Enum) else value


def _summary(hint: Any) -> str:
    parts = [hint, *typing.get_args(hint)]
    named = next((one for one in parts if isinstance(one, type) and issubclass(one, Enum)), None)
    return " ".join((inspect.getdoc(named) or "").split()).replace("``", "`") if named is not None else ""
