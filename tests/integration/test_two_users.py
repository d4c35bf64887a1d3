"""Two Unix users and one run root: what one of them plants, the other's commands neither run, send nor signal.

The users are two numbers without an account. Their commands may read every file, as root's Python may lie in a folder
that is closed to others; what they own and what they may write is as for any user. `plain` is without that right.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.environment import environment
from tests.support.runs import journal
from tests.support.users import needs_root

pytestmark = [
    pytest.mark.nightly,
    needs_root,
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv (util-linux)"),
]
SECONDS = 120
SMALL = ("model=mlp", "data=digits", "backend=eager", "trainer=single", "train.batch_size=4", "device=cpu")
SECRET = "glpat-Hunter2HunterHunter2Hunter"
ESCAPE = "\x1b]0;owned\x07\x1b[2Jevil"


@dataclass(frozen=True)
class User:
    """A Unix user with a home below the shared folder."""

    number: int
    home: Path
    root: Path
    """The run root, which both share."""

    def prefix(self, *, may_read: bool = True) -> list[str]:
        """What is put before a command to run it as this user."""
        rights = "+dac_read_search" if may_read else "-all"
        words = ["setpriv", f"--reuid={self.number}", f"--regid={self.number}", "--clear-groups"]
        return [*words, f"--inh-caps={rights}", f"--ambient-caps={rights}", "--bounding-set=-all,+dac_read_search"]

    @property
    def environment(self) -> dict[str, str]:
        return environment() | {"HOME": str(self.home), "ORTLAUNCH_CACHE": str(self.home / "cache"), "USER": "x"}

    def start(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        """Starts ``ortlaunch WORDS...`` in this user's home."""
        return subprocess.Popen(
            [*self.prefix(), sys.executable, "-m", "ortlaunch", *words],
            cwd=self.home,
            env=self.environment | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, **variables: str) -> tuple[int, str]:
        """Runs it to its end; returns the exit code and all that was printed."""
        process = self.start(*words, **variables)
        try:
            stdout, stderr = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
        return process.returncode, stdout + stderr

    def train(self, *words: str) -> Path:
        """Trains a run; returns its folder."""
        code, said = self.run(*SMALL, f"run_root={self.root}", *words)
        assert code == 0, said
        (found,) = set(re.findall(r"^run folder: (.*)$", said, re.MULTILINE))
        return Path(found)

    def plain(self, script: str) -> tuple[int, str]:
        """Runs a shell script with no right beyond the user's."""
        command = [*self.prefix(may_read=False), "sh", "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd="/")
        return done.returncode, done.stdout + done.stderr

    def owns(self, path: Path) -> None:
        """Makes this user the owner of a file or of a folder with all that is in it."""
        for one in (path, *path.rglob("*")):
            os.chown(one, self.number, self.number, follow_symlinks=False)


@pytest.fixture(scope="module")
def users() -> Iterator[tuple[User, User]]:
    """Ann, who is attacked, and Mallory, with a run root that both may write."""
    shared = Path(tempfile.mkdtemp(prefix="two-users-"))
    shared.chmod(0o755)
    root = shared / "runs"
    root.mkdir()
    root.chmod(0o1777)
    found = []
    for number, name in ((20001, "ann"), (20002, "mallory")):
        user = User(number, shared / name, root)
        user.home.mkdir(mode=0o755)
        user.owns(user.home)
        found.append(user)
    yield found[0], found[1]
    shutil.rmtree(shared)


@pytest.fixture(scope="module")
def trap(users: tuple[User, User]) -> Path:
    """A file that planted code would make."""
    return users[0].home / "code-of-mallory-ran"


@pytest.fixture
def planted(users: tuple[User, User], trap: Path, theirs: Path) -> Path:
    """Mallory's run, in which everything that could be planted is."""
    mallory = users[1]
    (mallory.home / "planted.py").write_text(f"open({str(trap)!r}, 'w').close()\ndef build(): ...\n")
    config = (theirs / "config.yaml").read_text()
    (theirs / "config.yaml").write_text(re.sub(r"(?m)^(  target:).*$", r"\1 planted:build", config))
    for step in (theirs / "checkpoints").glob("step-*"):
        for name in (".metadata", "worker-0.pt", "model.pt"):
            (step / name).write_bytes(pickle.dumps(_Trap(str(trap))))
    mallory.owns(theirs)
    return theirs


@pytest.fixture(scope="module")
def theirs(users: tuple[User, User]) -> Path:
    return users[1].train("name=theirs", "train.steps=4", "train.checkpoint_every=4", "tracking=none")


class _Trap:
    """Makes a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (self.path, "w")


def test_the_trap_shuts(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(_Trap(str(tmp_path / "shut"))))
    assert (tmp_path / "shut").exists()


def test_nothing_of_the_others_run_is_continued_or_loaded(users: tuple[User, User], planted: Path, trap: Path) -> None:
    ann, mallory = users
    before = {path: path.stat().st_mtime_ns for path in planted.rglob("*")}
    for words in (
        ["resume", str(planted)],
        ["cancel", str(planted)],
        ["export", "weights", str(planted), "--out", "out"],
        ["export", "weights", str(planted / "checkpoints" / "latest"), "--out", "out"],
        ["export", "onnx", f"from_run={planted}", "out=out"],
        [*SMALL, f"train.resume={planted}/checkpoints/latest", "train.steps=8", "tracking=none"],
    ):
        code, said = ann.run(*words, PYTHONPATH=f"{environment()['PYTHONPATH']}:{mallory.home}")
        assert code == 2 and f"belongs to the user {mallory.number}" in said, (words, said)
        assert len(said.splitlines()) <= 6 and not trap.exists(), (words, said)
    assert not (ann.home / "out").exists() and not (ann.home / "runs").exists()
    assert {path: path.stat().st_mtime_ns for path in planted.rglob("*")} == before


def test_a_planted_journal_sends_no_file_and_asks_no_server(users: tuple[User, User], planted: Path) -> None:
    ann, mallory = users
    secret = ann.home / "id_ed25519"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    ann.owns(secret)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        uri = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = (planted / "config.yaml").read_text()
        (planted / "config.yaml").write_text(
            re.sub(r"(?ms)^tracking:\n.*?(?=^\S)", f"tracking:\n  name: mlflow\n  uri: {uri}\n", config)
        )
        with (planted / "journal.jsonl").open("a") as file:
            for path in (secret, "../../../ann/id_ed25519"):
                event = {"event": "artifact", "t": time.time(), "path": str(path), "artifact_path": "x"}
                file.write(json.dumps(event) + "\n")
        mallory.owns(planted)
        code, said = ann.run("sync", str(planted))
        assert code == 2 and "--uri" in said, said
        with pytest.raises(TimeoutError):
            listener.accept()
    code, said = ann.run("sync", str(planted), "--uri", f"sqlite:///{ann.home}/own.db")
    assert (ann.home / "own.db").exists(), said
    held = [path for path in ann.home.rglob("*") if path.is_file() and path != secret and path.suffix != ".pyc"]
    assert not [path for path in held if SECRET.encode() in path.read_bytes()]


def test_a_planted_process_is_not_signalled(users: tuple[User, User], planted: Path) -> None:
    ann, mallory = users
    victim = subprocess.Popen([*ann.prefix(), "sleep", str(SECONDS)])
    programs = ann.home / "bin"
    programs.mkdir()
    for name in ("scancel", "squeue", "sacct", "scontrol"):
        (programs / name).write_text(f'#!/bin/sh\necho "$@" >> {programs}/asked\n')
        (programs / name).chmod(0o755)
    ann.owns(programs)
    try:
        ticks = int(Path(f"/proc/{victim.pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
        lines = [line for line in (planted / "journal.jsonl").read_text().splitlines() if '"end"' not in line]
        (planted / "journal.jsonl").write_text("\n".join(lines) + "\n")
        (planted / "done").unlink(missing_ok=True)
        process = {"pid": victim.pid, "host": socket.gethostname(), "start_ticks": ticks}
        job = {"scheduler": "slurm", "job_id": "--user=root"}
        for name, content in (("launcher.json", process), ("job.json", job)):
            (planted / name).write_text(json.dumps(content))
            mallory.owns(planted)
            for trusted in ("", str(planted)):
                path = f"{programs}:{os.environ['PATH']}"
                code, said = ann.run("cancel", str(planted), PATH=path, ORTLAUNCH_TRUST=trusted)
                # A planted job is no job: then nothing of the run is left that could be cancelled.
                assert code == 2 or (name == "job.json" and "is over already" in said), said
                assert len(said.splitlines()) <= 6, said
        assert victim.poll() is None
        assert not (programs / "asked").exists() or "--user=root" not in (programs / "asked").read_text().split()
    finally:
        victim.kill()
        victim.wait()


def test_what_is_shown_of_it_moves_no_cursor(users: tuple[User, User], planted: Path) -> None:
    ann, mallory = users
    with (planted / "journal.jsonl").open("a") as file:
        event = {"event": "failure", "t": time.time(), "rank": 0, "host": f"h{ESCAPE}", "message": f"m{ESCAPE}"}
        file.write(json.dumps(event) + "\n")
    with (planted / "logs" / "rank-0.log").open("a") as file:
        file.write(f"log{ESCAPE}\n")
    mallory.owns(planted)
    for words in (["jobs", "--root", str(ann.root)], ["status", str(planted)], ["logs", str(planted)]):
        code, said = ann.run(*words)
        assert code in (0, 1) and said
        assert all(line.replace("\t", "").isprintable() for line in said.split("\n")), (words, said)


def test_both_have_runs_in_one_experiment(users: tuple[User, User], theirs: Path) -> None:
    mine = users[0].train("name=mine", "train.steps=2", "tracking=none")
    assert mine.parent == theirs.parent and mine.stat().st_uid != theirs.stat().st_uid


def test_a_run_that_trains_cannot_be_ended_changed_or_read_for_its_secrets(users: tuple[User, User]) -> None:
    ann, mallory = users
    words = (*SMALL, f"run_root={ann.root}", "experiment=hers", "train.steps=1000000", "train.log_every=50")
    running = ann.start(*words, "tracking=none", NCCL_NOTE=SECRET)
    try:
        deadline = time.monotonic() + SECONDS
        hers: Path | None = None
        while hers is None and time.monotonic() < deadline and running.poll() is None:
            time.sleep(0.2)
            trains = (
                path.parent
                for path in ann.root.glob("hers/*/journal.jsonl")
                if any("train/loss" in str(one) for one in journal(path.parent))
            )
            hers = next(trains, None)
        assert hers is not None, running.communicate()
        for verb in ("cancel", "resume"):
            code, said = mallory.run(verb, str(hers))
            assert code == 2 and f"belongs to the user {ann.number}" in said, (verb, said)
        changes = [
            f"for f in $(find {hers}); do echo x >> $f; done",
            f"rm -rf {hers}; mv {hers} {hers}.away; touch {hers}/stop {hers}/checkpoints/x",
            f"kill {running.pid}; kill -9 {running.pid}",
        ]
        assert SECRET not in mallory.plain(f"grep -r '' {hers}")[1]
        before = (hers / "config.yaml").read_text()
        for script in changes:
            mallory.plain(script)
        assert (hers / "config.yaml").read_text() == before and running.poll() is None
        assert not list(hers.rglob("x"))
        last = len(journal(hers))
        code, said = ann.run("cancel", str(hers))
        assert code == 0, said
        assert running.wait(SECONDS) == 130
        assert len(journal(hers)) > last and list((hers / "checkpoints").glob("step-*"))
    finally:
        running.kill()
        running.communicate()
