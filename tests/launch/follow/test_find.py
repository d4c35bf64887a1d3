"""Which run is meant by a folder, an id, a name or a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.follow.find import find_run
from ortlaunch.follow.rows import Survey
from ortlaunch.run.roots import known_roots, note_root
from ortlaunch.run.sweep import create
from tests.launch.follow.conftest import Maker


def job(number: int, task: int | None = None) -> dict[str, object]:
    array = {"array_job_id": str(number), "array_task_id": task} if task is not None else {}
    return {"scheduler": "slurm", "job_id": str(number), "array_job_id": None, "array_task_id": None, **array}


def test_a_run_is_found_by_folder_id_beginning_name_and_job(make_run, tmp_path: Path) -> None:
    run_dir = make_run("a näme with spaces", run_id="abc123", job=job(77), end=None)
    make_run("other", run_id="fff000")
    for asked in (
        str(run_dir),
        f"runs/default/{run_dir.name}",
        run_dir.name,
        "abc123",
        "abc",
        "77",
        "a näme with spaces",
    ):
        assert find_run(asked).path == run_dir, asked


def test_a_run_is_found_by_the_beginning_of_mlflows_id_which_compare_shows(make_run) -> None:
    run_dir = make_run(run_id="abc123")
    make_run("other", run_id="fff000")
    (run_dir / "relay.json").write_text('{"offset": 0, "mlflow_run_id": "98c5ae50d1e2f3a4b5c6d7e8f9a0b1c2"}')
    assert find_run("98c5ae50").path == run_dir


def test_a_folder_that_was_renamed_is_a_run_too(make_run, tmp_path: Path) -> None:
    moved = make_run(run_id="abc123").rename(tmp_path / "kept")
    assert find_run("kept").path == moved
    (tmp_path / "empty").mkdir()
    with pytest.raises(RequestError, match=r"empty is no run folder"):
        find_run("empty")


def test_a_sweep_is_no_run_and_its_runs_are_one_command_away(make_run) -> None:
    sweep = create(make_run.root / "default" / "multirun-20260101-000000", "sweep-lr", "default", {}, [])
    sweep.write([make_run()], complete=True)
    for asked in (str(sweep.folder), "sweep-lr"):
        with pytest.raises(RequestError, match=f"^{asked} is a sweep: .*ortlaunch jobs --sweep {asked}"):
            find_run(asked)


def test_several_runs_are_listed_with_what_tells_them_apart(make_run) -> None:
    runs = [make_run("same") for _ in range(12)]
    with pytest.raises(RequestError, match="same means 12 runs") as caught:
        find_run("same")
    text = str(caught.value)
    assert str(runs[-1]) in text
    assert runs[-1].name.rpartition("-")[2] in text
    assert "8 older ones" in text and len(text.splitlines()) == 6
    assert str(runs[0]) not in text


def test_no_run_names_the_nearest(make_run) -> None:
    make_run("gpt2-ort-ddp")
    with pytest.raises(RequestError, match="did you mean gpt2-ort-ddp"):
        find_run("gpt2-ort-dpd")
    with pytest.raises(RequestError, match="did you mean gpt2-ort-ddp"):
        find_run("gpt2")


def test_an_arrays_task_has_a_name_and_its_array_means_all(make_run) -> None:
    tasks = [make_run("sweep", job=job(50, task), end=None) for task in range(3)]
    assert find_run("50_1").path == tasks[1]
    with pytest.raises(RequestError, match="50 means 3 runs"):
        find_run("50")


def test_an_id_of_digits_that_is_also_a_job_is_no_guess(make_run) -> None:
    make_run(run_id="123456")
    make_run(job=job(123456), end=None)
    with pytest.raises(RequestError, match="123456 means 2 runs"):
        find_run("123456")


def test_a_run_is_found_from_another_folder(make_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = make_run(run_id="abc123")
    note_root(make_run.root)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert known_roots() == [make_run.root]
    assert find_run("abc123").path == run_dir


def test_the_runs_of_this_folder_come_first(make_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, here = make_run("same"), Maker(tmp_path / "here" / "runs")("same")
    note_root(make_run.root)
    monkeypatch.chdir(tmp_path / "here")
    assert find_run("same").path == here
    here.rename(tmp_path / "moved")
    assert find_run("same").path == there


def test_roots_that_are_gone_are_forgotten(make_run, tmp_path: Path) -> None:
    make_run()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        note_root(tmp_path / name)
    (tmp_path / "one").rmdir()
    note_root(make_run.root)
    assert (tmp_path / "cache" / "run-roots").read_text().splitlines() == [str(make_run.root), str(tmp_path / "two")]


def test_a_job_is_still_found_when_its_run_is_in_the_index(make_run) -> None:
    run_dir = make_run(run_id="abc123", job=job(9))
    folder = find_run("abc123")
    survey = Survey([folder])
    survey.rows([folder])
    survey.close()
    (run_dir / "job.json").write_text("{}")  # Only the index can know now.
    assert find_run("9").path == run_dir
