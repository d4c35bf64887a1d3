"""Draws bad requests over every verb and key: from the schema, the table of verbs and the options of their parsers."""

from __future__ import annotations

import argparse
import importlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from ortlaunch.cli import VERBS
from ortlaunch.config.keys import is_free, known_keys
from ortlaunch.config.paths import group_options
from ortlaunch.config.schema import GROUPS, OPTIONAL_GROUPS
from tests.attack.keys import Key, all_keys, bad_value, misspelt
from tests.attack.words import FORMS, LONG, MADE_OF, OF_A_RUN, PLACES, TEXTS, form
from tests.attack.world import BROKEN, RUN

_Item = TypeVar("_Item")
_COMPOSING = (
    ("run",),
    (),
    ("check",),
    ("estimate",),
    ("tune",),
    ("bench", "repeat=1"),
    ("export", "onnx", "out=new"),
    ("export", "artifacts", "out=new"),
    ("export", "inference", "out=new"),
)
"""The beginnings of the command lines that take keys of the configuration."""
_PARSERS = {
    "export weights": "ortlaunch.export.run_weights",
    "export verify": "ortlaunch.export.verify_command",
}
"""Modules of parsers that no verb of the table has as its own."""


@dataclass(frozen=True)
class Request:
    """A bad request."""

    kind: str
    words: list[str]

    def __str__(self) -> str:
        shown = [word if len(word) < 60 else f"{word[:40]}… ({len(word)} characters)" for word in self.words]
        return f"[{self.kind}] ortlaunch {' '.join(shown)}"


def drawn(seed: int) -> Iterator[Request]:
    """Bad requests without end, the same for the same seed. Every kind comes in turn, and so does every key."""
    chance = random.Random(seed)
    keys, valued = _shuffled(all_keys(), chance), _shuffled(all_keys(), chance)
    beginnings = itertools.cycle(_COMPOSING)
    options = _shuffled(_option_requests(), chance)
    while True:
        for _ in range(4):
            yield _value(next(valued), next(beginnings), chance)
        for kind in (_unknown_key, _foreign_key, _removed, _option, _syntax, _file, _place, _resume, _run_name, _sweep):
            yield kind(next(keys), next(beginnings), chance)
        for _ in range(3):
            yield next(options)


def _shuffled(items: list[_Item], chance: random.Random) -> Iterator[_Item]:
    """The items again and again, each time in another order."""
    while True:
        yield from chance.sample(items, len(items))


def _value(key: Key, beginning: tuple[str, ...], chance: random.Random) -> Request:
    """A key with a value that it cannot take."""
    plus = chance.choice(("", "", "", "++"))
    return Request("value", [*beginning, *key.chosen_by, f"{plus}{key.name}={bad_value(key, chance)}"])


def _unknown_key(key: Key, beginning: tuple[str, ...], chance: random.Random) -> Request:
    """A key that the configuration does not have, plain or added."""
    name = misspelt(key.name, chance)
    while name in known_keys() or is_free(name) or name.partition(".")[0] in ("", "jobs", "hydra", *OPTIONAL_GROUPS):
        name = f"{misspelt(key.name.rpartition('.')[2], chance)}q"
    return Request("unknown key", [*beginning, *key.chosen_by, f"{chance.choice(('', '+', '++'))}{name}=1"])


def _foreign_key(key: Key, beginning: tuple[str, ...], chance: random.Random) -> Request:
    """A key of an option that is not chosen; for a key of all options, the group itself as if it were no group."""
    group = key.name.partition(".")[0]
    field = key.name.partition(".")[2].partition(".")[0]
    others = [name for name, node in GROUPS.get(group, {}).items() if field not in node.__dataclass_fields__]
    if not others or group in ("tracking", "trackers"):
        return Request("foreign key", [*beginning, f"{key.name.partition('.')[0]}.nowhere.{key.name}=1"])
    plus = "+" if group in OPTIONAL_GROUPS else ""
    return Request("foreign key", [*beginning, f"{plus}{group}={chance.choice(others)}", f"{key.name}=1"])


