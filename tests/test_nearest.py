"""The guess behind every "Did you mean …?": the same for verbs, options, keys, parameters and runs."""

from __future__ import annotations

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.base.nearest import nearest
from ortlaunch.base.targets import refuse_unknown
from ortlaunch.cli import dispatch
from ortlaunch.compose.hydra_tree import compose


@pytest.mark.parametrize(
    ("name", "names", "meant"),
    [
        ("dpd", ["ddp", "fsdp"], "ddp"),
        ("fro", ["frog", "for"], "for"),
        ("eagr", ["auto", "compile", "eager", "ort"], "eager"),
        ("gpt2", ["gpt2-ort-deepspeed-z1", "gpt2-ort-ddp"], "gpt2-ort-ddp"),
        ("gp", ["gpt2-ort-ddp"], None),
        ("compile", ["compare", "estimate"], None),
        ("", ["export"], None),
    ],
)
def test_a_swap_comes_first_then_the_spelling_then_the_beginning(
    name: str, names: list[str], meant: str | None
) -> None:
    assert nearest(name, names) == meant


def test_every_refusal_guesses_alike() -> None:
    for refused, right in (
        (lambda: dispatch(["bnech"]), "ortlaunch bench"),
        (lambda: compose(["trainer=dpd"]), "trainer=ddp"),
        (lambda: compose(["+train.log_evry=3"]), "train.log_every"),
        (lambda: refuse_unknown(["dpd"], ["ddp", "fsdp"], "a model", "model.params"), "model.params.ddp"),
    ):
        with pytest.raises(RequestError) as caught:
            refused()
        assert f"id you mean {right}?" in str(caught.value)


def test_no_refusal_guesses_another_word() -> None:
    for refused in (
        lambda: dispatch(["compile"]),
        lambda: compose(["data=textile"]),
        lambda: refuse_unknown(["compile"], ["compare"], "a model", "model.params"),
    ):
        with pytest.raises(RequestError) as caught:
            refused()
        assert "id you mean" not in str(caught.value)
