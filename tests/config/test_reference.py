"""The page of all keys, which the site's build makes, explains each key."""

from __future__ import annotations

from ortlaunch.config.keys import known_keys
from ortlaunch.config.schema import GROUPS
from tests.config.reference import page


def test_it_has_every_key_and_each_is_explained() -> None:
    text = page()
    nodes = {*GROUPS, "train", "eval", "model", "backend.debug", "launcher.container", "script"}
    named = {f"{group}.name" for group in (*GROUPS, "model")}
    for key in set(known_keys()) - nodes - named:
        rows = [line for line in text.splitlines() if line.startswith(f"| `{key}` |")]
        assert rows, key
        for row in rows:
            assert len(row.split(" | ")[-1]) > 8, f"{key} has no text in the schema"
