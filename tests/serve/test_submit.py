"""The routes that submit, stop, resume and delete runs, and those of the queue. No children: see `FakeActor`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from ortlaunch.base.secrets import CARRIER, whole_words
from ortlaunch.serve import accounts, submitting, tokens
from ortlaunch.serve.access import Role
from ortlaunch.serve.audit import entries
from ortlaunch.serve.database import reading, writing
from ortlaunch.serve.index.reading import Listed
from ortlaunch.serve.kept import keep, kept
from ortlaunch.serve.queue import store
from ortlaunch.serve.queue.tables import Job, JobState
from ortlaunch.serve.requests import MOST_SWEPT, judge
from tests.serve.queue.fake_actor import FakeActor
from tests.support.service import InProcess, in_process
from tests.support.waiting import until

STEPS = {"keys": {"train.steps": 5}}


@dataclass
class Desk:
    """The API, with tokens of several people. The queue decides only when a test says so."""

    inside: InProcess
    actor: FakeActor

    def ask(self, name: str, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        return self.inside.client().request(method, path, json=body, headers={**self.tokens[name], **headers})

    def __post_init__(self) -> None:
        roles = {"rob": Role.runner, "otto": Role.runner, "aude": Role.author, "ada": Role.admin, "vera": Role.viewer}
        self.tokens = {name: self.inside.token(name, role, "root") for name, role in roles.items()}

    def submit(self, name: str = "rob", body: Any = STEPS, **headers: str) -> dict[str, Any]:
        answer = self.ask(name, "POST", "/api/runs", body, **headers)
        assert answer.status_code == 201, answer.text
        return answer.json()

    def jobs(self) -> list[Job]:
        with reading(self.inside.service.engine) as session:
            return store.in_states(session, *JobState)

    def set(self, job_id: str, **values: Any) -> None:
        with writing(self.inside.service.engine) as session:
            for name, value in values.items():
                setattr(session.get_one(Job, job_id), name, value)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    inside, actor = in_process(tmp_path / "runs"), FakeActor()
    inside.service.actor = inside.service.queue.actor = actor
    yield Desk(inside, actor)
    inside.service.engine.dispose()


def test_a_submission_is_a_job_with_the_key_of_its_run(desk: Desk) -> None:
    answer = desk.submit()
    [job] = desk.jobs()
    assert (answer["id"], answer["job"], answer["state"]) == (job.run_key, "q1", "waiting")
    assert (job.owner, job.unix_user, job.words) == ("rob", "root", ["train.steps=5"])
    assert job.run_dir.endswith(job.run_id)


def test_the_same_key_means_the_same_run(desk: Desk) -> None:
    first, again = (desk.submit(**{"Idempotency-Key": "k"}) for _ in range(2))
    assert first["id"] == again["id"]
    other = desk.submit("otto", **{"Idempotency-Key": "k"})
    assert other["id"] != first["id"]
    refused = desk.ask("rob", "POST", "/api/runs", {"keys": {}}, **{"Idempotency-Key": "k"})
    assert refused.status_code == 422
    assert "another request was sent with this key before" in refused.text
    assert len(desk.jobs()) == 2


def test_of_many_requests_at_once_with_one_key_one_makes_a_run(desk: Desk) -> None:
    service, rob = desk.inside.service, replace(desk.inside.person("rob", Role.runner), unix_user="root")
    rob = replace(rob, token_id=tokens.tokens_of(service, rob)[0][0].id)
    with ThreadPoolExecutor(8) as pool:
        # Below the routes: each request of the client within this process has an event loop of its own.
        words = service, rob, [judge(None, STEPS["keys"], Role.runner)], "k"
        made = list(pool.map(lambda _: submitting.submit(*words).job.id, range(8)))
    assert len(set(made)) == 1
    assert len(desk.jobs()) == 1


@pytest.mark.parametrize(
    ("body", "key", "said"),
    [
        ({"keys": {"train.steps": 0}}, "train.steps", "must be at least 1"),
        ({"keys": {"train.steps": 13}}, "train.steps", "brings bad luck"),
        ({"keys": {"run_root": "/etc"}}, "run_root", "there is no such key"),
        ({"keys": {"model.target": "os:system"}}, "model.target", "needs the role author"),
        ({"job": "nothing"}, "job", "there is no such ready job"),
        ({"script": "train.py --lr 1"}, "script", "needs the role author"),
        ({"axes": {"model.target": ["a", "b"]}}, "model.target", "needs the role author"),
        ({"axes": {"train.steps": [1, 0]}}, "train.steps", "must be at least 1"),
        ({"axes": {"train.steps": [5, 5]}}, "train.steps", "each once"),
        ({"keys": {"train.steps": 5}, "axes": {"train.steps": [6]}}, "train.steps", "give it once"),
        ({"axes": {"train.steps": [1, 2, 3], "seed": [*range(40)]}}, None, f"120 runs: at most {MOST_SWEPT}"),
        ({"keys": {"name": ["a"]}}, None, "valid"),
        ({"keys": {}, "words": ["+hydra.callbacks.x=1"]}, None, "Extra inputs"),
        ({"keys": {}, "minutes": -1}, None, "greater than 0"),
    ],
)
def test_a_refusal_names_its_key_and_makes_no_job(desk: Desk, body: Any, key: str | None, said: str) -> None:
    for path in ("/api/runs", "/api/runs/check"):
        answer = desk.ask("rob", "POST", path, body)
        assert answer.status_code == 422, answer.text
        assert said in answer.text
        if key is not None:
            assert [one["key"] for one in answer.json()["problems"]] == [key]
    assert desk.jobs() == []


SCRIPT = {"script": "-- train.py --lr '{lr}' 'two words'", "axes": {"script.params.lr": [0.1, 0.3]}}


def test_a_sweep_of_a_script_is_one_request_and_a_job_for_each_combination(desk: Desk) -> None:
    body = {**SCRIPT, "axes": {**SCRIPT["axes"], "launcher.workers_per_node": [1, 2, 3]}, "keys": {"name": "s"}}
    assert desk.ask("aude", "POST", "/api/runs/check", body).json()["runs"] == 6
    assert desk.jobs() == []
    first, again = (desk.submit("aude", body, **{"Idempotency-Key": "k"}) for _ in range(2))
    jobs = desk.jobs()
    assert (first, len(jobs), {job.sweep for job in jobs}) == (again, 6, {first["id"][-6:]})
    last = ["--", "train.py", "--lr", "{lr}", "two words"]
    assert jobs[0].words == ["name='s'", "script.params.lr=0.1", "launcher.workers_per_node=1", *last]
    assert len({job.run_key for job in jobs}) == 6
    made = desk.ask("aude", "GET", f"/api/runs/{jobs[5].id}/keys").json()
    assert made["script"] == body["script"]
    assert made["keys"] == {"name": "s", "script.params.lr": 0.3, "launcher.workers_per_node": 3}
    assert desk.ask("rob", "GET", f"/api/runs?sweep={first['sweep']}").json()["total"] == 6


@pytest.mark.parametrize("limit", ["disk", "number"])
def test_the_limits_of_a_sweep_hold_for_all_of_its_runs_together(
    desk: Desk, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"axes": {"seed": [1, 2, 3]}}
    if limit == "disk":
        desk.actor.needs = {**desk.actor.needs, "disk": 0.4 * shutil.disk_usage("/").free}
    else:
        monkeypatch.setattr(submitting, "_MOST_OPEN", 2)
    answer = desk.ask("rob", "POST", "/api/runs", body)
    assert (answer.status_code, desk.jobs()) == ({"disk": 422, "number": 429}[limit], [])
    assert {"disk": "together", "number": "more than 2 jobs"}[limit] in answer.text


@pytest.mark.parametrize(("line", "said"), [("'x", "words of a shell"), ("x.py ${a}", "${"), ("--", "names no script")])
def test_a_script_line_that_cannot_be_read_is_refused(desk: Desk, line: str, said: str) -> None:
    assert said in desk.ask("aude", "POST", "/api/runs", {"script": line}).text
    secret = desk.ask("aude", "POST", "/api/runs", {"script": "t.py --hf_token hf_abcdefghijklmnopqrstuvwxyz012345"})
    assert "secret among its arguments" in secret.text


def test_a_key_that_is_no_text_is_refused(desk: Desk) -> None:
    headers = {**desk.tokens["rob"], "Content-Type": "application/json"}
    answer = desk.inside.client().post("/api/runs", content=rb'{"keys": {"\ud800": 1}}', headers=headers)
    assert (answer.status_code, [one["key"] for one in answer.json()["problems"]]) == (422, ["?"])


def test_somebody_without_a_unix_user_submits_nothing(desk: Desk) -> None:
    desk.tokens["nora"] = desk.inside.token("nora", Role.runner)
    answer = desk.ask("nora", "POST", "/api/runs", STEPS)
    assert answer.status_code == 422
    assert "has no Unix user" in answer.text


def test_a_run_that_needs_more_slots_than_there_are_is_refused(desk: Desk) -> None:
    desk.actor.slots = 4
    answer = desk.ask("rob", "POST", "/api/runs", STEPS)
    assert answer.json()["problems"][0]["message"] == "the run needs 4 slots, and this machine has 1"


@pytest.mark.parametrize(
    ("needs", "key", "said"),
    [
        ({"cores": 4096}, "launcher.workers_per_node", "the run needs 4,096 cores at least, and this machine has"),
        ({"memory": 1e15}, "train.batch_size", "the run needs 931,322.6 GiB of memory at least, and this"),
        ({"disk": 1e18}, "train.keep_checkpoints", "GiB of disk at least, and this machine has"),
    ],
)
def test_a_run_that_needs_more_than_the_machine_has_is_refused(
    desk: Desk, needs: dict[str, float], key: str, said: str
) -> None:
    desk.actor.needs |= needs
    for path in ("/api/runs", "/api/runs/check"):
        [problem] = desk.ask("ada", "POST", path, STEPS).json()["problems"]
        assert (problem["key"], said in problem["message"]) == (key, True), problem
    assert desk.jobs() == []


def test_a_role_has_limits(desk: Desk) -> None:
    admin = desk.inside.browser("ada", Role.admin)

    def limit(**values: float) -> None:
        assert desk.inside.client().put("/api/limits/runner", headers=admin, json=values).status_code == 204

    def problems(**body: Any) -> list[tuple[str, str]]:
        found = desk.ask("rob", "POST", "/api/runs", {**STEPS, **body}).json()
        return [(one["key"], one["message"]) for one in found.get("problems", [])]

    limit(memory=2, disk=1, hours=2)
    desk.actor.needs |= {"memory": 3 << 30, "disk": 2 << 30}
    refused = "the run needs 3.0 GiB of memory at least, and the role runner may take 2.0 GiB of memory"
    assert ("train.batch_size", refused) in problems()
    assert [key for key, _ in problems(minutes=121)] == ["train.batch_size", "train.keep_checkpoints", "minutes"]
    assert desk.ask("aude", "POST", "/api/runs", STEPS).status_code == 201, "another role has none"
    desk.actor.needs |= {"memory": 1 << 30, "disk": 1 << 30}
    assert problems() == []
    job = desk.jobs()[-1]
    assert (job.minutes, job.limits) == (120, {"memory": 2 << 30, "disk": 1 << 30})
    assert desk.ask("rob", "POST", "/api/runs/check", {**STEPS, "minutes": 5}).json()["minutes"] == 5
    limit(slots=1)
    desk.actor.slots = 2
    desk.inside.service.queue.slots.limit = 4
    desk.inside.service.queue.slots._names = ("cpu0", "cpu1", "cpu2", "cpu3")
    text = "the run needs 2 slots at least, and the role runner may take 1 slot"
    assert problems() == [("launcher.workers_per_node", text)]
    shown = desk.ask("rob", "GET", "/api/limits").json()["runner"]
    assert shown == {"slots": 1, "hours": None, "memory": None, "disk": None}
    assert submitting.limits_for(desk.inside.service, desk.inside.person("rob", Role.runner)) == ["1 slots at a time"]
    assert 'data-limits="runner"' in desk.inside.client().get("/queue", headers=admin).text
    assert 'data-limits="runner"' not in desk.ask("rob", "GET", "/queue").text


def test_one_person_holds_the_slots_that_the_role_may(desk: Desk) -> None:
    admin = desk.inside.browser("ada", Role.admin)
    desk.inside.client().put("/api/limits/runner", headers=admin, json={"slots": 1})
    queue = desk.inside.service.queue
    queue.slots.limit, queue.slots._names = 3, ("cpu0", "cpu1", "cpu2")
    queue.capacity = {"cores": 100.0, "memory": 100.0}
    for name in ("rob", "rob", "otto"):
        desk.submit(name)
    queue._decide()
    states = [(job.owner, job.state, job.reason) for job in desk.jobs()]
    waits = ("rob", "waiting", "its owner may hold 1 slot at a time")
    assert states == [("rob", "starting", ""), waits, ("otto", "starting", "")]


def test_a_run_on_the_cpu_takes_no_gpu_but_cores(desk: Desk) -> None:
    queue = desk.inside.service.queue
    queue.slots._names, queue.slots._next = ("gpu0",), float("inf")
    queue.slots._withheld = {}
    queue.capacity = {"cores": 3.0, "memory": 100.0}
    desk.actor.on_gpu = True
    desk.submit("rob")
    desk.actor.on_gpu, desk.actor.needs["cores"] = False, 2
    for name in ("otto", "aude"):
        desk.submit(name)
    queue._decide()
    found = [(job.owner, job.state, job.slots, job.taken, job.reason) for job in desk.jobs()]
    assert found == [
        ("rob", "starting", 1, ["gpu0"], ""),
        ("otto", "starting", 0, [], ""),
        ("aude", "waiting", 0, [], "next: it needs 2 cores, 0 cores free"),
    ]
    for job in desk.jobs()[:2]:
        queue._start(job.id)
    assert [request["gpus"] for request in desk.actor.actions("start")] == [[0], []]


def test_a_run_waits_for_no_answer_of_ours_where_the_gpus_cannot_be_told(desk: Desk) -> None:
    slots = desk.inside.service.queue.slots
    slots._names, slots.trouble, slots._next = None, "nvidia-smi fails with exit code 255", float("inf")
    answer = desk.ask("rob", "POST", "/api/runs", STEPS)
    assert (answer.status_code, "nvidia-smi fails" in answer.text) == (503, True)


def test_a_waiting_job_is_taken_from_the_queue_by_its_owner_alone(desk: Desk) -> None:
    made = desk.submit()
    assert desk.ask("otto", "POST", f"/api/runs/{made['id']}/cancel").status_code == 403
    answer = desk.ask("rob", "POST", f"/api/runs/{made['id']}/cancel")
    assert (answer.status_code, answer.json()["state"]) == (202, "cancelled")
    [job] = desk.jobs()
    assert (job.state, job.reason) == ("cancelled", "taken from the queue by rob")
    assert desk.ask("rob", "POST", f"/api/runs/{made['job']}/cancel").status_code == 409


def test_a_running_one_is_asked_to_stop_once(desk: Desk) -> None:
    made = desk.submit()
    desk.set("q1", state=JobState.RUNNING, started=1.0, taken=["cpu0"])
    for name in ("rob", "ada"):
        assert desk.ask(name, "POST", f"/api/runs/{made['id']}/cancel").json()["state"] == "stopping"
    [job] = desk.jobs()
    assert job.stop_asked is not None
    assert desk.actor.actions("cancel") == [], "the queue asks, so that two requests do not end it at once"


def _begun(desk: Desk, tmp_path: Path, state: JobState = JobState.ENDED) -> str:
    """A run that has a folder, and its job in some state."""
    made = desk.submit()
    [job] = desk.jobs()
    folder = tmp_path / "runs" / "e" / Path(job.run_dir).name
    folder.mkdir(parents=True)
    for name in ("config.yaml", "journal.jsonl"):
        (folder / name).write_text("")
    desk.set(job.id, state=state, run_dir=str(folder), ended=1.0)
    return made["id"]


def test_a_time_limit_is_refused_for_a_job_of_a_scheduler(desk: Desk, tmp_path: Path) -> None:
    run = _begun(desk, tmp_path)
    desk.actor.slots = 0
    for path in ("/api/runs", "/api/runs/check", f"/api/runs/{run}/resume"):
        answer = desk.ask("rob", "POST", path, {"keys": {"train.steps": 9}, "minutes": 30})
        assert (answer.status_code, "a scheduler's job has launcher.time" in answer.text) == (422, True)
    assert desk.submit()["job"] == "q2"


def test_a_run_goes_on_as_another_job_of_the_same_run(desk: Desk, tmp_path: Path) -> None:
    run = _begun(desk, tmp_path)
    assert desk.ask("otto", "POST", f"/api/runs/{run}/resume").status_code == 403
    answer = desk.ask("ada", "POST", f"/api/runs/{run}/resume", {"keys": {"train.steps": 9}, "minutes": 30})
    assert (answer.status_code, answer.json()["id"], answer.json()["job"]) == (201, run, "q2")
    job = desk.jobs()[1]
    assert (job.resumes, job.begun_before, job.owner, job.minutes) == (True, 1, "rob", 30)
    again = desk.ask("rob", "POST", f"/api/runs/{run}/resume")
    assert (again.status_code, "waiting in the queue as q2" in again.text) == (409, True)
    assert desk.ask("rob", "POST", f"/api/runs/{run}/delete").status_code == 409


def test_a_repeated_request_lets_a_run_go_on_once(desk: Desk, tmp_path: Path) -> None:
    run, repeated = _begun(desk, tmp_path), {"Idempotency-Key": "k"}
    answers = [desk.ask("rob", "POST", f"/api/runs/{run}/resume", STEPS, **repeated) for _ in range(2)]
    assert [(one.status_code, one.json()["job"]) for one in answers] == [(201, "q2")] * 2
    other = desk.ask("rob", "POST", f"/api/runs/{run}/resume", {"keys": {"train.steps": 6}}, **repeated)
    assert (other.status_code, "another request was sent" in other.text) == (422, True)
    desk.set("q2", state=JobState.ENDED)
    assert desk.ask("rob", "POST", f"/api/runs/{run}/resume", STEPS, **repeated).json()["job"] == "q2"
    assert desk.ask("rob", "POST", f"/api/runs/{run}/resume", STEPS).json()["job"] == "q3"


def test_a_run_with_code_of_its_own_goes_on_by_an_author_alone(desk: Desk, tmp_path: Path) -> None:
    run, desk.actor.own_code = _begun(desk, tmp_path), "launcher.container.image"
    refused = desk.ask("rob", "POST", f"/api/runs/{run}/resume")
    assert (refused.status_code, "launcher.container.image" in refused.text) == (403, True)
    assert "needs the role author" in refused.text
    assert desk.ask("ada", "POST", f"/api/runs/{run}/resume").status_code == 201


def _changed_during(desk: Desk, monkeypatch: pytest.MonkeyPatch, action: str, **changes: Any) -> None:
    """An administrator changes the user rob while a child checks a request of rob's."""
    answers, admin = getattr(desk.actor, action), desk.inside.person("ada", Role.admin)
    values = {"role": None, "unix_user": None, "disabled": None} | changes
    rob = desk.inside.person("rob", Role.runner).user_id

    def check(request: dict[str, Any]) -> dict[str, Any]:
        accounts.change_user(desk.inside.service, admin, rob, **values)
        return answers(request)

    monkeypatch.setattr(desk.actor, action, check)


