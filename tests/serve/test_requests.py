"""What may be submitted: every key by type, bounds and role; no grammar of Hydra's is left in a word."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ortlaunch.compose.overrides import parsed, quoted
from ortlaunch.config.keys import known_keys
from ortlaunch.serve.access import Role
from ortlaunch.serve.fields import CHOICES, catalogue, fields_of, jobs_to_choose
from ortlaunch.serve.requests import judge, word_of
from ortlaunch.serve.unfit import Unfit


def refusal(keys: dict[str, Any], role: Role = Role.admin, job: str | None = None, **more: Any) -> str:
    """What is said against a request; empty if it is taken."""
    try:
        judge(job, keys, role, **more)
    except Unfit as error:
        return "; ".join(f"{one.key}: {one.message}" for one in error.problems)
    return ""


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=("Cs", "Cc")), max_size=40))
def test_a_quoted_text_is_read_as_it_was(text: str) -> None:
    override = parsed(f"name={quoted(text)}")
    assert override.value() == text
    assert not override.is_sweep_override()
    assert override.key_or_group == "name"


@pytest.mark.parametrize(
    "text", ["\\", "\\'", "a\\", "'", "''", "\\\\'x", 'b"c', "1,2", "[1]", "null", "a=b", "#", " "]
)
def test_signs_of_the_grammar_are_only_text(text: str) -> None:
    assert parsed(f"name={quoted(text)}").value() == text


@given(st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.integers(-(2**63), 2**63 - 1)))
def test_a_number_is_read_as_it_was(value: float) -> None:
    assert parsed(word_of("x", value, is_text=False)).value() == value


HOSTILE = {
    "+hydra.callbacks.x._target_": "os.system",
    "hydra.run.dir": "/etc",
    "run_root": "/etc/foo",
    "launcher.extra": "--uid=0",
    "launcher.srun_extra": "--uid=0",
    "launcher.env": "x",
    "launcher.env.LD_PRELOAD": "/tmp/x.so",
    "launcher.dry_run": False,
    "launcher.run": "20260101-000000-abcdef",
    "launcher.name": "slurm",
    "tracking.uri": "http://169.254.169.254/",
    "tracking.artifacts": "/etc",
    "trackers": "x",
    "trackers.tensorboard.folder": "/etc",
    "model.name": "x",
    "++train.steps": 3,
    "~train.steps": 3,
    "train.steps=1 run_root": "x",
    "train.steps\nrun_root": "x",
    "jobs": "gpt2_ort",
    "+jobs": "gpt2_ort",
    "model.params.x": 1,
    "model.params.x=1,run_root": "/",
    "backend@other": "ort",
    "": "x",
    "x" * 5000: 1,
}


@pytest.mark.parametrize("key", HOSTILE)
def test_no_role_sets_a_key_that_is_not_listed(key: str) -> None:
    assert "there is no such key to set here" in refusal({key: HOSTILE[key]})


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"name": "${oc.env:SECRET}"}, "must not contain ${"),
        ({"model.imports": "a\n${oc.env:SECRET}"}, "must not contain ${"),
        ({"name": "???"}, "must be given"),
        ({"name": "a\x1b[2J"}, "must not contain control characters"),
        ({"name": "a\nb"}, "must not contain control characters"),
        ({"launcher": "slurm", "launcher.partition": "--uid=0"}, "has signs that SLURM does not take here"),
        ({"launcher": "slurm", "launcher.partition": "a b"}, "has signs that SLURM does not take here"),
        ({"launcher": "slurm", "launcher.mail_user": "a --uid=0"}, "has signs that SLURM does not take here"),
        ({"name": 5}, "must be a text"),
        ({"name": ["a"]}, "must be a text"),
        ({"train.steps": "5"}, "must be a whole number"),
        ({"train.steps": 1.5}, "must be a whole number"),
        ({"train.steps": True}, "must be a whole number"),
        ({"train.steps": 0}, "must be at least 1"),
        ({"train.steps": None}, "must have a value"),
        ({"train.steps": 2**64}, "is too large"),
        ({"optimizer.lr": math.nan}, "must be a finite number"),
        ({"optimizer.lr": math.inf}, "must be a finite number"),
        ({"train.tf32": 1}, "must be true or false"),
        ({"train.precision": "fp8"}, "must be one of fp32, bf16, fp16"),
        ({"backend": "ort,eager"}, "must be one of"),
        ({"tracking": "[mlflow,none]"}, "must be one of"),
        ({"trian.steps": 5}, "did you mean train.steps?"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_beside_its_key(keys: dict[str, Any], said: str) -> None:
    assert said in refusal(keys)


@pytest.mark.parametrize(
    ("keys", "least"),
    [
        ({"train.steps": 5}, Role.runner),
        ({"model": "mlp", "backend": "eager"}, Role.runner),
        ({"launcher": "slurm", "launcher.time": "1-00:00:00", "launcher.partition": "gpu"}, Role.runner),
        ({"model": "factory", "model.target": "my.nets:build"}, Role.author),
        ({"model.target": "my.nets:build"}, Role.author),
        ({"model.imports": "my.nets"}, Role.author),
        ({"model.weights": "/home/x"}, Role.author),
        ({"train.resume": "/home/x"}, Role.author),
        ({"data": "text", "data.path": "/etc/passwd"}, Role.author),
        ({"data": "hf"}, Role.author),
        ({"launcher": "slurm", "launcher.setup": "module load cuda\nsource env"}, Role.author),
        ({"launcher": "slurm", "launcher.python": "/opt/python"}, Role.author),
        ({"launcher": "slurm", "launcher.container.runtime": "pyxis"}, Role.author),
        ({"model": "hf", "model.params.pretrained": "x/y"}, Role.author),
        ({"model": "factory", "model.params.width": 3}, Role.author),
    ],
)
def test_own_code_and_files_need_an_author(keys: dict[str, Any], least: Role) -> None:
    assert refusal(keys, least) == ""
    if least > Role.runner:
        assert "needs the role author" in refusal(keys, Role.runner)


def test_a_request_becomes_words_in_which_choices_come_first() -> None:
    found = judge("gpt2_ort", {"train.steps": 7.0, "backend": "eager", "profile": None, "name": "it's"}, Role.runner)
    assert found.words == ["+jobs=gpt2_ort", "backend=eager", "train.steps=7", "name='it\\'s'"]
    lines = judge(None, {"model.imports": "a.b\n\nc,d"}, Role.author).words
    assert lines == ["model.imports=['a.b','c,d']"]
    assert parsed(lines[0]).value() == ["a.b", "c,d"]


def test_everything_that_is_wrong_is_said_at_once() -> None:
    said = refusal({"train.steps": 0, "seed": -1, "nonsense": 1}, job="sweep_backends", minutes=-3.0)
    for part in ("job: there is no such ready job, or it is a sweep", "train.steps:", "seed:", "nonsense:", "minutes:"):
        assert part in said


def test_a_sweep_is_no_ready_job_here() -> None:
    names = [one["name"] for one in jobs_to_choose()]
    assert "gpt2_ort" in names
    assert "sweep_backends" not in names
    assert all(one["meaning"] for one in jobs_to_choose())


def test_every_key_of_the_schema_is_a_field_or_was_left_out_on_purpose() -> None:
    """A key that is new in the schema is a field of the service at once; what it may not be is decided in `fields`."""
    fields = set(catalogue())
    groups = {key for key in known_keys() if any(other.startswith(f"{key}.") for other in known_keys())}
    left_out = {key for key in known_keys() if key not in fields and key not in groups}
    names = {key for key in left_out if key.endswith(".name") and key != "name"}
    lists = {"model.params", "backend.allow", "profile.ranks", "trainer.config", "data.params", "optimizer.params"}
    lists |= {"scheduler.params", "optimizer.groups", "train.hooks", "eval.metrics"}
    # The service starts no scripts.
    lists |= {key for key in left_out if key.startswith("script.")}
    never = {"run_root", "trackers", "tracking.uri", "tracking.artifacts", "launcher.extra", "launcher.srun_extra"}
    never |= {"launcher.env", "launcher.dry_run", "launcher.run", "launcher.node_rank"}
    never |= {"launcher.master_addr", "launcher.master_port"}
    assert left_out - names - lists == never
    assert lists <= left_out


def test_fields_have_what_a_form_needs() -> None:
    chosen = {"model": "mlp", "data": "digits", "backend": "ort", "trainer": "deepspeed", "launcher": "local"}
    by_key = {one.key: one.as_dict() for one in fields_of(chosen)}
    assert by_key["train.steps"]["type"] == "integer"
    assert (by_key["train.steps"]["default"], by_key["train.steps"]["least"]) == (100, 1)
    assert by_key["train.steps"]["meaning"] == (
        "Number of optimizer steps of the run, where neither `epochs` nor `tokens` says how long it is."
    )
    assert by_key["train.precision"]["choices"] == ["fp32", "bf16", "fp16"]
    assert by_key["trainer.zero_stage"]["most"] == 3
    assert by_key["model.params.hidden_dim"]["default"] == 256
    assert "launcher.partition" not in by_key
    assert by_key["backend"]["group"] == CHOICES
    assert all(one["meaning"] for key, one in by_key.items() if not key.startswith("model.params."))
