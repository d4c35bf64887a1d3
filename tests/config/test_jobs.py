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
def test_each_is_a_run_that_the_rules_accept(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for file in ("chat.jsonl", "texts.csv"):
        (tmp_path / file).touch()
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
        assert headline(ready_jobs()[name]) in line and line.endswith(".")
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
    ("content", "said"),
    [
        (b"seed: [", "line 1: "),
        (b"seed: 1\nseed: 2\n", "line 2: found duplicate key seed"),
        (b"\xff\xfe\x00", "no UTF-8 text at byte 0"),
        (b"seed: \x00\n", "no text at character"),
        (b'name: !!python/object/apply:os.system ["touch planted"]', "line 1: could not determine a constructor"),
        (b"- a\n", "it holds no keys"),
        (b"5", "Invalid loaded object type"),
        (b"name: " + b"[" * 5000, "nested too deeply"),
    ],
)
def test_a_broken_file_is_named_in_one_line_and_stops_no_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: bytes, said: str
) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    monkeypatch.setenv("ORTLAUNCH_JOBS", str(tmp_path))
    with pytest.raises(RequestError) as caught:
        compose(["+jobs=broken"])
    assert str(caught.value).startswith(f"jobs=broken: {path} cannot be read: ") and said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert jobs(["--available"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == {"broken", *SHIPPED}


@pytest.mark.parametrize(
    ("jobs", "said"),
    [
        ({"one": "/jobs/one"}, "its defaults lead back to it (jobs/one > jobs/one)"),
        ({"one": "/jobs/two", "two": "/jobs/one"}, "its defaults lead back to it (jobs/one > jobs/two > jobs/one)"),
        ({"one": "jobs/one"}, "its defaults name jobs/jobs/one, which is not there"),
    ],
)
def test_a_file_that_names_itself_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: dict[str, str], said: str
) -> None:
    for name, other in jobs.items():
        (tmp_path / f"{name}.yaml").write_text(f"defaults: [{other}]\n")
    monkeypatch.setenv("ORTLAUNCH_JOBS", str(tmp_path))
    with pytest.raises(RequestError) as caught:
        compose(["+jobs=one"])
    assert str(caught.value).startswith(f"{tmp_path / 'one.yaml'}: {said}") and "\n" not in str(caught.value)


def test_a_file_that_cannot_be_opened_stops_no_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "gone.yaml").symlink_to("nowhere")
    monkeypatch.setenv("ORTLAUNCH_JOBS", str(tmp_path))
    assert jobs(["--available"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert set(lines) == {"folder", "gone", *SHIPPED}
    assert "cannot be read: Is a directory" in lines["folder"]
    assert "cannot be read: No such file" in lines["gone"]


@pytest.mark.parametrize(
    ("argument", "words"), [("jobs=gpt2_ort", r"\+jobs=gpt2_ort"), ("+jobs=gpt2_otr", "gpt2_ort"), ("+jobs=x", "llama")]
)
def test_a_wrong_name_is_told_the_right_ones(argument: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        compose([argument])
