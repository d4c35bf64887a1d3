"""The bounds of numeric keys: every such key of the schema has them, and they are checked before a run."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.compose.rules import check
from ortlaunch.config import schema
from ortlaunch.config.bounds import LARGEST, Bounds, bounds_of, check_numbers
from ortlaunch.config.load import to_config
from ortlaunch.tracking import trackers


def nodes() -> dict[str, type[Any]]:
    """Every dataclass of the schema, with what stands before its keys."""
    found: dict[str, type[Any]] = {"": schema.Config, "train.": schema.TrainConfig, "model.": schema.ModelConfig}
    for group, options in schema.GROUPS.items():
        found |= {f"{group}={name}: {group}.": node for name, node in options.items()}
    names = trackers.built_in_besides_mlflow()
    return found | {f"trackers.{name}.": trackers.schema(name) for name in names}


def numeric_keys() -> dict[str, tuple[type[Any], str, type[Any]]]:
    """Every numeric field of the schema: its class, its name, and int or float."""
    found = {}
    for prefix, node in nodes().items():
        hints = typing.get_type_hints(node)
        for field in dataclasses.fields(node):
            for kind in _parts(hints[field.name]) & {int, float}:
                found[f"{prefix}{field.name}"] = (node, field.name, kind)
            inner = hints[field.name]
            if dataclasses.is_dataclass(inner) and not any(issubclass(one, inner) for one in nodes().values()):
                assert not any(_parts(hint) & {int, float} for hint in typing.get_type_hints(inner).values()), (
                    f"{inner} is not searched"
                )
    return found


def _parts(hint: Any) -> set[Any]:
    """The plain types in a type hint, such as int in ``list[int] | None``."""
    if typing.get_origin(hint) in (list, types.UnionType, typing.Union):
        return {part for inner in typing.get_args(hint) for part in _parts(inner)}
    return {hint}


KEYS = numeric_keys()


def test_the_search_finds_the_keys() -> None:
    assert len(KEYS) > 60
    assert {"seed", "train.clip_grad_norm", "profile=torch: profile.ranks", "optimizer=sgd: optimizer.lr"} <= set(KEYS)


@pytest.mark.parametrize("key", KEYS)
def test_every_numeric_key_has_bounds_in_the_schema_and_takes_its_default(key: str) -> None:
    node, name, _ = KEYS[key]
    bounds = bounds_of(node, name)
    assert bounds is not None and str(bounds), f"declare {key} by number(...), see ortlaunch/config/bounds.py"
    check_numbers(node())


@pytest.mark.parametrize("key", KEYS)
def test_what_is_out_of_bounds_is_refused_by_its_key(key: str) -> None:
    node, name, kind = KEYS[key]
    bounds = bounds_of(node, name)
    assert bounds is not None
    for value in refused(bounds, kind):
        given = [value] if isinstance(getattr(node(), name), list) else value
        with pytest.raises(RequestError) as caught:
            check_numbers(dataclasses.replace(node(), **{name: given}), "node.")
        assert str(caught.value).startswith(f"node.{name}={value}: must be ")


def refused(bounds: Bounds, kind: type[Any]) -> list[float]:
    """Numbers that a key of these bounds does not take."""
    lower = [] if bounds.least is None else [kind(bounds.least) - 1]
    lower += [kind(bounds.above)] if bounds.above is not None else []
    upper = [] if bounds.most is None else [kind(bounds.most) + 1]
    upper += [kind(bounds.below)] if bounds.below is not None else []
    return [*lower, *upper, *([math.nan, math.inf, -math.inf] if kind is float else [LARGEST + 1, -LARGEST - 1])]


@pytest.mark.parametrize(
    "words",
    [
        ["optimizer.lr=nan"],
        ["optimizer.weight_decay=-0.1"],
        ["optimizer.beta2=inf"],
        ["scheduler=cosine", "scheduler.min_ratio=-0.5"],
        ["train.clip_grad_norm=inf"],
        ["trainer.bucket_cap_mb=0"],
        ["+profile=torch", "profile.ranks=[-1]"],
        ["model.params.resid_pdrop=nan"],
        ["trainer=deepspeed", "+trainer.config.zero_optimization.factor=inf"],
        ["tracking=[mlflow,tensorboard]", "launcher.timeout_seconds=-1"],
    ],
)
def test_they_are_checked_before_a_run(words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        check(to_config(compose(["device=cpu", *words])))
    key, _, value = words[-1].strip("+").partition("=")
    assert str(caught.value).startswith(f"{key}={value.strip('[]')}: must be ")


def test_a_number_that_python_cannot_print_is_refused_too() -> None:
    with pytest.raises(RequestError, match=r"^seed=2\^40001: must be a number of at most 19 digits, at least 0$"):
        check_numbers(schema.Config(seed=2**40000))


@pytest.mark.parametrize(
    ("ranks", "said"), [("[99]", "no rank 99"), ("[0,2]", "no rank 2"), ("[]", "no worker is profiled")]
)
def test_a_profile_of_workers_that_are_not_there_is_refused(ranks: str, said: str) -> None:
    words = ["device=cpu", "+profile=torch", f"profile.ranks={ranks}", "launcher.workers_per_node=2"]
    with pytest.raises(RequestError, match=said):
        check(to_config(compose(words)))
