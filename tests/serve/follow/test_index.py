"""The index and the list: what they show, when they change, and what they never show."""

from __future__ import annotations

import errno
import html
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from sqlalchemy.exc import OperationalError
from starlette.testclient import TestClient

from ortlaunch.follow.rows import Survey
from ortlaunch.run.journal import Journal
from ortlaunch.run.run import Run
from ortlaunch.serve.access import Role
from ortlaunch.serve.database import writing
from ortlaunch.serve.index.folders import stamp_of
from ortlaunch.serve.index.jobs import OfRun, QueueJob, shown_state
from ortlaunch.serve.index.listing import ended, shortened
from ortlaunch.serve.index.reading import Listed, read_folders
from ortlaunch.serve.queue.tables import Job
from ortlaunch.serve.service import Service
from tests.launch.follow.conftest import Maker
from tests.serve.follow.conftest import add_job
from tests.support.service import InProcess, in_process


def rows(viewer: TestClient, **filters: object) -> list[dict]:
    answer = viewer.get("/api/runs", params=filters)
    assert answer.status_code == 200, answer.text
    return answer.json()["runs"]


def test_a_row_has_what_the_folder_says(service: Service, viewer: TestClient, make_run: Maker) -> None:
    run_dir = make_run("gpt2-ort", experiment="speed", steps=200, step=120, end="FAILED")
    service.runs.refresh()
    (row,) = rows(viewer)
    assert row["id"] == f"{run_dir.name[:15]}-{run_dir.name[-6:]}"
    assert (row["name"], row["experiment"], row["state"]) == ("gpt2-ort", "speed", "failed")
    assert (row["step"], row["steps"], row["loss"], row["rate"], row["rate_unit"]) == (
        120,
        200,
        2.5,
        1234.5,
        "tokens/s",
    )
    assert (row["position"], row["job"]) == (None, None)


def test_a_run_that_goes_on_is_followed_and_its_death_is_noticed(
    service: Service, viewer: TestClient, make_run: Maker, alive: dict
) -> None:
    run_dir = make_run(step=10, end=None, launcher=alive)
    service.runs.refresh()
    assert [(row["state"], row["step"]) for row in rows(viewer)] == [("running", 10)]
    with Run(run_dir).journal() as journal:
        journal.metrics(20, {"train/loss": float("nan")})
    service.runs.refresh()
    (row,) = rows(viewer)
    assert (row["step"], row["loss"], row["diverged"]) == (20, None, True)
    with Run(run_dir).journal() as journal:
        journal.end("FINISHED")
    service.runs.refresh()
    assert rows(viewer)[0]["state"] == "finished"


def test_new_continued_and_deleted_runs_are_seen(service: Service, viewer: TestClient, make_run: Maker) -> None:
    changes = []
    service.runs.listen(changes.append)
    first = make_run(end="KILLED")
    service.runs.refresh()
    assert changes[-1].places == {str(first)}
    service.runs.refresh()
    assert not changes[-1].places
    second = make_run()
    service.runs.refresh()
    assert changes[-1].places == {str(second)}
    shutil.rmtree(second)
    service.runs.refresh()
    assert changes[-1].gone == (f"{second.name[:15]}-{second.name[-6:]}",)
    assert len(rows(viewer)) == 1


