"""Who sees whose runs, and what a project takes: three people, two projects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from ortlaunch.serve import projects
from ortlaunch.serve.access import Role
from ortlaunch.serve.accounts import change_user
from ortlaunch.serve.database import reading, writing
from ortlaunch.serve.queue import store
from ortlaunch.serve.queue.tables import Job, JobState
from tests.launch.follow.conftest import Maker
from tests.serve.follow.conftest import add_job
from tests.serve.queue.fake_actor import FakeActor
from tests.support.service import InProcess, in_process

IDS = {"vision": "q1", "speech": "q2", "": "q3"}
SEEN = {"anna": {*IDS}, "bob": {"vision", ""}, "cleo": {"speech", ""}, "ada": {*IDS}}


@pytest.fixture
def team(tmp_path: Path, make_run: Maker) -> Iterator[InProcess]:
    """anna is in both projects, bob in vision, cleo in speech; each project has a run, and one has none."""
    team = in_process(tmp_path / "runs")
    team.service.actor = team.service.queue.actor = FakeActor()
    admin = team.person("ada", Role.admin, "root")
    for name in ("vision", "speech"):
        projects.set_project(team.service, admin, name, 1 if name == "vision" else None)
    for name, own in {"anna": ["vision", "speech"], "bob": ["vision"], "cleo": ["speech"]}.items():
        user_id = team.person(name, Role.runner, "root").user_id
        change_user(team.service, admin, user_id, None, None, None, own)
    for project, job in IDS.items():
        run_dir = make_run(f"of-{project or 'all'}")
        add_job(team.service, int(job[1:]), run_dir, project=project, owner="bob", state="ended", started=1.0)
    team.service.runs.refresh()
    yield team
    team.service.engine.dispose()


def client(team: InProcess, name: str) -> TestClient:
    return team.client(team.token(name, Role.admin if name == "ada" else Role.runner))


@pytest.mark.parametrize("name", SEEN)
def test_runs_of_other_projects_are_unknown(team: InProcess, name: str) -> None:
    asked = client(team, name)
    page = asked.get("/api/runs").json()
    assert ({row["project"] for row in page["runs"]}, page["total"]) == (SEEN[name], len(SEEN[name]))
    facets = asked.get("/api/facets").json()
    assert (facets["projects"], sum(facets["states"].values())) == (sorted(SEEN[name] - {""}), len(SEEN[name]))
    shown = asked.get("/").text
    for project, job in IDS.items():
        is_seen = project in SEEN[name]
        paths = [f"/api/runs/{job}{path}" for path in ("", "/metrics", "/config", "/keys", "/files/config.yaml")]
        assert {asked.get(path).status_code != 404 for path in (*paths, f"/runs/{job}")} == {is_seen}, job
        assert (f"of-{project or 'all'}" in shown) == is_seen
        if not is_seen:
            acts = ("cancel", "resume", "delete", "export")
            assert {asked.post(f"/api/runs/{job}/{act}", json={}).status_code for act in acts} == {404}
            for path in (f"/api/compare?ids=q3,{job}", f"/compare?ids=q3,{job}", f"/api/events?topics=run:{job}"):
                assert asked.get(path).status_code == 404, path


def test_a_stream_of_the_list_has_the_rows_that_its_listener_sees(team: InProcess) -> None:
    streams, places = team.service.streams, sorted(team.service.runs.runs)
    for view, names in ((frozenset({"vision"}), {"of-all", "of-vision"}), (None, {"of-all", "of-vision", "of-speech"})):
        assert {row["name"] for row in streams._rows(places, view)} == names


def test_a_run_belongs_to_the_project_of_who_sends_it(team: InProcess) -> None:
    def sent(name: str, **body: str) -> tuple[int, str]:
        answer = client(team, name).post("/api/runs", json={"keys": {}, **body})
        with reading(team.service.engine) as session:
            job = session.get(Job, answer.json().get("job", ""))
            return answer.status_code, answer.text if job is None else job.project

    assert sent("bob") == (201, "vision")
    assert sent("ada") == (201, "")
    assert sent("anna", project="speech") == (201, "speech")
    for name, body, said in (
        ("anna", {}, "one of vision, speech"),
        ("bob", {"project": "speech"}, "no member of a project speech"),
    ):
        status, text = sent(name, **body)
        assert (status, said in text) == (422, True), text


def test_a_project_holds_its_slots_together_and_has_one_share(team: InProcess) -> None:
    for name in ("bob", "anna", "cleo"):
        body = {"keys": {}, **({"project": "vision"} if name == "anna" else {})}
        assert client(team, name).post("/api/runs", json=body).status_code == 201
    with writing(team.service.engine) as session:
        for job in store.in_states(session, JobState.WAITING, JobState.STARTING):
            job.state, job.taken, job.started = JobState.WAITING, [], None
        session.flush()
        store.decide(session, store.Slate(["0", "1", "2"]), {}, 1000.0, None)
        jobs = {job.owner: job for job in store.in_states(session, JobState.WAITING, JobState.STARTING)}
    assert {name: job.state for name, job in jobs.items()} == {"bob": "starting", "anna": "waiting", "cleo": "starting"}
    assert jobs["anna"].reason == "its project may hold 1 slot at a time"
    waiting = client(team, "cleo").get("/api/queue").json()["waiting"]
    assert [(one["name"], one["id"], one["owner"]) for one in waiting] == [("a run of another project", None, None)]
    assert "anna" not in client(team, "cleo").get("/queue").text
    with writing(team.service.engine) as session:
        job = session.get_one(Job, jobs["bob"].id)
        store.note_end(session, job, JobState.ENDED)
        assert set(store.shares(session, job.ended or 0.0)) == {"project vision"}


def test_projects_are_made_and_removed_by_administrators(team: InProcess) -> None:
    ada, bob = team.client(team.browser("ada", Role.admin)), team.person("bob", Role.runner).user_id
    assert ada.put("/api/projects/Not%20one", json={}).status_code == 422
    assert ada.put("/api/projects/maps", json={"slots": 2}).status_code == 204
    assert "there is no project atlas" in ada.patch(f"/api/users/{bob}", json={"projects": ["atlas"]}).text
    assert ada.patch(f"/api/users/{bob}", json={"projects": ["maps"]}).json()["projects"] == ["maps"]
    assert "its members are bob" in ada.delete("/api/projects/maps").text
    assert [one["name"] for one in client(team, "bob").get("/api/projects").json()] == ["maps"]
    assert "maps" in ada.get("/users").text
    assert client(team, "bob").get("/api/runs/q1").status_code == 404
    assert ada.patch(f"/api/users/{bob}", json={"projects": []}).status_code == 200
    assert ada.delete("/api/projects/maps").status_code == 204


def test_the_run_of_a_command_line_belongs_to_the_first_project_of_its_unix_user(
    team: InProcess, make_run: Maker
) -> None:
    make_run("alone", run_id="00aaaa")
    admin = team.person("ada", Role.admin)
    for name in ("ada", "anna", "bob"):
        change_user(team.service, admin, team.person(name, Role.runner).user_id, None, "", None)
    team.service.runs.refresh()
    assert client(team, "bob").get("/api/runs/00aaaa").status_code == 404
    assert client(team, "cleo").get("/api/runs/00aaaa").json()["row"]["project"] == "speech"
