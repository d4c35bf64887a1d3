"""What the children do, as real processes: compose, refuse, start once, stop, export, delete, act for another user."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from ortlaunch.base.secrets import without_secrets_in_words
from ortlaunch.compose.overrides import quoted
from ortlaunch.run.identity import Process
from ortlaunch.run.run import Run
from ortlaunch.serve.act import _LATE_SECONDS, ACTIONS, key_of
from ortlaunch.serve.actor import Actor, Refused, _environment, own_user
from ortlaunch.serve.kept import secrets_among
from ortlaunch.serve.unfit import Unavailable
from tests.support.nightly import first_in_ci
from tests.support.users import needs_root
from tests.support.waiting import until

KEY = "20260101-120000-abcdef"
WORDS = ["model=mlp", "backend=eager", "trainer=single", "tracking=none", "device=cpu", "train.steps=100000"]


@pytest.fixture
def actor(tmp_path: Path) -> Iterator[Actor]:
    yield Actor(tmp_path / "runs")
    for process in psutil.process_iter(["cmdline"]):
        if str(tmp_path) in " ".join(process.info["cmdline"] or ()):
            # It may have ended by itself meanwhile.
            with suppress(psutil.NoSuchProcess):
                process.kill()


def call(actor: Actor, action: str, **request: Any) -> dict[str, Any]:
    return actor.call(own_user(), action, request)


def test_a_check_composes_and_shows_what_would_be_started(actor: Actor, tmp_path: Path) -> None:
    found = call(actor, "check", words=[*WORDS, f"name={quoted('it is')}"], run_key=KEY)
    assert found["slots"] == 1
    assert (found["launcher"], found["steps"], found["experiment"]) == ("local", 100000, "default")
    assert Path(found["run_dir"]).parent == tmp_path / "runs" / "default"
    assert found["run_dir"].endswith("abcdef")
    assert found["words"][-1] == f"launcher.run={KEY}"
    assert "# 1 worker; the run folder would be" in found["plan"]
    assert not (tmp_path / "runs").exists()


def test_the_runs_of_a_script_are_checked_in_one_child(actor: Actor, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    words = ["device=cpu", "tracking=none", "launcher.workers_per_node=2"]
    script = ["--", "train.py", "--lr", "{lr}"]
    asked = [{"words": [*words, f"script.params.lr={lr}", *script], "run_key": KEY} for lr in (0.1, 0.3)]
    first, second = call(actor, "check_sweep", runs=asked)["runs"]
    assert (first["slots"], first["steps"], first["needs"]["cores"]) == (1, None, 2)
    assert first["words"][-5:] == [f"launcher.run={KEY}", *script]
    assert ("--lr 0.1" in first["plan"], "--lr 0.3" in second["plan"]) == (True, True)
    for wrong, said in (([*words, "--", "gone.py"], "no such file"), (["model=mlp", *script], "ortlaunch's own loop")):
        with pytest.raises(Refused, match=said):
            call(actor, "check", words=wrong, run_key=KEY)


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        (["train.tf32=true", "device=cpu"], "train.tf32", "is a format of NVIDIA GPUs"),
        (["launcher.nodes=2", "launcher.master_addr=x"], "launcher.nodes", "choose launcher=slurm"),
        (["data=text"], "data.path", "is not set"),
    ],
)
def test_a_refusal_of_the_rules_names_its_key(actor: Actor, words: list[str], key: str, said: str) -> None:
    with pytest.raises(Refused, match=said) as found:
        call(actor, "check", words=words, run_key=KEY)
    assert found.value.key == key


@pytest.mark.parametrize(
    ("message", "key"),
    [
        ("train.steps=0: must be at least 1", "train.steps"),
        ("resume: train.steps=0: must be", "train.steps"),
        ("data.path is not set: give it", "data.path"),
        ("the folder cannot be made", None),
    ],
)
def test_the_key_of_a_message(message: str, key: str | None) -> None:
    assert key_of(message) == key


def test_a_child_gets_no_secrets_of_the_service(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_SERVICE", "hunter2")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter2")
    for name in ("SECRET_OF_THE_SERVICE", "MLFLOW_TRACKING_PASSWORD"):
        # The API takes no such word; a child would not find the variable either.
        with pytest.raises(Refused, match="not found"):
            call(actor, "check", words=[*WORDS, f"name=${{oc.env:{name}}}"], run_key=KEY)


def test_only_what_asks_the_tracking_server_gets_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter2")
    have = {action for action in ACTIONS if "MLFLOW_TRACKING_PASSWORD" in _environment(action)}
    assert have == {"start"}


@pytest.mark.parametrize("name", ["ORTLAUNCH_CACHE", "ORTLAUNCH_MARCH"])
def test_each_child_finds_what_was_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels have the processor in their name: without it, an image without a compiler would look for one."""
    monkeypatch.setenv(name, "x86-64-v3")
    assert {action: _environment(action).get(name) for action in ACTIONS} == dict.fromkeys(ACTIONS, "x86-64-v3")