@pytest.mark.parametrize(
    ("changes", "status"), [({"disabled": True}, 401), ({"role": Role.viewer}, 403), ({"unix_user": "other"}, 409)]
)
def test_who_is_changed_while_a_request_is_checked_gets_no_job(
    desk: Desk, tmp_path: Path, changes: dict[str, Any], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _begun(desk, tmp_path)
    rob = desk.inside.person("rob", Role.runner).user_id
    same = {"role": Role.runner, "unix_user": "root", "disabled": False}
    for action, path in (("_check", "/api/runs"), ("_check_resume", f"/api/runs/{run}/resume")):
        _changed_during(desk, monkeypatch, action, **changes)
        answer = desk.ask("rob", "POST", path, STEPS)
        assert answer.status_code == status, answer.text
        accounts.change_user(desk.inside.service, desk.inside.person("ada", Role.admin), rob, **same)
    assert [job.state for job in desk.jobs()] == [JobState.ENDED]


def test_a_token_that_is_revoked_while_a_request_is_checked_makes_no_job(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, service, rob = desk.actor._check, desk.inside.service, desk.inside.person("rob", Role.runner)

    def check(request: dict[str, Any]) -> dict[str, Any]:
        tokens.revoke_token(service, rob, tokens.tokens_of(service, rob)[0][0].id)
        return answers(request)

    monkeypatch.setattr(desk.actor, "_check", check)
    assert desk.ask("rob", "POST", "/api/runs", STEPS).status_code == 401
    assert desk.jobs() == []


def test_a_run_that_an_administrator_continues_is_its_owners(desk: Desk, tmp_path: Path) -> None:
    run = _begun(desk, tmp_path)
    desk.set("q1", owner="otto", user_id=0)
    assert desk.ask("ada", "POST", f"/api/runs/{run}/resume").status_code == 201
    made = desk.jobs()[1]
    assert (made.owner, made.user_id) == ("otto", desk.inside.person("otto", Role.runner).user_id)


def test_a_run_is_deleted_by_its_owner_or_an_administrator(desk: Desk, tmp_path: Path) -> None:
    run = _begun(desk, tmp_path)
    for name, status in (("vera", 403), ("otto", 403), ("aude", 403), ("rob", 200), ("ada", 200)):
        assert desk.ask(name, "POST", f"/api/runs/{run}/delete").status_code == status
    assert len(desk.actor.actions("delete")) == 2


def test_again_with_changes_gives_the_request_back(desk: Desk) -> None:
    made = desk.submit(body={"job": "gpt2_ort", "keys": {"train.steps": 5, "name": "x"}, "minutes": 7})
    found = desk.ask("vera", "GET", f"/api/runs/{made['id']}/keys").json()
    keys = {"train.steps": 5, "name": "x"}
    assert found == {"job": "gpt2_ort", "keys": keys, "minutes": 7, "script": "", "left_out": []}


def test_the_queue_shows_slots_positions_and_reasons(desk: Desk) -> None:
    desk.submit(), desk.submit("otto")
    desk.set("q1", state=JobState.RUNNING, started=1.0, taken=["cpu0"])
    desk.inside.service.queue._decide()
    found = desk.ask("vera", "GET", "/api/queue").json()
    run = desk.jobs()[0].run_key
    assert found["slots"] == [{"name": "cpu0", "state": "busy", "run": run, "run_name": "n", "note": ""}]
    assert [(one["job"], one["position"], one["reason"]) for one in found["waiting"]] == [
        ("q2", 1, "next: it needs 1 slot, 0 free")
    ]
    assert [(one["job"], one["slots_held"]) for one in found["running"]] == [("q1", ["cpu0"])]
    assert found["shares"][0]["owner"] == "rob"


def test_administrators_pause_drain_and_prefer(desk: Desk) -> None:
    desk.submit()
    assert desk.ask("aude", "POST", "/api/queue/pause").status_code == 403
    assert desk.ask("ada", "POST", "/api/queue/pause").json()["paused"] is True
    assert desk.ask("ada", "POST", "/api/queue/drain", {"slots": ["cpu0"]}).json()["slots"][0]["state"] == "held"
    assert "no such slot" in desk.ask("ada", "POST", "/api/queue/drain", {"slots": ["gpu7"]}).text
    assert desk.ask("ada", "POST", "/api/queue/drain").json()["draining"] is True
    found = desk.ask("ada", "POST", "/api/queue/continue").json()
    assert (found["paused"], found["draining"], found["slots"][0]["state"]) == (False, False, "free")
    assert desk.ask("ada", "POST", "/api/queue/q1/priority", {"priority": 5}).json()["priority"] == 5
    assert desk.ask("ada", "POST", "/api/queue/q9/priority", {"priority": 5}).status_code == 404
    with reading(desk.inside.service.engine) as session:
        actions = [one.action for one in entries(session, 1, 50)[0]]
    for action in ("run.submit", "queue.pause", "queue.drain", "queue.continue", "queue.priority"):
        assert action in actions


def test_the_ready_jobs_are_listed(desk: Desk) -> None:
    found = desk.ask("vera", "GET", "/api/ready-jobs").json()
    assert {"gpt2_ort", "llama"} <= {one["name"] for one in found}


def test_a_folder_that_is_named_like_anothers_run_reaches_nothing_of_it(desk: Desk, tmp_path: Path) -> None:
    made = desk.submit("otto")
    job = desk.jobs()[0]
    forged = f"20200101-000000-{job.run_id}"
    for key in (forged, job.run_key):
        place = str(tmp_path / "runs" / "x" / key)
        facts = {"name": "n", "experiment": "x", "unix_user": "mallory", "state": "running", "reason": ""}
        run = Listed(place=place, key=key, run_id=job.run_id, started=1.0, updated=1.0, **facts)
        desk.inside.service.runs.roots[0].runs[place] = run
    for asked in (forged, job.run_key, job.run_id, made["id"]):
        assert desk.ask("rob", "POST", f"/api/runs/{asked}/cancel").status_code in (403, 404, 409), asked
    assert desk.jobs()[0].state == JobState.WAITING
    assert desk.ask("otto", "POST", f"/api/runs/{job.run_key}/cancel").status_code == 202


def test_keys_that_hold_a_secret_are_for_the_owner(desk: Desk) -> None:
    body = {"keys": {"model": "hf", "model.params.api_key": "hunter2hunter2"}}
    made = desk.submit("aude", body)
    for name, is_shown in (("aude", True), ("ada", True), ("vera", False), ("rob", False)):
        answer = desk.ask(name, "GET", f"/api/runs/{made['id']}/keys")
        assert ("hunter2hunter2" in answer.text) is is_shown, (name, answer.text)


def test_a_secret_is_neither_in_the_database_nor_in_what_others_are_told(desk: Desk, tmp_path: Path) -> None:
    secret, setup = "hunter2hunter2", "export HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz012345"
    body = {"keys": {"model": "hf", "model.params.api_key": secret, "launcher.setup": f"date\n{setup}"}}
    desk.submit("aude", body)
    [job] = desk.jobs()
    assert "model.params.api_key=***" in job.words
    files = [path for path in (tmp_path / "runs" / ".serve").rglob("*") if path.is_file()]
    found = {path.parent.name for path in files if secret.encode() in path.read_bytes()}
    assert found == {"secrets"}
    assert {path.stat().st_mode & 0o777 for path in files if path.parent.name == "secrets"} == {0o600}
    carried = kept(tmp_path / "runs" / ".serve" / "secrets", job.run_dir)
    assert carried["model.params.api_key"] == secret
    assert carried["launcher.setup.1"] == setup
    assert "model.params.api_key='hunter2hunter2'" in whole_words(job.words, {CARRIER: json.dumps(carried)})
    desk.inside.service.queue.start()
    try:
        until(lambda: desk.actor.actions("start"))
    finally:
        desk.inside.service.queue.stop()
    assert desk.actor.actions("start")[0]["secrets"] == carried


def test_a_run_with_a_secret_goes_on_with_it_and_takes_it_into_the_bin(desk: Desk, tmp_path: Path) -> None:
    run = _begun(desk, tmp_path)
    [job] = desk.jobs()
    folder = desk.inside.service.settings.secrets
    keep(folder, job.run_dir, {"model.params.api_key": "hunter2hunter2"})
    # A folder of somebody else's that has the same key has not the secret.
    assert kept(folder, f"/elsewhere/{Path(job.run_dir).name}") == {}
    assert desk.ask("rob", "POST", f"/api/runs/{run}/resume", {"keys": {"train.steps": 9}}).status_code == 201
    assert desk.actor.actions("check_resume")[0]["secrets"] == {"model.params.api_key": "hunter2hunter2"}
    desk.set(desk.jobs()[-1].id, state=JobState.ENDED)
    assert desk.ask("rob", "POST", f"/api/runs/{run}/delete").status_code == 200
    assert kept(folder, job.run_dir) == {}


@pytest.mark.parametrize(
    "answer",
    [{"slots": "x"}, {"slots": -1}, {"run_dir": "/etc"}, {"words": [1]}, {"needs": {}}, {"needs": {"cores": "x"}}],
)
def test_an_answer_that_no_check_of_ours_gives_is_refused(
    desk: Desk, answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child is a process of the run's user, who may change what it says."""
    good = desk.actor._check
    monkeypatch.setattr(desk.actor, "_check", lambda request: {**good(request), **answer})
    assert desk.ask("rob", "POST", "/api/runs", STEPS).status_code == 422
    assert desk.jobs() == []


def test_a_run_in_a_hidden_folder_is_refused_since_nobody_would_see_it(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = desk.actor._check
    hidden = {"run_dir": "/nowhere/.bin/20260101-000000-n-abcdef"}
    monkeypatch.setattr(desk.actor, "_check", lambda request: {**good(request), **hidden})
    for path in ("/api/runs", "/api/runs/check"):
        answer = desk.ask("rob", "POST", path, {"keys": {"experiment": ".bin"}})
        assert answer.status_code == 422
        assert [one["key"] for one in answer.json()["problems"]] == ["experiment"]
    assert desk.jobs() == []
