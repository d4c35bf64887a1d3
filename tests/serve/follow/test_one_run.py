"""One run: its details, curves, logs, configuration and files, of folders that may be hostile."""

from __future__ import annotations

import json
import math
import os
import re
import time
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from ortlaunch.run.run import Run
from ortlaunch.serve.access import Role
from ortlaunch.serve.follow.curves import MOST_POINTS, Thinned
from ortlaunch.serve.follow.logs import MOST_BYTES, clean
from ortlaunch.serve.service import Service
from tests.launch.follow.conftest import Maker
from tests.support.service import InProcess

SECRET = "ghp_" + "A1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q7r8"


@pytest.fixture
def run_dir(service: Service, make_run: Maker) -> Path:
    made = make_run("one", run_id="00aa00", steps=300)
    service.runs.refresh()
    return made


def get(viewer: TestClient, path: str, **query: object) -> dict:
    answer = viewer.get(f"/api/runs/00aa00{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_details(viewer: TestClient, run_dir: Path) -> None:
    (run_dir / "logs" / "rank-0.log").write_text("hello\n")
    (run_dir / "logs" / "torchrun.log").write_text("hello\n")
    (run_dir / "failures").mkdir()
    failure = {"rank": 1, "host": "node\x1b[0m", "message": "first\nlast", "is_request": False, "time": 5.0}
    (run_dir / "failures" / "rank-1.json").write_text(json.dumps(failure))
    (run_dir / "failures" / "rank-2.json").write_text("[]")
    for step, complete in ((100, True), (200, False)):
        folder = run_dir / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text('{"eval_loss": 1.5}')
        if complete:
            (folder / "manifest.json").write_text(
                '{"files": {"engine/rest.pt": {"size": 4000}, "run.json": {"size": 18}}}'
            )
        (folder / "engine" / "tensors").mkdir(parents=True)
        (folder / "engine" / "tensors" / "a.distcp").write_bytes(b"x" * 500)
    (run_dir / "relay.json").write_text('{"uri": "x", "mlflow_run_id": "abc", "offset": 0, "refused": 0}')
    found = get(viewer, "")
    assert (found["ranks"], found["logs"]) == ([0], ["torchrun"])
    assert [(one["rank"], one["host"], one["message"], one["at"]) for one in found["failures"]] == [
        (1, "node?[0m", "first\nlast", 5.0)
    ]
    assert [(one["step"], one["complete"], one["eval_loss"], one["size"]) for one in found["checkpoints"]] == [
        (200, False, 1.5, 18 + 500),
        (100, True, 1.5, 4000 + 18),
    ]
    assert found["mlflow"] == {"run_id": "abc", "store": "", "url": None}
    assert found["metrics"] == ["throughput/step_seconds", "throughput/tokens_per_second", "train/loss"]
    assert {one["name"] for one in found["files"]} >= {"config.yaml", "journal.jsonl", "logs/rank-0.log"}
    assert found["launcher"]["name"] == "local"


def test_the_steps_are_a_log_that_is_searched_and_saved(viewer: TestClient, run_dir: Path) -> None:
    with Run(run_dir).journal() as journal:
        journal.metrics(200, {"eval/loss": 1.25, "bad": float("nan")})
        journal.rewind(150, "resume")
        journal.failure(1, "node\x1b[0m", f"Traceback\ntoken={SECRET}")
    found = get(viewer, "/logs/steps")
    lines = found["text"].splitlines()
    assert [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", "", line) for line in lines] == [
        "the run begins",
        "step 100  train/loss 2.5, throughput/tokens_per_second 1234.5, throughput/step_seconds 0.5",
        "ends: finished",
        "step 200  eval/loss 1.25, bad nan",
        "goes back to step 150",
        lines[5].partition("  ")[2],
    ]
    assert "rank 1 on node" in lines[5] and SECRET not in found["text"] and "\x1b" not in found["text"]
    assert found["next"] == found["size"] == (run_dir / "journal.jsonl").stat().st_size
    (match,) = get(viewer, "/logs/steps", search="STEP 200  EVAL")["matches"]
    assert match["line"] == lines[3]
    assert get(viewer, "/logs/steps", offset=match["offset"])["text"].splitlines()[0] == lines[3]
    saved = viewer.get("/api/runs/00aa00/logs/steps/text")
    assert (saved.text, saved.headers["Content-Type"]) == (found["text"], "text/plain; charset=utf-8")


def test_a_long_log_is_saved_whole_and_without_secrets(viewer: TestClient, run_dir: Path) -> None:
    lines = [f"line {n} {'x' * 100}" for n in range(6000)]
    log = run_dir / "logs" / "rank-0.log"
    log.write_text("\n".join([*lines, f"token={SECRET}", "unfinished"]))
    saved = viewer.get("/api/runs/00aa00/logs/0/text").text.splitlines()
    assert log.stat().st_size > 2 * MOST_BYTES
    assert (saved[:6000], saved[-1]) == (lines, "unfinished")
    assert SECRET not in saved[-2]


def test_pictures_and_texts_of_hooks_are_on_the_page(viewer: TestClient, served: InProcess, run_dir: Path) -> None:
    (run_dir / "logged" / "pictures").mkdir(parents=True)
    (run_dir / "logged" / "pictures" / "step-1.png").write_bytes(b"\x89PNG")
    (run_dir / "logged" / "said.txt").write_text(f"<b>once</b> token={SECRET}")
    (run_dir / "logged" / "link.png").symlink_to("/etc/passwd")
    kept = {one["name"]: one["text"] for one in get(viewer, "")["kept"]}
    assert kept.keys() == {"logged/pictures/step-1.png", "logged/said.txt"}
    assert kept["logged/pictures/step-1.png"] is None
    page = viewer.get("/runs/00aa00").text
    assert "&lt;b&gt;once&lt;/b&gt;" in page and SECRET not in page
    picture = viewer.get("/api/runs/00aa00/files/logged/pictures/step-1.png")
    assert (picture.content, picture.headers["Content-Type"]) == (b"\x89PNG", "image/png")
    assert viewer.get("/api/runs/00aa00/files/logged/said.txt").status_code == 403
    assert viewer.get("/api/runs/00aa00/files/logged/link.png").status_code == 404


def test_curves_have_the_time_of_each_step(viewer: TestClient, run_dir: Path) -> None:
    before = get(viewer, "/metrics")
    with Run(run_dir).journal() as journal:
        journal.metrics(200, {"train/loss": 1.0})
    found = get(viewer, "/metrics")
    assert found["times"]["steps"] == [100, 200]
    assert found["times"]["values"][0] == 0.0 < found["times"]["values"][1] < 100
    assert found["began"] == before["began"] == pytest.approx(time.time(), abs=100)


@pytest.mark.parametrize("when", [1e300, 10**400, float("nan")])
def test_numbers_that_nobody_can_show_break_no_page(viewer: TestClient, run_dir: Path, when: float) -> None:
    (run_dir / "failures").mkdir()
    failure = {"rank": 1, "host": "", "message": "it broke", "is_request": False, "time": when}
    (run_dir / "failures" / "rank-1.json").write_text(json.dumps(failure))
    checkpoint = run_dir / "checkpoints" / "step-00000100"
    checkpoint.mkdir(parents=True)
    sizes = {"a": {"size": 10**400}, "b": {"size": 7}}
    (checkpoint / "manifest.json").write_text(json.dumps({"files": sizes}))
    os.utime(checkpoint / "manifest.json", (4e9, 4e9))
    found = get(viewer, "")
    assert ([one["at"] for one in found["failures"]], [one["size"] for one in found["checkpoints"]]) == ([0.0], [7])
    page = viewer.get("/runs/00aa00")
    assert page.status_code == 200 and "it broke" in page.text


def test_files_whose_names_are_no_text_break_no_page(viewer: TestClient, run_dir: Path) -> None:
    (run_dir / "logs" / "rank-0.log").write_text("x\n")
    for name in (b"\xff.log", b"two\nlines.log", b"<b>.log"):
        Path(os.fsdecode(os.fsencode(run_dir / "logs") + b"/" + name)).write_text("x")
    names = [one["name"] for one in get(viewer, "")["files"] if one["name"].startswith("logs/")]
    assert names == ["logs/<b>.log", "logs/rank-0.log"]
    page = viewer.get("/runs/00aa00")
    assert page.status_code == 200 and "/files/logs/%3Cb%3E.log" in page.text


def test_weights_that_were_exported_can_be_fetched(viewer: TestClient, run_dir: Path) -> None:
    for folder in ("weights-step-00000100", "weights-notes", "weights-.ssh"):
        (run_dir / folder).mkdir()
        (run_dir / folder / "model.safetensors").write_text(folder)
    names = {one["name"] for one in get(viewer, "")["files"]}
    assert {name for name in names if name.startswith("weights")} == {"weights-step-00000100/model.safetensors"}
    found = viewer.get("/api/runs/00aa00/files/weights-step-00000100/model.safetensors")
    assert (found.status_code, found.text) == (200, "weights-step-00000100")
    for folder in ("weights-notes", "weights-.ssh"):
        assert viewer.get(f"/api/runs/00aa00/files/{folder}/model.safetensors").status_code == 404


def test_goodput_of_a_run_that_goes_on(service: Service, viewer: TestClient, make_run: Maker, alive: dict) -> None:
    run_dir = make_run(run_id="00aa00", end=None, launcher=alive, step=None)
    with Run(run_dir).journal() as journal:
        journal.metrics(
            1, {"train/loss": 1.0, "startup/time_to_first_step_seconds": 0.0, "throughput/step_seconds": 0.1}
        )
        journal.metrics(2, {"train/loss": 1.0, "throughput/step_seconds": 0.1})
    service.runs.refresh()
    time.sleep(0.3)
    account = get(viewer, "")["goodput"]
    assert account["parts"]["wall"] > 0.25
    assert account["share"] == pytest.approx(account["parts"]["productive"] / account["parts"]["wall"])


def test_a_part_of_an_account_in_a_journal_breaks_no_page(viewer: TestClient, run_dir: Path) -> None:
    with Run(run_dir).journal() as journal:
        journal.metrics(300, {"summary/goodput_percent": 50.0})
    assert get(viewer, "")["goodput"] is None


def test_what_differs_from_the_defaults(viewer: TestClient, run_dir: Path) -> None:
    text = "trainer:\n  name: single\ntrain:\n  batch_size: 4\n  steps: 7\noptimizer:\n  name: adamw\n  lr: 0.5\n"
    (run_dir / "config.yaml").write_text(f"{text}model:\n  name: gpt2_nano\n  params: {{n_layer: 2, n_head: 4}}\n")
    changed = {one["key"]: (one["value"], one["default"]) for one in get(viewer, "")["changed"]}
    assert changed.pop("optimizer.lr")[0] == "0.5"
    assert changed == {
        "trainer.name": ("single", "ddp"),
        "train.steps": ("7", "100"),
        "model.params.n_layer": ("2", "4"),
    }


def test_the_configuration_hides_secrets_and_shows_what_differs(
    service: Service, viewer: TestClient, run_dir: Path, make_run: Maker
) -> None:
    other = make_run(run_id="00bb00", steps=400)
    service.runs.refresh()
    with (run_dir / "config.yaml").open("a") as file:
        file.write(f"model:\n  params:\n    hub_token: {SECRET}\n    note: '${{oc.env:HOME}}'\n")
    found = get(viewer, "/config", against=other.name[-6:])
    assert SECRET not in json.dumps(found)
    assert "${oc.env:HOME}" in found["text"]
    differences = {one["key"]: (one["value"], one["other"]) for one in found["differences"]}
    assert differences["train.steps"] == ("300", "400")
    assert differences["model.params.hub_token"] == ("***", None)
    assert viewer.get("/api/runs/00aa00/config", params={"against": "00cc00"}).status_code == 404


def test_names_of_curves_are_texts_without_secrets(viewer: TestClient, run_dir: Path) -> None:
    values = {"train/\ud800": 1.5, "token=abcdefgh1": 2.5}
    with (run_dir / "journal.jsonl").open("a") as journal:
        journal.write(json.dumps({"event": "metrics", "t": 1_790_000_000_000, "step": 400, "values": values}) + "\n")
    found = get(viewer, "/metrics")
    assert {name: curve["values"] for name, curve in found["curves"].items() if name in ("train/?", "token=***")} == {
        "train/?": [1.5],
        "token=***": [2.5],
    }
    assert set(get(viewer, "")["metrics"]) == set(found["names"]) and "train/?" in found["names"]


def test_of_many_metrics_the_curves_come_before_single_values(viewer: TestClient, run_dir: Path) -> None:
    with Run(run_dir).journal() as journal:
        journal.metrics(101, {f"goodput/{number}": 1.0 for number in range(40)} | {"train/grad_norm": 1.0})
    found = get(viewer, "/metrics")
    assert "train/grad_norm" in found["curves"] and "goodput/9" not in found["curves"]


def test_curves_are_thinned_and_keep_their_peaks(viewer: TestClient, run_dir: Path) -> None:
    with Run(run_dir).journal() as journal:
        for step in range(101, 6000):
            value = 99.0 if step == 3333 else math.nan if step == 4444 else 1 / step
            journal.metrics(step, {"train/loss": value, "few": 1.0} if step < 110 else {"train/loss": value})
    found = get(viewer, "/metrics", names="train/loss,few,unknown")
    assert set(found["curves"]) == {"train/loss", "few"}
    loss = dict(zip(*found["curves"]["train/loss"].values(), strict=True))
    assert 400 < len(loss) <= MOST_POINTS
    assert (loss[3333], loss[4444], max(loss)) == (99.0, None, 5999)
    assert found["curves"]["few"]["steps"] == list(range(101, 110))
    assert found["offset"] == (run_dir / "journal.jsonl").stat().st_size
    thin = get(viewer, "/metrics", names="train/loss", points=50)["curves"]["train/loss"]
    assert len(thin["steps"]) <= 50
    assert 99.0 in thin["values"]
    # What comes later is added; of a step that is repeated the first value stays.
    with Run(run_dir).journal() as journal:
        journal.rewind(5000, "a checkpoint")
        journal.metrics(5500, {"train/loss": 55.0})
        journal.metrics(6000, {"train/loss": 66.0})
    later = get(viewer, "/metrics", names="train/loss")["curves"]["train/loss"]
    assert 55.0 not in later["values"]
    assert (later["steps"][-1], later["values"][-1]) == (6000, 66.0)


def test_a_journal_that_was_replaced_is_read_anew(viewer: TestClient, run_dir: Path) -> None:
    assert get(viewer, "/metrics", names="train/loss")["curves"]["train/loss"]["steps"] == [100]
    (run_dir / "journal.jsonl").unlink()
    with Run(run_dir).journal() as journal:
        journal.metrics(5, {"train/loss": 1.0})
    assert get(viewer, "/metrics", names="train/loss")["curves"]["train/loss"]["steps"] == [5]


@pytest.mark.parametrize("gap", [1, 10, 1000])
def test_a_short_curve_has_all_its_points(gap: int) -> None:
    curve = Thinned()
    for number in range(400):
        curve.add(number * gap, float(number % 7))
    assert curve.curve()["steps"] == [number * gap for number in range(400)]


def test_pages_of_a_log_join(viewer: TestClient, run_dir: Path) -> None:
    text = "".join(f"line {number}\n" for number in range(5000))
    (run_dir / "logs" / "rank-3.log").write_text(text + "unfinished")
    last = get(viewer, "/logs/3", limit=1000)
    assert text.endswith(last["text"]) and last["text"].startswith("line ")
    assert (last["rest"], last["more"], last["next"]) == ("unfinished", False, len(text))
    read, at = "", 0
    while True:
        page = get(viewer, "/logs/3", offset=at, limit=20_000)
        assert page["offset"] == at
        read, at = read + page["text"], page["next"]
        if not page["more"]:
            break
    assert read == text
    assert get(viewer, "/logs/3", offset=3)["text"].startswith("line 1\n")
    assert get(viewer, "/logs/3", offset=10**9)["text"] == ""
    assert viewer.get("/api/runs/00aa00/logs/4").status_code == 404


def test_a_search_finds_lines_and_no_secrets(viewer: TestClient, run_dir: Path) -> None:
    lines = [f"line {number}\n" for number in range(1000)] + [f"token={SECRET}\n", "ERROR: a.b\n"]
    (run_dir / "logs" / "rank-0.log").write_text("".join(lines))
    found = get(viewer, "/logs/0", search="error: A.B")
    assert [one["line"] for one in found["matches"]] == ["ERROR: a.b"]
    at = found["matches"][0]["offset"]
    assert get(viewer, "/logs/0", offset=at)["text"] == "ERROR: a.b\n"
    assert get(viewer, "/logs/0", search="a*b")["matches"] == []
    assert get(viewer, "/logs/0", search=SECRET[:12])["matches"] == []
    first = get(viewer, "/logs/0", search="line")
    assert (len(first["matches"]), first["more"]) == (200, True)
    second = get(viewer, "/logs/0", search="line", offset=first["next"])
    assert second["matches"][0]["line"] == "line 200"


def test_what_a_worker_prints_is_text() -> None:
    raw = "\x1b[31mred\x1b[0m \x1b]0;title\x07<b>\t10 %\r100 %\n" + SECRET + "\n\u202ebackwards\n"
    assert clean(raw.encode()) == "100 %\n***\n?backwards\n"
    assert clean(b"\xff\xfe\n") == "\ufffd\ufffd\n"
    assert len(clean(b"x" * 100_000)) < 5000


@pytest.mark.parametrize("word", [b"=", b"a_", b"x=:", b"://", b"--a ", b"\x1b]", b"\x1b[", b"'a': ", b"token ", b"\r"])
def test_hostile_lines_do_not_take_long(word: bytes) -> None:
    began = time.process_time()
    clean(word * (MOST_BYTES // len(word)))
    clean(b"\n".join([word * 1000] * (MOST_BYTES // len(word) // 1000)))
    assert time.process_time() - began < 5


def test_files_are_attachments(viewer: TestClient, run_dir: Path) -> None:
    (run_dir / "weights").mkdir()
    (run_dir / "weights" / "ä.safetensors").write_bytes(b"\0" * 600_000)
    answer = viewer.get("/api/runs/00aa00/files/weights/ä.safetensors")
    assert answer.content == b"\0" * 600_000
    assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''%C3%A4.safetensors"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-type"] == "application/octet-stream"


def test_a_download_ends_when_its_token_is_revoked(
    viewer: TestClient, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_dir / "weights").mkdir()
    (run_dir / "weights" / "large.safetensors").write_bytes(b"\0" * 600_000)
    answers = iter([True, False])
    monkeypatch.setattr("ortlaunch.serve.api.runs._ASK_SECONDS", 0.0, raising=False)
    monkeypatch.setattr("ortlaunch.serve.api.runs.still_allowed", lambda *_: next(answers), raising=False)
    answer = viewer.get("/api/runs/00aa00/files/weights/large.safetensors")
    assert len(answer.content) == 256 * 1024 < int(answer.headers["content-length"])


def test_raw_files_of_workers_are_for_the_owner(viewer: TestClient, admin: TestClient, run_dir: Path) -> None:
    (run_dir / "logs" / "rank-0.log").write_text("token=hunter2hunter2\n")
    for client, status in ((viewer, 403), (admin, 200)):
        for name in ("logs/rank-0.log", "journal.jsonl"):
            assert client.get(f"/api/runs/00aa00/files/{name}").status_code == status, name


def test_no_file_outside_of_what_may_be_fetched(
    viewer: TestClient, admin: TestClient, run_dir: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside.log"
    outside.write_text("private\n")
    logs = run_dir / "logs"
    (logs / "rank-7.log").symlink_to(outside)
    (run_dir / "weights").symlink_to(tmp_path)
    (logs / "folder.log").mkdir()
    os.mkfifo(logs / "rank-8.log")
    (run_dir / "claims").mkdir()
    (run_dir / "claims" / "1").write_text("{}")
    names = [
        "logs/rank-7.log",
        "weights/outside.log",
        "logs/folder.log",
        "logs/rank-8.log",
        "claims/1",
        "launcher.json",
    ]
    names += [
        "../../../outside.log",
        "..%2f..%2f..%2foutside.log",
        "/etc/passwd",
        "logs/%2e%2e/config.yaml",
        "logs",
        "",
    ]
    names += ["logs//rank-0.log", "%00", "logs/.hidden"]
    for name in names:
        answer = admin.get(f"/api/runs/00aa00/files/{name}")
        assert answer.status_code in (404, 405), name
        assert b"private" not in answer.content
    for rank in ("7", "8", "folder", "%2e%2e", "rank-0", "%2e%2e%2foutside"):
        assert viewer.get(f"/api/runs/00aa00/logs/{rank}").status_code == 404, rank
    (run_dir / "config.yaml").unlink()
    (run_dir / "config.yaml").symlink_to(outside)
    assert viewer.get("/api/runs/00aa00/config").status_code == 422
    (run_dir / "journal.jsonl").unlink()
    (run_dir / "journal.jsonl").symlink_to(outside)
    assert viewer.get("/api/runs/00aa00/metrics").status_code == 422


@pytest.mark.parametrize(
    ("uri", "url"),
    [
        ("https://mlflow.example.org/team/", "https://mlflow.example.org/team/#/runs/a%2F%3Cb%3E"),
        ("http://anna:word12word@[::1]:5000", "http://[::1]:5000/#/runs/a%2F%3Cb%3E"),
        ("sqlite:////tmp/mlflow.db", None),
        ("https://[", None),
        ("https:///runs", None),
    ],
)
def test_the_link_to_mlflow_leads_to_the_run(viewer: TestClient, run_dir: Path, uri: str, url: str | None) -> None:
    (run_dir / "relay.json").write_text(json.dumps({"mlflow_run_id": "a/<b>"}))
    config = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(config.replace("name: none", f"name: mlflow\n  uri: {json.dumps(uri)}"))
    assert get(viewer, "")["mlflow"]["url"] == url
    page = viewer.get("/runs/00aa00").text
    assert "a/&lt;b&gt;" in page and "word12word" not in page
    assert (f'href="{url}"' in page) is (url is not None)


def test_the_page_offers_what_the_api_would_do(
    served: InProcess, make_run: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    unix_user = make_run("by hand", run_id="00aa00", end="KILLED").owner()
    served.service.runs.refresh()
    monkeypatch.setattr("ortlaunch.serve.actor.Actor.call", lambda *_: {"place": ""})
    owner = served.client(served.token("anna.b", Role.runner, unix_user))
    # A user of the service who is named like the Unix user is another one.
    namesake = served.client(served.token(unix_user, Role.runner, "nobody"))
    for client, offered in ((namesake, []), (owner, ["resume", "delete"])):
        panel = client.get("/runs/00aa00/panel")
        assert re.findall(r'data-act="(\w+)"', panel.text) == offered
        status = client.post("/api/runs/00aa00/delete").status_code
        assert (status != 403) is bool(offered), status