def test_a_run_that_is_over_is_not_read_again(
    service: Service, make_run: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        make_run()
    service.runs.refresh()
    read = []
    monkeypatch.setattr("ortlaunch.serve.index.indexer.read_folders", lambda places: read.extend(places) or [])
    service.runs.refresh()
    assert read == []
    again = make_run()
    service.runs.refresh()
    assert [place for place, _ in read] == [str(again)]


def test_a_service_that_starts_reads_no_run_that_is_over_again(
    service: Service, make_run: Maker, alive: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = make_run("over", end="FAILED")
    going = make_run("going", end=None, launcher=alive)
    service.runs.refresh()
    before = service.runs.run_at(str(over))
    service.runs.roots[0].save()
    read: list[str] = []

    def noting(places: list) -> list:
        read.extend(place for place, _ in places)
        return read_folders(places)

    monkeypatch.setattr("ortlaunch.serve.index.indexer.read_folders", noting)
    again = in_process(tmp_path / "runs").service
    again.runs.refresh()
    assert read == [str(going)]
    assert again.runs.run_at(str(over)) == before
    with Run(over).journal() as journal:
        journal.start("default", "over", over.name[-6:])
        journal.metrics(101, {"train/loss": 1.0})
    os.utime(over)
    assert in_process(tmp_path / "runs").service.runs.refresh() is None
    assert read.count(str(over)) == 1


def test_a_look_that_finds_nothing_new_costs_nothing_for_runs_that_are_over(
    service: Service, make_run: Maker, alive: dict
) -> None:
    asked: list[str] = []

    class Noting(dict):
        def get(self, place: str, default: object = None) -> object:
            asked.append(place)
            return super().get(place, default)

        def __iter__(self) -> Iterator[str]:
            asked.append("all")
            return super().__iter__()

    for _ in range(20):
        made = make_run()
    going = make_run(end=None, launcher=alive)
    os.utime(made.parent, (1, 1))  # Folders that have just changed are looked at again.
    os.utime(made.parents[1], (1, 1))
    for _ in range(2):
        service.runs.refresh()
    (index,) = service.runs.roots
    index.runs = Noting(index.runs)
    service.runs.refresh()
    assert set(asked) == {str(going)}


def test_runs_of_a_root_that_cannot_be_read_stay_in_the_list(
    service: Service, viewer: TestClient, make_run: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a file server that is away for a while."""
    run_dir = make_run()
    service.runs.refresh()
    list_folder = os.scandir

    def away(place: str) -> object:
        if place == str(run_dir.parents[1]):
            raise OSError(errno.ESTALE, "Stale file handle")
        return list_folder(place)

    with monkeypatch.context() as patch:
        patch.setattr("ortlaunch.serve.index.folders.os.scandir", away)
        with pytest.raises(OSError, match="Stale"):
            service.runs.refresh()
        assert len(rows(viewer)) == 1
    service.runs.refresh()
    assert len(rows(viewer)) == 1


@pytest.mark.parametrize("path", ["/api/runs", "/"])
@pytest.mark.parametrize("place", ["access.reading", "follow.page_of"])
def test_a_database_that_cannot_be_used_now_is_an_answer(
    viewer: TestClient, path: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OperationalError("SELECT secret", (), Exception("database or disk is full"))

    monkeypatch.setattr(f"ortlaunch.serve.{place}", full)
    answer = viewer.get(path, headers={"Accept": "text/html"})
    assert answer.status_code == 503
    assert "he service cannot use its database now: database or disk is full" in answer.text
    assert "SELECT" not in answer.text


def test_filters_sorting_and_pages(service: Service, viewer: TestClient, make_run: Maker) -> None:
    for number in range(7):
        make_run(
            f"run-{number}",
            experiment="odd" if number % 2 else "even",
            step=number,
            end="FAILED" if number == 3 else "FINISHED",
        )
    service.runs.refresh()
    assert [row["name"] for row in rows(viewer, size=3)] == ["run-6", "run-5", "run-4"]
    answer = viewer.get("/api/runs", params={"size": 3, "page": 3}).json()
    assert ([row["name"] for row in answer["runs"]], answer["total"], answer["pages"]) == (["run-0"], 7, 3)
    assert [row["name"] for row in rows(viewer, experiment="odd", sort="step")] == ["run-1", "run-3", "run-5"]
    assert [row["name"] for row in rows(viewer, state="failed,killed")] == ["run-3"]
    assert [row["name"] for row in rows(viewer, text="UN-5")] == ["run-5"]
    assert rows(viewer, text="%") == []
    assert viewer.get("/api/runs", params={"sort": "place; drop table runs"}).status_code == 422
    facets = viewer.get("/api/facets").json()
    assert (facets["states"], facets["experiments"]) == ({"failed": 1, "finished": 6}, ["even", "odd"])


def test_parameters_and_metrics_are_columns_and_conditions(
    service: Service, viewer: TestClient, make_run: Maker
) -> None:
    for number, rate in enumerate(("0.001", "0.01", "0.1")):
        run_dir = make_run(f"run-{number}", end=None)
        words = ["model=gpt2", f"optimizer.lr={rate}", "run_root='/srv'", "--", "train.py", "--bits", str(number)]
        Run(run_dir).overrides_file.write_text(yaml.safe_dump(words))
        with Run(run_dir).journal() as journal:
            journal.metrics(100, {"eval/loss": 3.0 - number, "memory/peak": 1.0, "bleu": float("nan")})
            journal.end("FINISHED")
    make_run("without")
    service.runs.refresh()
    columns = ["optimizer.lr", "args.bits", "eval/loss", "nothing"]
    (first, *_) = rows(viewer, columns=columns, text="run-0")
    assert first["columns"] == {"optimizer.lr": "0.001", "args.bits": "0", "eval/loss": 3.0, "nothing": None}
    assert viewer.get("/api/facets").json()["columns"] == [
        *("step", "loss", "rate", "train/loss", "model", "optimizer.lr", "args.bits", "eval/loss"),
    ]
    for where, names in (
        ("optimizer.lr<0.05", ["run-1", "run-0"]),
        ("optimizer.lr>=1e-2, eval/loss<2", ["run-2"]),
        ("model=gpt2, args.bits!=1", ["run-2", "run-0"]),
        ("loss>2", ["without", "run-2", "run-1", "run-0"]),
        ("model>a", []),
    ):
        assert [row["name"] for row in rows(viewer, where=where)] == names, where
    refused = viewer.get("/api/runs", params={"where": "eval/loss is low"})
    assert (refused.status_code, refused.json()["problems"][0]["key"]) == (422, "where")
    page = viewer.get("/", params={"where": "x", "columns": ["eval/loss"]})
    assert (page.status_code, "a condition is NAME" in page.text) == (200, True)
    shown = viewer.get("/", params={"columns": ["eval/loss"]}).text
    assert '<th scope="col" class="number">eval/loss</th>' in shown
    assert viewer.get("/api/runs", params={"stat": "failed"}).status_code == 422, "an unknown filter"


def test_a_run_is_renamed_tagged_and_noted_by_its_owner(
    served: InProcess, service: Service, viewer: TestClient, make_run: Maker
) -> None:
    run_dir = make_run("plain")
    add_job(service, 1, run_dir, owner="rob", state="ended", started=1.0)
    service.runs.refresh()
    body = {"title": "best <b>so far</b>", "tags": ["paper", " paper", ""], "note": "with twice the data"}
    rob, otto = (served.client(served.token(name, Role.runner)) for name in ("rob", "otto"))
    assert otto.put("/api/runs/q1/note", json=body).status_code == 403
    assert rob.put("/api/runs/q1/note", json=body).status_code == 204
    (row,) = rows(viewer, text="TWICE")
    assert (row["name"], row["tags"], row["note"]) == ("best <b>so far</b>", ["paper"], "with twice the data")
    assert len(rows(viewer, text="paper")) == 1
    assert "best &lt;b&gt;so far&lt;/b&gt;" in viewer.get("/").text
    assert rob.put("/api/runs/q1/note", json={}).status_code == 204
    assert rows(viewer)[0]["name"] == "plain"


def test_the_page_of_a_sweep_has_its_axes_and_results(
    service: Service, viewer: TestClient, make_run: Maker, tmp_path: Path
) -> None:
    for number in range(3):
        place = make_run() if number else tmp_path / "runs/e/20300101-000000-third-0000ab"
        request = {"keys": {"seed": 7, "optimizer.lr": 10.0**-number}}
        facts = {"state": "ended", "started": 1.0} if number else {"state": "waiting"}
        add_job(service, number + 1, place, request=request, sweep="abcdef", **facts)
    make_run("another")
    service.runs.refresh()
    page = viewer.get("/sweeps/abcdef").text
    assert "Sweep of 3 runs over optimizer.lr</h1>" in page
    assert "another" not in page
    swept = json.loads(html.unescape(re.search(r'data-swept="([^"]*)"', page)[1]))
    assert (swept["axes"], swept["results"]) == (["optimizer.lr"], ["loss"])
    assert {(run["loss"], run["optimizer.lr"]) for run in swept["runs"]} == {(None, "1.0"), (2.5, "0.1"), (2.5, "0.01")}
    assert viewer.get("/sweeps/abcde0").status_code == 404


def test_jobs_of_the_queue_are_rows(service: Service, viewer: TestClient, make_run: Maker, tmp_path: Path) -> None:
    begun = make_run(end="KILLED")
    add_job(service, 1, begun, state="ended", started=1.0)
    add_job(service, 2, tmp_path / "runs/e/20300101-000000-second-0000aa", reason="waits for 2 slots")
    add_job(service, 3, tmp_path / "runs/e/20300101-000001-third-0000ab", priority=5)
    add_job(service, 4, tmp_path / "runs/e/20300101-000002-gone-0000ac", state="ended", started=1.0)
    service.runs.refresh()
    service.queue.positions = lambda: {"q3": 1, "q2": 2, "q5": 3}
    shown = {row["id"]: row for row in rows(viewer)}
    assert sorted(row["state"] for row in shown.values()) == ["killed", "waiting", "waiting"]
    assert shown["20300101-000000-0000aa"]["reason"] == "waits for 2 slots"
    assert (shown["20300101-000000-0000aa"]["position"], shown["20300101-000001-0000ab"]["position"]) == (2, 1)
    (run,) = rows(viewer, state="killed")
    assert (run["owner"], run["job"]) == ("olga", "q1")
    # The same run waits to go on: one row, with the run's figures.
    add_job(service, 5, begun, resumes=True, run_id=begun.name[-6:])
    (again,) = rows(viewer, text=run["id"])
    assert (again["state"], again["job"], again["step"], again["position"]) == ("waiting", "q5", 100, 3)
    assert viewer.get("/api/runs/q5").json()["row"]["id"] == run["id"]
    assert viewer.get("/api/runs/20300101-000000-0000aa").json()["row"]["job"] == "q2"
    assert viewer.get("/api/runs/q2/config").status_code == 404


def test_a_run_that_loads_to_go_on_is_starting_until_it_journals(
    service: Service, viewer: TestClient, make_run: Maker, alive: dict
) -> None:
    run_dir = make_run("stopped", end="KILLED")
    facts = {"state": "running", "resumes": True, "begun_before": 1, "pid": os.getpid()}
    add_job(service, 1, run_dir, **facts, started=time.time() + 60)
    service.runs.refresh()
    (row,) = rows(viewer)
    assert (row["state"], row["job"], row["step"]) == ("starting", "q1", 100)
    with writing(service.engine) as session:
        session.get_one(Job, "q1").started = 1.0
    (row,) = rows(viewer)
    assert row["state"] == "killed", "the record is about this start"


def test_a_run_that_was_lost_with_its_machine_ends_as_the_queue_has_found_out(
    service: Service, viewer: TestClient, make_run: Maker
) -> None:
    elsewhere = {"pid": 1, "host": "another-host", "start_ticks": 1}
    lost, continued = (make_run(name, end=None, launcher=elsewhere) for name in ("lost", "continued"))
    for run_dir in (lost, continued):
        os.utime(run_dir / "journal.jsonl", (1e9, 1e9))
    service.runs.refresh()
    assert [row["state"] for row in rows(viewer)] == ["unknown", "unknown"]
    facts = {"state": "ended", "outcome": "killed", "reason": "no sign of life", "started": 1.0}
    add_job(service, 1, lost, **facts, ended=time.time() + 1)
    # From a command line this one went on after its job had ended.
    add_job(service, 2, continued, **facts, ended=2.0)
    service.runs.roots[0]._read_at.clear()
    service.runs.refresh()
    found = {row["name"]: (row["state"], row["reason"]) for row in rows(viewer)}
    assert found["lost"] == ("killed", "no sign of life")
    assert found["continued"][0] == "unknown"
    assert [run["name"] for run in ended(service, 1.0)] == ["lost"]


def test_hostile_names_are_texts_and_a_page_stays_small(service: Service, viewer: TestClient, make_run: Maker) -> None:
    for _ in range(100):
        run_dir = make_run(step=None, end=None)
        with Journal(run_dir / "journal.jsonl") as journal:
            journal.start('"\\<script>' * 200, "\x1b[31mred‮" + "é" * 5000, "000000")
            journal.failure(0, "host", '"' * 9000)
            journal.end("FAILED")
    service.runs.refresh()
    answer = viewer.get("/api/runs", params={"size": 100})
    assert len(answer.json()["runs"]) == 100
    assert len(answer.content) < 100_000
    assert "\x1b" not in answer.json()["runs"][0]["name"]


def test_links_are_no_runs(service: Service, viewer: TestClient, make_run: Maker, tmp_path: Path) -> None:
    run_dir = make_run()
    moved = tmp_path / run_dir.name
    run_dir.rename(moved)
    run_dir.symlink_to(moved)
    service.runs.refresh()
    assert rows(viewer) == []


def test_runs_in_the_folder_of_a_user_are_found(service: Service, viewer: TestClient, tmp_path: Path) -> None:
    user = Path("/proc/self").owner()
    Maker(tmp_path / "runs" / user)("of-a-user")
    Maker(tmp_path / "runs" / "nobody-here")("of-a-stranger")
    service.runs.refresh()
    assert [row["name"] for row in rows(viewer)] == ["of-a-user"]


def test_a_run_whose_folder_was_deleted_by_hand_says_so(service: Service, viewer: TestClient, tmp_path: Path) -> None:
    place = tmp_path / "runs" / "e" / "20260101-000000-n-aaaaaa"
    add_job(service, 1, place, state="ended", outcome="killed")
    for asked in ("q1", "20260101-000000-aaaaaa"):
        answer = viewer.get(f"/api/runs/{asked}")
        assert (answer.status_code, "the run folder is gone" in answer.text) == (404, True)
    assert rows(viewer) == []


def test_a_damaged_folder_is_a_row_and_breaks_nothing(service: Service, viewer: TestClient, make_run: Maker) -> None:
    damaged, fifo = make_run("damaged"), make_run("fifo")
    (damaged / "config.yaml").write_bytes(b"\xff\xfe[[[")
    (damaged / "launcher.json").write_text("[]")
    (fifo / "journal.jsonl").unlink()
    os.mkfifo(fifo / "journal.jsonl")
    make_run("sound")
    service.runs.refresh()
    assert {row["name"] for row in rows(viewer)} == {"damaged", "fifo", "sound"}
    detail = viewer.get(f"/api/runs/{damaged.name[-6:]}").json()
    assert any("config.yaml" in problem for problem in detail["problems"])


def test_strange_times_and_names_keep_no_other_run_out(service: Service, viewer: TestClient, make_run: Maker) -> None:
    late, unnamed = make_run("late"), make_run("unnamed")
    at = 2**63 + 10**15
    os.utime(late, ns=(at, at))
    if late.stat().st_mtime_ns != at:
        pytest.skip("this file system has no such times")
    unnamed.rename(os.fsdecode(os.fsencode(unnamed).replace(b"unnamed", b"unn\xffmed")))
    make_run("sound")
    service.runs.refresh()
    assert {row["name"] for row in rows(viewer)} == {"late", "sound"}
    changes = []
    service.runs.listen(changes.append)
    service.runs.refresh()
    assert not changes[-1].places


def test_a_stamp_fits_into_the_database(tmp_path: Path) -> None:
    fields = list(tmp_path.stat())
    for seconds, expected in ((2**40, 2**62), (-(2**40), -(2**62)), (7, 7 * 10**9)):
        fields[8] = seconds
        stat = os.stat_result(fields, {"st_mtime_ns": seconds * 10**9})
        assert stamp_of(stat).changed == expected


def test_a_folder_that_cannot_be_taken_keeps_no_other_out_and_is_told_once(
    service: Service,
    viewer: TestClient,
    make_run: Maker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad, _ = make_run("bad"), make_run("sound")

    def read(places: list) -> list:
        if any(place == str(bad) for place, _ in places):
            raise ValueError("a broken folder")
        return read_folders(places)

    monkeypatch.setattr("ortlaunch.serve.index.indexer.read_folders", read)
    for _ in range(3):
        service.runs.refresh()
    assert [row["name"] for row in rows(viewer)] == ["sound"]
    assert caplog.text.count("is not taken into the list") == 1
    monkeypatch.setattr("ortlaunch.serve.index.indexer.read_folders", read_folders)
    os.utime(bad)
    service.runs.refresh()
    assert {row["name"] for row in rows(viewer)} == {"bad", "sound"}


def test_an_id_that_two_runs_have_is_refused(service: Service, viewer: TestClient, make_run: Maker) -> None:
    make_run(run_id="abcdef")
    make_run(run_id="abcdef")
    service.runs.refresh()
    assert viewer.get("/api/runs/abcdef").status_code == 409
    keys = [row["id"] for row in rows(viewer)]
    assert [viewer.get(f"/api/runs/{key}").status_code for key in keys] == [200, 200]
    for unknown in ("123456", "../../etc", "q999", "20200101-000000-000000", "%00"):
        assert viewer.get(f"/api/runs/{unknown}").status_code == 404


def test_schedulers_are_asked_once_for_each_owner(
    service: Service, make_run: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}:/usr/bin:/bin")
    job = {"scheduler": "slurm", "job_id": "12", "submitted": 1.0}
    runs = [make_run(job=job, end=None) for _ in range(4)]
    if os.geteuid() == 0:
        os.chown(runs[0], 1, -1)
    # On a busy machine, an answer may grow old between two looks.
    monkeypatch.setattr(Survey.__init__, "__defaults__", (600.0,))
    for _ in range(3):
        service.runs.refresh()
        service.runs.roots[0]._read_at.clear()
    users = sorted(
        word for line in (tmp_path / "asked").read_text().splitlines() for word in line.split() if "--user" in word
    )
    assert users == sorted({f"--user={run_dir.owner()}" for run_dir in runs})


def test_texts_are_cut_by_their_bytes() -> None:
    assert shortened("short", 160) == "short"
    for text in ("a" * 500, '"' * 500, "é" * 500, "\U0001f600" * 500):
        cut = shortened(text, 160)
        assert cut.endswith("…")
        assert len(json.dumps(cut, ensure_ascii=False).encode()) - 2 <= 163


class Pauses(threading.Event):
    """Says when to stop; a thread that waits for it goes on at once, until it has waited so often."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.seen: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.seen.append(round(timeout, 3))
        if len(self.seen) == self.most:
            self.set()
        return self.is_set()


def test_a_slow_pass_stops_the_index_for_ten_seconds_at_most(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    # The clocks before and after each pass. The second waits 40 s for a scheduler, the fourth computes for a minute.
    worked = iter([0.0, 5.0, 5.0, 5.05, 5.05, 5.35, 5.35, 65.35])
    passed = iter([0.0, 5.0, 5.0, 45.0, 45.0, 45.3, 45.3, 105.3])
    index, pauses = service.runs.roots[0], Pauses(4)
    monkeypatch.setattr(index, "_stopping", pauses)

    def look() -> None:
        index.passes += 1

    monkeypatch.setattr(index, "refresh", look)
    clocks = SimpleNamespace(thread_time=lambda: next(worked), monotonic=lambda: next(passed))
    monkeypatch.setattr("ortlaunch.serve.index.indexer.time", clocks)
    index._work()
    assert pauses.seen == [1.0, 1.0, 3.0, 10.0]


JOB = {"state": "running", "started": 50.0}
STOPPED = {"state": "stopped", "is_over": True, "has_end": True}


@pytest.mark.parametrize(
    ("run", "job", "shown"),
    [
        (None, {"state": "waiting", "reason": "waits for 2 slots"}, ("waiting", "waits for 2 slots")),
        (None, JOB, ("starting", "")),
        (None, {"state": "ended", "started": 1.0}, None),
        (None, {"state": "refused", "reason": "no"}, ("refused", "no")),
        # The folder is there before the launcher's record: nothing flickers between starting and running.
        ({"state": "unknown", "reason": "never began", "is_over": True}, JOB, ("starting", "")),
        ({"state": "running", "reason": "starting"}, JOB, ("running", "starting")),
        ({"state": "running", "step": 5}, JOB, ("running", "")),
        # Ranks take the word to stop away before the run's end is journalled.
        ({"state": "running", "step": 5}, {**JOB, "stop_asked": 90.0}, ("stopping", "")),
        (STOPPED, {**JOB, "stop_asked": 90.0}, ("stopped", "")),
        # SLURM may hide a job from all but its user, whose child says nothing of an end.
        ({"state": "killed", "reason": "SLURM no longer knows job 7", "is_over": True}, JOB, ("starting", "")),
        ({"state": "killed", "is_over": True, "step": 5}, JOB, ("running", "")),
        ({"state": "killed", "is_over": True, "has_end": True, "step": 5}, JOB, ("killed", "")),
        # It goes on, and its folder is still about the time before.
        (
            STOPPED,
            {**JOB, "resumes": True, "started": 200.0},
            ("starting", ""),
        ),
        (
            STOPPED,
            {"state": "waiting", "resumes": True},
            ("waiting", ""),
        ),
        (
            {**STOPPED, "reason": "at step 5"},
            {"state": "ended", "started": 50.0, "ended": 101.0, "outcome": "stopped", "reason": "more than 2 hours"},
            ("stopped", "more than 2 hours"),
        ),
        # The queue has found out what the folder cannot say.
        (
            {"state": "unknown", "reason": "no sign of life"},
            {"state": "ended", "started": 50.0, "ended": 101.0, "outcome": "killed", "reason": "gone"},
            ("killed", "gone"),
        ),
        ({"state": "unknown"}, {"state": "ended", "started": 5.0, "ended": 99.0, "outcome": "killed"}, ("unknown", "")),
        ({"state": "finished", "has_end": True}, {"state": "cancelled"}, ("finished", "")),
        ({"state": "finished", "has_end": True}, None, ("finished", "")),
    ],
)
def test_the_state_that_is_shown(run: dict | None, job: dict | None, shown: tuple[str, str] | None) -> None:
    names = {"place": "/a", "key": "k", "run_id": "r", "name": "n", "experiment": "e", "started": 1.0, "updated": 100.0}
    of_run = Listed(**{**names, "reason": "", **run}) if run is not None else None
    facts = dict.fromkeys(QueueJob._fields) | {"number": 1, "id": "q1", "reason": "", "outcome": "", "resumes": False}
    queued = QueueJob(**{**facts, **job}) if job is not None else None
    begun = queued if queued is not None and queued.started is not None else None
    jobs = OfRun(queued, begun) if queued is not None else None
    assert shown_state(of_run, jobs) == shown


def test_no_change_is_lost_while_the_database_cannot_be_asked(
    service: Service, make_run: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = service.streams._changes
    with monkeypatch.context() as patch:

        def locked() -> None:
            raise OperationalError("", (), Exception("locked"))

        patch.setattr(service.runs.jobs, "now", locked)
        run_dir = make_run()
        service.runs.refresh()
    number, change = changes.after(0)
    assert change.places == {str(run_dir)}
    add_job(service, 1, "/nowhere/e/20260101-000000-n-aaaaaa")
    service.runs.refresh()
    assert changes.after(number)[1].places == {"/nowhere/e/20260101-000000-n-aaaaaa"}