def _removed(key: Key, beginning: tuple[str, ...], chance: random.Random) -> Request:
    """A key or a group that is taken away."""
    name = chance.choice((key.name, key.name.partition(".")[0], misspelt(key.name, chance)))
    return Request("removed key", [*beginning, *key.chosen_by, f"~{name}{chance.choice(('', '=1'))}"])


def _option(key: Key, beginning: tuple[str, ...], chance: random.Random) -> Request:
    """An option that a group does not have."""
    group = chance.choice([*GROUPS, "model"])
    names = [*GROUPS.get(group, ()), *(group_options(group) if group == "model" else ())]
    slip = f"{misspelt(chance.choice(names), chance)}q"
    value = chance.choice((slip, "5", "[]", "a/b", LONG, "..", "{a:1}"))
    return Request("option", [*beginning, f"{chance.choice(('', '+'))}{group}={value}"])


def _syntax(key: Key, beginning: tuple[str, ...], chance: random.Random) -> Request:
    """What is no KEY=VALUE at all."""
    return Request("syntax", [*beginning, form(chance.choice(FORMS), key.name)])


def _file(key: Key, beginning: tuple[str, ...], chance: random.Random) -> Request:
    """A file of configuration that is broken, or is not there."""
    broken = chance.choice(list(BROKEN))
    own = [f"+jobs={broken}"], ["launcher=slurm", f"launcher/slurm_profile={broken}"]
    if beginning[:1] == ("export",):
        return Request("file", [*beginning, *chance.choice(own)])
    folders = ("../cfg", "nosuch", "file", LONG, "loop")
    words = chance.choice(
        (*own, ["--config-dir", "../cfg", f"model={broken}"], ["--config-dir", "../cfg", f"optimizer={broken}"])
    )
    far = ["--config-dir", chance.choice(folders[1:])], ["--config-name", "nosuch"], ["--config-path", "nosuch"]
    return Request("file", [*beginning, *(words if chance.random() < 0.7 else chance.choice(far))])


def _place(key: Key, beginning: tuple[str, ...], chance: random.Random) -> Request:
    """A place that cannot be written, or is needed and not there."""
    place = chance.choice(PLACES)
    requests = (
        ["model=mlp", f"run_root={place}"],
        ["model=mlp", f"run_root={place}", "train.steps=4,5", "--multirun"],
        ["model=mlp", f"hydra.sweep.dir={place}", "train.steps=4,5", "--multirun"],
        ["bench", "model=mlp", f"run_root={place}", "train.steps=4"],
        ["export", "onnx", "model=mlp", f"out={place}"],
        ["export", "onnx", "model=mlp", "out=full"],
        ["export", "weights", f"runs/default/{RUN}", f"--out={place}"],
        ["export", "onnx", f"from_run={place}", "out=new"],
        ["export", "onnx", "model=mlp", f"from_weights={place}", "out=new"],
        ["export", "verify", place],
        ["compare", "--html", place],
        ["jobs", "--root", place],
        ["sync", place],
        [chance.choice(OF_A_RUN), place],
        ["model=mlp", f"train.resume={place}"],
        ["model=mlp", f"model.weights={place}"],
        ["data=text", f"data.path={place}"],
        ["data=tokens", f"data.path={place}"],
        ["data=text", "data.path=file", f"data.tokenizer={place}"],
        ["model=factory", f"model.target={place}:x"],
        ["run", "--config-dir", place],
    )
    return Request("place", chance.choice(requests))


def _resume(key: Key, beginning: tuple[str, ...], chance: random.Random) -> Request:
    """A change of a run that it cannot take: a wrong one, or one of what the run is made of."""
    change = chance.choice((*MADE_OF, f"{key.name}={bad_value(key, chance)}", f"+{misspelt(key.name, chance)}q=1"))
    return Request("resume", ["resume", RUN, "train.steps=20", change])


def _run_name(key: Key, beginning: tuple[str, ...], chance: random.Random) -> Request:
    """A run that is not there."""
    names = (
        "nosuch",
        LONG,
        "",
        "/",
        "..",
        "file",
        "loop",
        "full",
        "~nosuchuser/x",
        "123456",
        "\x1b[31m",
        "a" * 10_000,
    )
    verb = chance.choice([(verb,) for verb in (*OF_A_RUN, "sync")] + [("export", "weights"), ("export", "verify")])
    return Request("run name", [*verb, chance.choice(names)])


