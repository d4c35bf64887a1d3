"""A key of SLURM is stated once: with its option of sbatch, in the dataclass."""

from __future__ import annotations

import dataclasses
import random
import string

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.compose.rules import check
from ortlaunch.config import effects
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import GROUPS, Config, GpuRequest, SlurmConfig, launcher_key
from ortlaunch.launch.slurm.request import JobRequest
from ortlaunch.launch.slurm.submit import submission_environment
from tests.launch.slurm.test_request import PLAIN


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> str:
    """A further key, whose name nobody can have written down anywhere."""
    key = "".join(random.choices(string.ascii_lowercase, k=12))
    facts = {"sbatch": f"--{key}", "variable": f"SBATCH_{key.upper()}", "same_work": True}
    further = dataclasses.make_dataclass(
        "SlurmConfig", [(key, "str | None", launcher_key(None, **facts))], bases=(SlurmConfig,)
    )
    monkeypatch.setitem(GROUPS["launcher"], "slurm", further)
    effects._of_launchers.cache_clear()
    monkeypatch.setattr("tests.launch.slurm.test_key.SLURM", further, raising=False)
    return key


SLURM: type[SlurmConfig] = SlurmConfig


def with_key(**values: object) -> Config:
    made = to_config(compose(["launcher=slurm"]))
    return dataclasses.replace(made, launcher=SLURM(**values))  # type: ignore[arg-type]


def script(cfg: SlurmConfig) -> str:
    request: JobRequest = dataclasses.replace(PLAIN, resources=cfg, gpu_request=GpuRequest.gres)
    return request.script()


def test_it_becomes_a_directive(drawn: str) -> None:
    assert f"#SBATCH --{drawn}=" not in script(SLURM())
    assert f'#SBATCH --{drawn}="of its own"\n' in script(SLURM(**{drawn: "of its own"}))  # type: ignore[arg-type]


def test_it_must_be_one_line(drawn: str) -> None:
    check(with_key(**{drawn: "x"}))
    with pytest.raises(RequestError, match=rf"launcher\.{drawn}='x\\n': must be one line"):
        check(with_key(**{drawn: "x\n"}))


def test_it_comes_before_a_persons_default(drawn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = f"SBATCH_{drawn.upper()}"
    monkeypatch.setenv(variable, "theirs")
    assert submission_environment(with_key()).get(variable) == "theirs"
    assert variable not in submission_environment(with_key(**{drawn: "mine"}))


def test_runs_that_differ_in_it_may_be_repeats(drawn: str) -> None:
    assert effects.same_work(f"launcher.{drawn}")
    assert not effects.same_work(f"launcher.{drawn}x")
    assert effects.same_work("launcher.time")
    assert not effects.same_work("launcher.nodes")
    effects._of_launchers.cache_clear()
