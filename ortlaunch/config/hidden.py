"""Secrets in a configuration: the run folder does not hold them, and the environment carries them to the processes.

Any key may hold one, such as ``model.params.hub_token``. ``config.yaml`` and the trackers get ``***`` instead. Workers
and jobs get the values in the variable ``ORTLAUNCH_SECRETS``, which `restored` puts back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.base.secrets import CARRIER, carried_values, is_hidden, may_be


def carrier(settings: Mapping[str, Any], shown: Mapping[str, Any]) -> dict[str, str]:
    """The environment variable with the values that were hidden; empty if none was.

    Args:
        settings: the configuration as nested mappings.
        shown: the same without secrets.
    """
    public = dict(leaves(shown))
    values = {key: value for key, value in leaves(settings) if isinstance(value, str) and public.get(key) != value}
    return {CARRIER: json.dumps(values)} if values else {}


def restored(settings: dict[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """A run folder's configuration with the hidden values that the environment has."""
    values = carried_values(environment)
    return _restored(settings, "", values) if values else settings


def _restored(node: Any, prefix: str, values: Mapping[str, str]) -> Any:
    if isinstance(node, Mapping):
        return {key: _restored(value, _joined(prefix, key), values) for key, value in node.items()}
    if isinstance(node, list):
        return [_restored(value, _joined(prefix, number), values) for number, value in enumerate(node)]
    # The variable may be left from another run, whose secrets must not get into this one.
    value = values.get(prefix)
    return value if value is not None and is_hidden(str(node)) and may_be(value, str(node)) else node


def hidden_keys(settings: Mapping[str, Any]) -> list[str]:
    """The dotted keys whose values are hidden."""
    return [key for key, value in leaves(settings) if isinstance(value, str) and is_hidden(value)]


def check_whole(settings: Mapping[str, Any]) -> None:
    """Refuses a configuration from a run folder in which a value is still hidden.

    Raises:
        RequestError: a value holds ``***``. The message names the key and the remedy.
    """
    if keys := hidden_keys(settings):
        raise RequestError(
            f"{', '.join(keys)}: the run folder holds *** instead of the secret: set the variable {CARRIER} to "
            f"'{json.dumps(dict.fromkeys(keys, 'VALUE'))}'"
        )


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values in nested mappings and lists by their dotted keys."""
    items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else None
    if items is None:
        yield prefix, node
        return
    for key, value in items:
        yield from leaves(value, _joined(prefix, key))


def _joined(prefix: str, key: object) -> str:
    return f"{prefix}.{key}" if prefix else str(key)
