"""Ready jobs: each composes, says what it is, and is found by name; a user's own come first."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.compose.rules import check
from ortlaunch.config.load import to_config
from ortlaunch.config.paths import headline, ready_jobs
from ortlaunch.follow.jobs import jobs

SHIPPED = sorted(path.stem for path in (Path(__file__).parents[2] / "jobs").glob("*.yaml"))


@pytest.fixture(autouse=True)
def no_jobs_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have jobs of their own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def test_all_that_lie_in_the_folder_are_known() -> None:
    assert len(SHIPPED) >= 10
    assert sorted(ready_jobs()) == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_each_is_a_run_that_the_rules_accept(name: str) -> None:
    config = to_config(compose([f"+jobs={name}", "device=cpu"]))
    check(config)
    assert config.experiment != "default", "its runs would be compared with everything else"


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_given_beside_it_wins(name: str) -> None:
    config = to_config(compose([f"+jobs={name}", "train.steps=7", "experiment=mine", "optimizer=adafactor"]))
    assert (config.train.steps, config.experiment, config.optimizer.name) == (7, "mine", "adafactor")


def test_a_name_says_what_the_job_is() -> None:
    for name in SHIPPED:
        config = to_config(compose([f"+jobs={name}"]))
        for backend in ("ort", "eager", "compile"):
            assert backend not in name.split("_") or config.backend.name == backend, name
        for stage in range(4):
            assert f"zero{stage}" not in name or getattr(config.trainer, "zero_stage", None) == stage
    assert to_config(compose(["+jobs=gpt2_slurm"])).launcher.nodes == 2


def test_each_is_listed_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert jobs(["--available"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == SHIPPED
    for line, name in zip(lines, SHIPPED, strict=True):
        assert headline(ready_jobs()[name]) in line
        assert len(line.split()) > 5


def test_a_users_own_comes_before_ours_and_a_broken_one_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text("# Mine.\ndefaults: [override /model: mlp, _self_]\nseed: 5\n")
    (tmp_path / "gpt2_ort.yaml").write_text("# Ours, otherwise.\nseed: 6\n")
    (tmp_path / "broken.yaml").write_text("seed: [")
    monkeypatch.setenv("ORTLAUNCH_JOBS", str(tmp_path))
    config = to_config(compose(["+jobs=mine"]))
    assert (config.model.name, config.data.name, config.seed) == ("mlp", "digits", 5)
    assert to_config(compose(["+jobs=gpt2_ort"])).seed == 6
    with pytest.raises(RequestError, match=r"broken\.yaml"):
        compose(["+jobs=broken"])


@pytest.mark.parametrize(
    ("argument", "words"), [("jobs=gpt2_ort", r"\+jobs=gpt2_ort"), ("+jobs=gpt2_otr", "gpt2_ort"), ("+jobs=x", "llama")]
)
def test_a_wrong_name_is_told_the_right_ones(argument: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        compose([argument])