def test_each_child_gets_what_the_machine_needs_to_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for action in ACTIONS:
        found = _environment(action)
        assert (found["NCCL_P2P_DISABLE"], found["GLOO_SOCKET_IFNAME"]) == ("1", "lo")


def test_a_child_that_takes_too_long_is_ended(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ortlaunch.serve.actor._SECONDS", 0.05)
    with pytest.raises(Unavailable, match=r"check: no answer within 0\.05 s"):
        call(actor, "check", words=WORDS, run_key=KEY)


def test_what_takes_minutes_keeps_neither_the_queue_nor_a_check_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, actor, inside = threading.Event(), Actor(Path("/nowhere")), threading.Semaphore(0)

    def answer(_actor: Actor, _user: str, action: str, _request: Any) -> dict[str, Any]:
        if action in ("export_weights", "cancel"):
            inside.release()
            assert gate.wait(120)
        return {"action": action}

    monkeypatch.setattr(Actor, "_call", answer)
    monkeypatch.setattr("ortlaunch.serve.actor._TURN_SECONDS", 0.2)
    with ThreadPoolExecutor(6) as pool:
        try:
            waiting = [pool.submit(call, actor, action) for action in ["export_weights", "cancel"] * 3]
            assert all(inside.acquire(timeout=120) for _ in waiting)
            for action in ("start", "outcome", "check", "fields"):
                assert call(actor, action) == {"action": action}
            with pytest.raises(Unavailable, match="compare: 3 requests for the Unix user"):
                call(actor, "compare")
        finally:
            gate.set()


def _says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Lets a script stand in for the children."""
    program = tmp_path / "child"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


@pytest.mark.parametrize("stream", ["", " >&2"])
def test_an_answer_without_end_is_not_collected(
    actor: Actor, tmp_path: Path, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _says(tmp_path, monkeypatch, f"head -c 30000000 /dev/zero{stream}")
    monkeypatch.setattr("ortlaunch.serve.actor._LARGEST_ANSWER", 1_000_000)
    with pytest.raises(Unavailable, match="check: the answer has more than 1,000,000 bytes"):
        call(actor, "check")


def test_what_a_child_says_is_cut_and_controls_no_terminal(
    actor: Actor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written into the log and kept with the job, and the child's user may say anything."""
    _says(tmp_path, monkeypatch, r"printf 'one\n\033[2Jgone' >&2; exit 1")
    with pytest.raises(Unavailable, match=r"check: \?\[2Jgone"):
        call(actor, "check")
    much = r"head -c 300000 /dev/zero | tr '\0' x"
    _says(tmp_path, monkeypatch, f"{much} >&2; exit 1")
    with pytest.raises(Unavailable, match="check: ended with 1 and without an answer"):
        call(actor, "check")
    _says(tmp_path, monkeypatch, f"""printf '{{"refused": "%s", "key": ["x"]}}' "$({much})\"""")
    with pytest.raises(Refused) as refused:
        call(actor, "check")
    assert (len(refused.value.message), refused.value.key) == (20_000, None)


def test_a_child_that_says_much_before_it_reads_is_understood(
    actor: Actor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _says(tmp_path, monkeypatch, "head -c 300000 /dev/zero >&2; wc -c >&2; echo '{\"said\": 1}'")
    assert call(actor, "check", text="x" * 300_000) == {"said": 1}


def test_a_child_that_reads_nothing_and_fails_says_why(
    actor: Actor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _says(tmp_path, monkeypatch, "exec 0<&-; echo no such user >&2; exit 1")
    with pytest.raises(Unavailable, match="check: no such user"):
        call(actor, "check", text="x" * 300_000)


def test_a_folder_that_is_not_there_is_named_without_a_traceback(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    said = f"^check: {folder} cannot be entered by the Unix user {own_user()}: No such file or directory$"
    with pytest.raises(Unavailable, match=said):
        call(Actor(folder / "runs"), "check")


def test_a_child_that_nobody_can_kill_ends_itself() -> None:
    hangs = "import time, ortlaunch.serve.act as act; act._answer = lambda *_: time.sleep(600); act.main()"
    request = json.dumps({"folder": "/", "seconds": 0.1 - _LATE_SECONDS})
    done = subprocess.run([sys.executable, "-c", hangs, "check"], input=request, text=True, timeout=200, check=False)
    assert done.returncode == -signal.SIGALRM


def test_runs_without_a_journal_are_not_compared(actor: Actor, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=f"{tmp_path}/a/journal.jsonl cannot be read: No such file or directory"):
        call(actor, "compare", run_dirs=[f"{tmp_path}/a"])


def starting(actor: Actor, words: list[str] = WORDS, **changes: Any) -> dict[str, Any]:
    checked = call(actor, "check", words=words, run_key=KEY)
    request = {"token": "t", "attempt": 1, "resumes": False, "begun_before": 0, "gpus": None, "run_key": KEY}
    return {**request, "words": checked["words"], "launcher": "local", "run_dir": checked["run_dir"], **changes}


def test_what_is_stopped_before_it_began_never_begins(actor: Actor, tmp_path: Path) -> None:
    request = starting(actor)
    assert call(actor, "start", **request, stopped=True) == {"withdrawn": True}
    # A request that was sent before, and comes late, finds that somebody has taken the record.
    assert not call(actor, "start", **request)["lives"]
    assert not Path(request["run_dir"]).exists()


_OWN_MODEL = """
from ortlaunch.models.feed_forward import FeedForward

def make(hub_token):
    assert hub_token == "hunter2-hunter2", "the secret does not arrive"
    return FeedForward(64, 256, 10)
"""


def test_a_run_starts_once_is_stopped_goes_on_exports_and_is_deleted(actor: Actor, tmp_path: Path) -> None:
    (tmp_path / "own_model.py").write_text(_OWN_MODEL)
    own = ["model=factory", "model.target=own_model:make", "model.params.hub_token='hunter2-hunter2'", "data=digits"]
    request = starting(actor, [*own, *WORDS[1:]])
    # As the service sends them.
    secrets = secrets_among({"model.params.hub_token": "hunter2-hunter2"}, request["words"])
    request |= {"words": without_secrets_in_words(request["words"]), "secrets": secrets}
    assert "model.params.hub_token=***" in request["words"]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: call(actor, "start", **request), range(3)))
    processes = [Process.stored(answer["process"]) for answer in answers]
    assert len(set(processes)) == 1, "asked three times at once, it is one run"
    process, run = processes[0], Run(Path(request["run_dir"]))
    assert process is not None
    assert process.lives
    assert os.getsid(process.pid) == process.pid, "a session of its own"
    _wait(lambda: run.exists and run.state().step)
    assert "hunter2" not in str([one.cmdline() for one in psutil.Process(process.pid).children(recursive=True)])
    assert "hunter2" not in str(psutil.Process(process.pid).cmdline())
    with pytest.raises(Refused, match="is running: stop it first"):
        call(actor, "delete", run_dir=request["run_dir"])
    stop = {"run_dir": request["run_dir"], "process": None, "reason": "it had taken too much"}
    said = [call(actor, "cancel", **stop)["said"] for _ in range(2)]
    assert "still goes on" in said[0]
    # Its workers may have taken the request meanwhile, or have stopped.
    assert any(text in said[1] for text in ("it was asked to stop already", "stopping", "is over already: stopped"))
    _wait(lambda: not process.lives)
    job = {name: request[name] for name in ("token", "attempt", "resumes", "begun_before", "run_dir")}
    found = call(actor, "outcome", jobs=[{"id": "q1", **job}])["jobs"]["q1"]
    assert (found["began"], found["is_over"], found["state"]) == (True, True, "stopped")
    assert re.fullmatch(r"at step \d+: it had taken too much", found["reason"])
    asked = {"run_dir": request["run_dir"], "words": ["train.steps=200000"]}
    with pytest.raises(Refused, match="does not hold this secret") as refused:
        call(actor, "check_resume", **asked)
    assert refused.value.key == "model.params.hub_token"
    checked = call(actor, "check_resume", **asked, secrets=secrets)
    assert (checked["begun_before"], checked["steps"], checked["own_code"]) == (1, 200000, "model.target")
    assert checked["words"] == ["resume", request["run_dir"], "train.steps=200000"]
    exported = call(actor, "export_weights", run_dir=request["run_dir"], is_author=True, secrets=secrets)
    assert any(name.endswith(".safetensors") for name in exported["files"])
    place = Path(call(actor, "delete", run_dir=request["run_dir"])["place"])
    assert place.is_dir()
    assert place.is_relative_to(tmp_path / "runs" / ".bin")
    assert not run.path.exists()


def _wait(holds: Any) -> None:
    until(holds, 200)


def test_a_command_that_refuses_is_told_apart_from_one_that_was_killed(actor: Actor) -> None:
    request = starting(actor, token="refused")
    request["words"] = [*request["words"], "train.tf32=true"]
    process = Process.stored(call(actor, "start", **request)["process"])
    assert process is not None
    _wait(lambda: not process.lives)
    (actor.root / ".starts" / "other.1.json").write_text("{}")
    jobs = [{"id": "q1", **request}, {"id": "q2", **request, "token": "other"}]
    found = call(actor, "outcome", jobs=jobs)["jobs"]
    assert found["q1"]["refusal"].startswith("train.tf32=true is a format of NVIDIA GPUs")
    assert (found["q2"]["refusal"], found["q2"]["began"]) == ("", False)


@pytest.mark.parametrize("action", first_in_ci(["delete", "cancel", "check_resume", "export_weights"], 2))
def test_nothing_is_done_outside_the_run_root(actor: Actor, tmp_path: Path, action: str) -> None:
    outside = tmp_path / "elsewhere" / "e" / "20260101-120000-x-abcdef"
    outside.mkdir(parents=True)
    for name in ("config.yaml", "journal.jsonl"):
        (outside / name).write_text("")
    link = tmp_path / "runs" / "e" / outside.name
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    for place in (outside, link):
        with pytest.raises(Refused, match="is no run folder of"):
            call(actor, action, run_dir=str(place), words=[])
    assert outside.is_dir()


def test_the_request_of_a_run_from_a_command_line(actor: Actor, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "e" / "20260101-120000-x-abcdef"
    folder.mkdir(parents=True)
    (folder / "overrides.yaml").write_text(
        "['+jobs=llama', 'train.steps=7', \"name='a b'\", 'model=a,b', '--multirun']"
    )
    found = call(actor, "keys", run_dir=str(folder))
    assert found == {
        "job": "llama",
        "keys": {"train.steps": 7, "name": "a b"},
        "script": "",
        "left_out": ["model=a,b", "--multirun"],
    }


def test_a_user_who_is_not_listed_is_refused(actor: Actor, tmp_path: Path) -> None:
    listed = Actor(actor.root, tmp_path / "unix_users")
    for one in (actor, listed):
        with pytest.raises(Refused, match="may not act for the Unix user nobody"):
            one.call("nobody", "check", {"words": WORDS, "run_key": KEY})
    (tmp_path / "unix_users").write_text("# those of the team\n\n  nobody \n  # and\n")
    (tmp_path / "unix_users").chmod(0o644)
    assert listed.may_act_for("nobody")
    assert not any(listed.may_act_for(name) for name in ("root2", "", "# and", "# those of the team"))


@needs_root
def test_another_unix_user_checks_in_a_folder_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sudo = tmp_path / "bin" / "sudo"
    sudo.parent.mkdir()
    # Stands in for `sudo -n -u USER -- COMMAND`, with the few variables that it leaves. The user may read the tree of
    # these tests, which may be below a folder of root's.
    sudo.write_text(
        '#!/bin/sh\n[ "$1 $2 $4" = "-n -u --" ] || exit 9\nuser=$3; shift 4\nexec setpriv --reuid=$user '
        "--regid=65534 --clear-groups --inh-caps=+dac_read_search --ambient-caps=+dac_read_search "
        'env -i PATH="$PATH" PYTHONPATH="$PYTHONPATH" HOME=/tmp/none "$@"\n'
    )
    sudo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sudo.parent}:{os.environ['PATH']}")
    for folder in (tmp_path, *tmp_path.parents):
        if folder != Path("/") and folder.owner() == "root":
            folder.chmod(folder.stat().st_mode | 0o055)
    (tmp_path / "unix_users").write_text("nobody\n")
    own = tmp_path / "runs" / "nobody"
    own.mkdir(parents=True)
    os.chown(own, 65534, 65534)
    found = Actor(tmp_path / "runs", tmp_path / "unix_users").call("nobody", "check", {"words": WORDS, "run_key": KEY})
    assert Path(found["run_dir"]).parents[1] == own
