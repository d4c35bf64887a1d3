"""What Prometheus and webhooks are told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from sqlalchemy import select
from sqlalchemy.exc import OperationalError

from ortlaunch.run.run import Run
from ortlaunch.serve.access import Role
from ortlaunch.serve.database import reading, writing
from ortlaunch.serve.index.tables import Delivery, Webhook
from ortlaunch.serve.queue.store import Slate
from ortlaunch.serve.service import Service
from ortlaunch.serve.webhooks import MOST_TRIES, Webhooks, signature
from tests.launch.follow.conftest import Maker
from tests.serve.follow.conftest import add_job
from tests.support.service import InProcess


class Receiver(HTTPServer):
    """A program that is told, and that answers as the test says."""

    status = 200
    got: list[tuple[dict[str, str], bytes]]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Receiver)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server.got.append((dict(self.headers), body))
        self.send_response(server.status)
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver(("127.0.0.1", 0), Handler)
    server.got = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join(5)
    server.server_close()


def add(served: InProcess, url: str) -> dict:
    answer = served.client(served.token("ada", Role.admin)).post("/api/webhooks", json={"url": url})
    assert answer.status_code == 201, answer.text
    return answer.json()


def url_of(receiver: Receiver) -> str:
    return f"http://127.0.0.1:{receiver.server_port}/hook"


def test_an_end_is_told_once_and_signed(
    served: InProcess, service: Service, make_run: Maker, alive: dict, receiver: Receiver
) -> None:
    make_run(end="FINISHED")
    service.runs.refresh()
    secret = add(served, url_of(receiver))["secret"]
    run_dir = make_run(end=None, launcher=alive)
    service.runs.refresh()
    with Run(run_dir).journal() as journal:
        journal.end("FINISHED", at=int((time.time() + 5) * 1000))
    service.runs.refresh()
    service.runs.refresh()
    sender = Webhooks(service.engine)
    assert (sender.send_due(), sender.send_due()) == (1, 0)
    ((headers, body),) = receiver.got
    content = json.loads(body)
    assert (content["event"], content["run"]["state"], content["run"]["run_id"]) == ("run.ended", "finished", "000002")
    assert headers["X-Ortlaunch-Signature"] == f"sha256={signature(secret, headers['X-Ortlaunch-Timestamp'], body)}"
    # An index that is made anew tells nothing again.
    service.runs.rebuild()
    assert sender.send_due() == 0
    (row,) = served.client(served.token("ada", Role.admin)).get("/api/webhooks").json()
    assert (row["delivered"], row["waiting"], row["given_up"]) == (1, 0, 0)
    assert secret not in json.dumps(row)


@pytest.mark.parametrize("status", [500, 302])
def test_what_was_not_taken_comes_again_later_and_later(
    served: InProcess, service: Service, receiver: Receiver, status: int
) -> None:
    number = add(served, url_of(receiver))["id"]
    with writing(service.engine) as session:
        session.add(Delivery(webhook_id=number, place="/x", ended=1.0, body="{}", due=1.0, problem="", tries=0))
    receiver.status = status
    sender, now, waits = Webhooks(service.engine), 1.0, []
    for _ in range(MOST_TRIES):
        assert sender.send_due(now) == 1
        with reading(service.engine) as session:
            message = session.scalars(select(Delivery)).one()
        waits.append(message.due - now if message.due else None)
        now = message.due or now
    assert waits[:4] == [5, 20, 80, 320]
    assert (waits[-1], message.problem) == (None, f"it answered {status}")
    assert (len({headers["X-Ortlaunch-Delivery"] for headers, _ in receiver.got}), len(receiver.got)) == (1, MOST_TRIES)
    assert sender.send_due(now + 1e9) == 0


def test_what_was_taken_is_not_sent_again_while_it_cannot_be_noted(
    served: InProcess, service: Service, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = add(served, url_of(receiver))["id"]
    with writing(service.engine) as session:
        session.add(Delivery(webhook_id=number, place="/x", ended=1.0, body="{}", due=1.0, problem="", tries=0))
    sender = Webhooks(service.engine)

    def full(*_: object) -> None:
        raise OperationalError("UPDATE", {}, Exception("database or disk is full"))

    with monkeypatch.context() as patch:
        patch.setattr(sender, "_note", full)
        for _ in range(3):
            with pytest.raises(OperationalError):
                sender.send_due()
    assert (sender.send_due(), sender.send_due()) == (1, 0)
    assert len(receiver.got) == 1
    with reading(service.engine) as session:
        assert session.scalars(select(Delivery)).one().delivered is not None


def test_an_address_that_does_not_answer_keeps_no_other_one_waiting(
    served: InProcess, service: Service, receiver: Receiver
) -> None:
    gone, there = (add(served, url)["id"] for url in ("http://127.0.0.1:1/hook", url_of(receiver)))
    same = {"ended": 1.0, "body": "{}", "problem": "", "tries": 0}
    with writing(service.engine) as session:
        for number, webhook in enumerate([gone] * 30 + [there] * 2):
            session.add(Delivery(webhook_id=webhook, place=f"/{number}", due=1.0 + number, **same))
    assert Webhooks(service.engine).send_due() == 3
    assert len(receiver.got) == 2
    rows = {row["id"]: row for row in served.client(served.token("ada", Role.admin)).get("/api/webhooks").json()}
    assert [(rows[one]["waiting"], rows[one]["delivered"]) for one in (gone, there)] == [(30, 0), (0, 2)]


def test_nobody_there_is_a_failure_and_no_error(served: InProcess, service: Service) -> None:
    number = add(served, "http://127.0.0.1:1/hook")["id"]
    with writing(service.engine) as session:
        session.add(Delivery(webhook_id=number, place="/x", ended=1.0, body="{}", due=1.0, problem="", tries=0))
    assert Webhooks(service.engine).send_due() == 1
    with reading(service.engine) as session:
        assert "refused" in session.scalars(select(Delivery)).one().problem


def test_which_addresses_are_webhooks(served: InProcess, service: Service) -> None:
    admin = served.client(served.token("ada", Role.admin))
    for url in ("file:///etc/passwd", "ftp://host/x", "http://", "https://user:word@host/", "https://ho st/", "x" * 9):
        assert admin.post("/api/webhooks", json={"url": url}).status_code == 422, url
    number = add(served, "https://example.invalid/hook")["id"]
    assert served.client(served.token("rob", Role.author)).delete(f"/api/webhooks/{number}").status_code == 403
    assert admin.delete(f"/api/webhooks/{number}").status_code == 204
    with reading(service.engine) as session:
        assert session.scalars(select(Webhook)).all() == []


def test_gpus_of_our_own_runs_are_not_held_by_others(
    served: InProcess, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = dict.fromkeys(("gpu0", "gpu2"), "a process uses it")
    monkeypatch.setattr(service.queue, "slate", lambda: Slate(("gpu0", "gpu1", "gpu2"), used))
    add_job(service, 1, "/nowhere/e/20260101-000000-n-aaaaaa", state="running", slots=2, taken=["gpu0", "gpu1"])
    text = served.client(served.token("vera", Role.viewer)).get("/metrics").text
    assert 'ortlaunch_slots{use="taken"} 2.0' in text
    assert 'ortlaunch_slots{use="foreign"} 1.0' in text


def test_prometheus_gets_figures_of_every_part(served: InProcess, service: Service, make_run: Maker) -> None:
    make_run(end="FAILED")
    service.runs.refresh()
    viewer = served.client(served.token("vera", Role.viewer))
    viewer.get("/api/runs/zzzzzz")
    text = viewer.get("/metrics").text
    for line in (
        'ortlaunch_runs{state="failed"} 1.0',
        'ortlaunch_jobs{state="waiting"} 0.0',
        "ortlaunch_relay_unsent_bytes 0.0",
        "ortlaunch_streams 0.0",
        'ortlaunch_requests_total{method="GET",route="/api/runs/{id}",status="404"}',
        'ortlaunch_slots{use="taken"} 0.0',
        "process_resident_memory_bytes",
    ):
        assert line in text, line
    assert "zzzzzz" not in text
    assert served.client().get("/metrics").status_code == 401
