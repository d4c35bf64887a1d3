"""The page of all keys, made of the schema when the site is built: a hook of mkdocs (mkdocs.yml)."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from omegaconf import MISSING

from ortlaunch.config import schema
from ortlaunch.config.bounds import bounds_of
from ortlaunch.config.paths import conf_dir, headline
from ortlaunch.serve.texts import texts_of
from ortlaunch.tracking import trackers

_INTRO = """\
# Every key

Made of `ortlaunch/config/schema.py`, and of the modules of data sources, optimizers and schedules.
`ortlaunch --cfg job` prints a composed configuration; `KEY=VALUE` changes it, and what is wrong in it is refused before
anything starts. A key is typed as it stands here; `null` removes a value. A number is finite, and within the bounds
beside its type. Where a key belongs to one option of a group, the option has to be chosen first:
`trainer=deepspeed trainer.zero_stage=2`.
"""


def page() -> str:
    """The whole page, in Markdown."""
    parts = [_INTRO, "## The run\n", _table(schema.Config, "")]
    parts += ["## train\n", _table(schema.TrainConfig, "train.")]
    parts += ["## eval\n", _table(schema.EvalConfig, "eval.")]
    parts += ["## model\n", _options_of_models(), _table(schema.ModelConfig, "model.")]
    for group, options in schema.GROUPS.items():
        chosen = f"+{group}" if group in schema.OPTIONAL_GROUPS else group
        parts += [f"## {group}\n", _shared(group, options)]
        for option, node in options.items():
            parts += [f"### {chosen}={option}\n", f"{_summary(node)}\n"]
            parts.append(_table(node, f"{group}.", without=_base_of(options)))
        if group == "tracking":
            parts += _trackers()
    parts += ["## script\n", f"{_summary(schema.ScriptConfig)}\n", _table(schema.ScriptConfig, "script.")]
    return "\n".join(part for part in parts if part)


def _trackers() -> list[str]:
    """Trackers beside MLflow: options of `tracking` whose keys have a place of their own."""
    parts = []
    for name in trackers.built_in_besides_mlflow():
        node = trackers.schema(name)
        parts += [f"### tracking=[mlflow,{name}]\n", f"{_summary(node)}\n", _table(node, f"trackers.{name}.")]
    return parts


def _shared(group: str, options: Mapping[str, type]) -> str:
    base = _base_of(options)
    table = _table(base, f"{group}.")
    return f"{_summary(base)}\n\n{table}" if table else ""


def _base_of(options: Mapping[str, type]) -> type:
    return next(base for base in reversed(next(iter(options.values())).__mro__) if dataclasses.is_dataclass(base))


def _options_of_models() -> str:
    files = sorted((conf_dir() / "model").glob("*.yaml"))
    rows = "".join(f"| `model={path.stem}` | {headline(path)} |\n" for path in files)
    return f"| option | |\n| --- | --- |\n{rows}"


def _table(node: type, prefix: str, without: type | None = None) -> str:
    rows = _rows(node, prefix, without)
    head = "| key | type | default | |\n| --- | --- | --- | --- |\n"
    return head + "".join(f"| {' | '.join(row)} |\n" for row in rows) if rows else ""


def _rows(node: type, prefix: str, without: type | None = None) -> list[tuple[str, str, str, str]]:
    hints, texts = typing.get_type_hints(node), texts_of(node)
    shared = {field.name: field.default for field in dataclasses.fields(without)} if without else {}
    rows = []
    for field in dataclasses.fields(node):
        hint, key = hints[field.name], prefix + field.name
        if (field.name == "name" and prefix) or (field.name in shared and shared[field.name] == field.default):
            continue
        if dataclasses.is_dataclass(hint) and prefix:
            rows += _rows(typing.cast("type", hint), f"{key}.")
        elif not _is_node(hint):
            doc = texts.get(field.name) or _of_enum(hint)
            bounds = str(bounds_of(node, field.name) or "")
            taken = f"{_type(hint)}{bounds and f', {bounds}'}"
            rows.append((f"`{key}`", _escape(taken), _escape(_default(field)), _escape(doc)))
    return rows


def _is_node(hint: Any) -> bool:
    parts = (hint, *typing.get_args(hint))
    return typing.get_origin(hint) is not list and any(dataclasses.is_dataclass(part) for part in parts)


def _type(hint: Any) -> str:
    parts = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return " or ".join("null" if part is type(None) else _type(part) for part in parts)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " ".join(f"`{member.name}`" for member in hint)
    if typing.get_origin(hint) is list:
        return f"list of {_type(parts[0])}"
    if typing.get_origin(hint) is dict or dataclasses.is_dataclass(hint):
        return "keys and values"
    return {Any: "any", str: "text", int: "integer", float: "number", bool: "`true` `false`"}[hint]


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
    if value == MISSING:
        return "must be given"
    if isinstance(value, Enum):
        value = value.name
    elif value is None or isinstance(value, bool):
        value = {None: "null", True: "true", False: "false"}[value]
    elif value in ([], {}, ""):
        return "none"
    return f"`{value}`"


def _of_enum(hint: Any) -> str:
    return _summary(hint) if isinstance(hint, type) and issubclass(hint, Enum) else ""


def _summary(node: type) -> str:
    return re.sub(r"\s+", " ", inspect.getdoc(node) or "").replace("``", "`")


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the page to those of docs/."""
    files.append(File.generated(config, "reference.md", content=page()))
    return files
