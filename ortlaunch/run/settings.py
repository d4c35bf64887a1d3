"""Reads a run's ``config.yaml`` and ``overrides.yaml`` as plain values. No other module parses these files.

`ortlaunch.config.load` builds the schema's dataclasses from the values; code that needs only a few keys uses them
directly. The parser is libyaml's, with the number grammar of OmegaConf, which wrote the file. It reads a hundred
configurations in 0.1 s.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.base.reading import in_words, read_bytes

_FLOAT = re.compile(
    r"""^(?:
     [-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?(?:[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)
    |\.[0-9_]+(?:[eE][-+][0-9]+)?
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$""",
    re.X,
)


_LARGEST = 4 << 20
"""The largest configuration that is read, in bytes."""
_DEEPEST = 100
_DEEP = re.compile(r"^ {100}|(?:[-?:]\s+){50}", re.M)
"""What a text may have that is nested more than 100 times without brackets."""
_ALIAS = re.compile(r"\*[\w-]")
"""What may be an alias: in brackets one may follow a colon, and its name may begin with a dash."""


def read_settings(path: Path) -> dict[str, Any]:
    """The configuration in a file; empty where there is no file.

    Raises:
        RequestError: the file cannot be read, or holds no mapping.
    """
    try:
        settings = _values(path)
    except FileNotFoundError:
        return {}
    if not isinstance(settings, dict):
        raise RequestError(f"{path} cannot be read: it holds no keys")
    return settings


def read_words(path: Path) -> list[str]:
    """The command line in a file.

    Raises:
        RequestError: the file is not there, or cannot be read.
    """
    try:
        words = _values(path)
    except FileNotFoundError as error:
        raise RequestError(f"{path} cannot be read: {in_words(error)}") from error
    return [str(word) for word in words] if isinstance(words, list) else []


def _values(path: Path) -> Any:
    """What a file holds.

    Raises:
        FileNotFoundError: it is not there.
        RequestError: it cannot be read.
    """
    import yaml

    try:
        text = read_bytes(path, _LARGEST).decode("utf-8")
        _check_depth(text)
        return yaml.load(text, Loader=_loader())
    except FileNotFoundError:
        raise
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RequestError(f"{path} cannot be read: {in_words(error)}") from error


@cache
def _loader() -> Any:
    """A YAML loader that reads ``1e-5`` as a number and never reads a text as a date."""
    import yaml

    base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):  # type: ignore[misc, valid-type]
        """libyaml's loader with OmegaConf's number grammar."""

    timestamp, number = "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float"
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (timestamp, number)]
        for first, resolvers in base.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver(number, _FLOAT, list("-+0123456789."))
    return Loader


def _check_depth(text: str) -> None:
    """Refuses what a run's configuration never has: deep nesting, and aliases, which can stand for endless values.

    libyaml's loader builds nested values by recursion in C, and a text that is nested deeply ends the process.

    Raises:
        ValueError: the text has it.
    """
    import yaml

    if _ALIAS.search(text) is None and _DEEP.search(text) is None and text.count("[") + text.count("{") <= _DEEPEST:
        return
    depth = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it has aliases, which ortlaunch does not write")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise ValueError("it is nested too deeply")