def _sweep(key: Key, beginning: tuple[str, ...], chance: random.Random) -> Request:
    """A sweep in which a combination is wrong, or that is none."""
    value = bad_value(key, chance)
    swept = "seed=1,2" if key.name == "train.steps" else "train.steps=4,5"
    requests = (
        [*key.chosen_by, f"{key.name}={value}", swept, "--multirun"],
        ["bench", *key.chosen_by, f"{key.name}={value}", swept.replace("seed", "optimizer.lr")],
        ["bench", "seed=1,2"],
        ["bench", "train.steps=4,5", f"repeat={chance.choice(('0', '-1', '', 'x', '9' * 10_000, '1.5'))}"],
        ["bench", "experiment=a,b"],
        ["bench", "launcher=slurm"],
        ["bench", "tracking=none"],
        ["check", "train.steps=4,5", "--multirun"],
        ["train.steps=4,5"],
        ["train.steps=0,4", "--multirun"],
        ["model=mlp,nosuch", "--multirun"],
        ["train.steps=4,5", "--multirun", "hydra.sweeper.params=5"],
        ["train.steps=range(1)", "--multirun", "train.steps=x"],
    )
    return Request("sweep", chance.choice(requests))


def _option_requests() -> list[Request]:
    """A wrong use of each option of each verb, as their parsers declare them, and of the verbs that have none."""
    found = [Request("verb", [name]) for name in ("nosuch", "status", "logs", "cancel", "resume", "sync", "export", "")]
    found += [Request("verb", [verb, "--nosuch"]) for verb in VERBS]
    found += [
        Request("verb", [*verb.split(), "nosuch", "more"]) for verb in ("models", "doctor", "jobs", "export onxx")
    ]
    found += [Request("verb", ["check", f"--format{value}"]) for value in ("", "=xml", "=")]
    found += [Request("verb", ["estimate", f"--format{value}"]) for value in ("", "=xml", "=")]
    found += [Request("verb", ["estimate", f"--memory{value}"]) for value in ("", "=", "=lots", "=0", "=-1GiB")]
    found += [Request("verb", [misspelt(verb, random.Random(0)) + "q"]) for verb in VERBS]
    for verb, module in _modules():
        parser = _parser(module)
        if parser is None:
            continue
        needed = ["nosuch"] if any(not action.option_strings and action.required for action in parser._actions) else []
        for action in parser._actions:
            # The baseline of a bench names one of its runs, which are known at its end.
            uses = [] if verb == "bench" and action.dest == "baseline" else _wrong_uses(action)
            found += [Request("option of a verb", [*verb.split(), *needed, *words]) for words in uses]
    return found


def _modules() -> list[tuple[str, str]]:
    return [*((verb, target.partition(":")[0]) for verb, target in VERBS.items()), *_PARSERS.items()]


def _parser(module: str) -> argparse.ArgumentParser | None:
    """The parser of a verb; None for a verb that has none."""
    make = getattr(importlib.import_module(module), "_parser", None)
    return None if make is None else make(*(["default"] if module.startswith("ortlaunch.compare") else []))


def _wrong_uses(action: argparse.Action) -> list[list[str]]:
    name = max(action.option_strings, key=len, default="")
    if not name or isinstance(action, argparse._HelpAction):
        return []
    if action.nargs == 0:
        return [[f"{name}=5"], [f"{name}x"]]
    values: tuple[str, ...] = TEXTS.get(name, ())
    if action.choices is not None:
        values = ("nosuch", "", LONG)
    elif action.type is float:
        values = ("x", "", "nan", "inf", "-1", "1e400")
    elif callable(action.type) and getattr(action.type, "__name__", "") in ("positive", "count", "seconds", "_rank"):
        values = ("x", "", "-1", "1.5", "9" * 10_000, "nan")
    return [[name], *([f"{name}={value}"] for value in values)]
