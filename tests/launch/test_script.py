"""A script of the user's own: its words, its record, and the watch over its workers, without torchrun."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed

from ortlaunch.base.errors import RequestError
from ortlaunch.config.load import load_config, load_run_config, save_config
from ortlaunch.config.schema import LocalConfig, NoTrackingConfig, ScriptConfig, ScriptRun
from ortlaunch.launch.exchange import NO_COLLECTIVE, NO_GROUP, Exchange
from ortlaunch.launch.samples import Samples
from ortlaunch.launch.script_watch import ScriptWatch, _Worker
from ortlaunch.launch.work import Script, arguments_of
from ortlaunch.run import failure
from ortlaunch.run.liveness import is_worker_of
from ortlaunch.run.run import Run
from tests.metrics.test_system import Nvml
from tests.support.cli import answer
from tests.support.waiting import until


def script_run(folder: Path, *command: str, **keys: Any) -> ScriptRun:
    return ScriptRun(
        launcher=LocalConfig(**{name: keys.pop(name) for name in ("grace_seconds", "timeout_seconds") if name in keys}),
        tracking=NoTrackingConfig(),
        script=ScriptConfig(command=list(command), folder=str(folder), **keys),
    )


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--lr 3e-4 --steps=20 --fast", {"lr": "3e-4", "steps": "20", "fast": "true"}),
        ("lr=3 +model.width=8 ~x=", {"lr": "3", "model.width": "8", "x": ""}),
        ("data.bin --betas 0.9 0.99 -v --shift -1", {"betas": "0.9 0.99", "v": "true", "shift": "-1"}),
        ("--filter a=b", {"filter": "true", "a": "b"}),
        ("-- --", {}),
    ],
)
def test_parameters_are_parsed_from_the_arguments(words: str, found: dict[str, str]) -> None:
    assert arguments_of(words.split()) == found


def test_params_fill_the_arguments_and_nothing_else(tmp_path: Path) -> None:
    config = script_run(tmp_path, "train.py", "--lr={lr}", "{other}", '{"a": 1}', params={"lr": 1e-4})
    assert Script(config).words() == ["train.py", "--lr=0.0001", "{other}", '{"a": 1}']
    assert Script(config).command()[0] == str(tmp_path)


def test_the_run_folder_leads_to_the_same_script_and_to_no_model(tmp_path: Path) -> None:
    config = script_run(tmp_path, "train.py", "--note", "it's = -- ünïcode\n", params={"x": [1]})
    save_config(config, tmp_path / "config.yaml")
    assert load_run_config(tmp_path / "config.yaml") == config
    with pytest.raises(RequestError, match="is the run of a script: it has no model"):
        load_config(tmp_path / "config.yaml")


REFUSED = {
    "absent.py": "absent.py: no such file (started in {})",
    "": "--: no script follows",
    "run.sh": "run.sh: no Python file: its name must end in .py",
    "folder": "folder is a folder: give a Python file in it",
    "-u train.py": "-- -u: a script or -m and a module comes first",
    "-m": "-m names no module",
    "train.py ${x}": "${{x}}: an argument with ${{ cannot be recorded",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_no_script_is_refused_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: str
) -> None:
    for name in ("train.py", "run.sh"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    before = set(tmp_path.iterdir())
    result = answer(tmp_path, capfd, "tracking=none", "--", *words.split())
    assert result.returncode == 2
    assert result.stderr.startswith(f"ortlaunch: {REFUSED[words].format(tmp_path)}")
    assert result.stderr.count("\n") == 1
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("script.params.lr=1", "script.params.lr: no argument has {lr} in it"),
        ("train.batch_size=3", "train.batch_size=3: a script has a loop of its own"),
        ("backend=nix", "backend=nix: no such option"),
        ("backend=auto", "backend=auto: ortlaunch cannot try a script's model"),
        ("backend=ort trainer=deepspeed trainer.zero_stage=3", "ONNX Runtime gets a script's model as a whole"),
        ("model=gpt2", "model=gpt2: model is a key of ortlaunch's own loop"),
        ("script.signal=SIGFOO", "script.signal=SIGFOO: must be one of SIGTERM"),
        ("script.typo=1", "script.typo: no such key"),
    ],
)
def test_a_key_that_a_script_has_not_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], key: str, said: str
) -> None:
    (tmp_path / "train.py").touch()
    result = answer(tmp_path, capfd, *key.split(), "--", "train.py")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert said in result.stderr


@pytest.mark.parametrize("verb", ["bench", "tune", "estimate", "check"])
def test_a_command_that_takes_no_script_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str], verb: str) -> None:
    result = answer(tmp_path, capfd, verb, "--", "train.py")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("ortlaunch: --: this command takes no script")


def test_a_dry_run_shows_the_whole_command_and_the_other_machines_lines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    keys = ["launcher.dry_run=true", "script.params.lr=3"]
    script = ["--", "train.py", "--lr", "{lr}", "--", "launcher.run=mine"]
    shown = answer(tmp_path, capfd, *keys, *script).stdout
    assert f"{tmp_path} {sys.executable} -u train.py --lr 3 -- launcher.run=mine\n" in shown
    machines = answer(tmp_path, capfd, "launcher.nodes=2", "launcher.master_addr=localhost", *keys, *script).stdout
    assert machines.count("launcher.node_rank=1 -- train.py --lr '{lr}' -- launcher.run=mine\n") == 1
    batch = answer(tmp_path, capfd, "launcher=slurm", *keys, *script)
    assert batch.returncode == 0, batch.stderr
    assert "#SBATCH --job-name=train\n" in batch.stdout


class Watched:
    """Workers of this process, as torchrun would have started them, and the watch over them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = Run(folder)
        self.run.logs.mkdir()
        with self.run.journal() as journal:
            journal.start("e", "n", "abc123")
        self.workers: list[subprocess.Popen[bytes]] = []

    def start(self, code: str, **keys: Any) -> ScriptWatch:
        """Starts two workers that execute this code, and waits until both have printed."""
        save_config(script_run(self.folder, "train.py", **keys), self.run.config_file)
        watch = ScriptWatch(self.run)
        watch.start()
        for rank in range(2):
            own = {"RANK": str(rank), "ORTLAUNCH_RUN_DIR": str(self.folder), "PYTHONFAULTHANDLER": "1"}
            with self.run.rank_log(rank).open("wb") as log:
                command = [sys.executable, "-uc", code]
                self.workers.append(subprocess.Popen(command, env={**os.environ, **own}, stdout=log, stderr=log))
        until(lambda: all(self.run.rank_log(rank).stat().st_size for rank in range(2)))
        return watch

    def codes(self) -> list[int]:
        return [worker.wait(20) for worker in self.workers]


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr("ortlaunch.launch.script_watch._SAMPLE_SECONDS", 0.3)
    scene = Watched(tmp_path)
    yield scene
    for worker in scene.workers:
        worker.kill()
        worker.wait()


COUNTS = """
import signal, sys, time
signal.signal(signal.{}, lambda *_: print("asked", flush=True))
print("up")
{}
"""


def test_a_request_to_stop_reaches_each_worker_once_as_its_signal(
    watched: Watched, capfd: pytest.CaptureFixture[str]
) -> None:
    watch = watched.start(
        COUNTS.format("SIGUSR1", "for _ in range(4): time.sleep(0.5)"), signal="SIGUSR1", grace_seconds=60
    )
    until(lambda: watched.run.beating_ranks() == [0, 1] or watched.run.beating_ranks() == [1, 0])
    assert is_worker_of(watched.workers[0].pid, watched.run)
    watched.run.ask_to_stop("requeue")
    assert watched.codes() == [0, 0]
    watch.end(in_order=True)
    assert [watched.run.rank_log(rank).read_text().split() for rank in range(2)] == [["up", "asked"]] * 2
    # Exit code 0 is no finish when the run was asked to stop.
    assert (watched.run.stopped().reason, watched.run.is_done()) == ("requeue", False)  # type: ignore[union-attr]
    assert capfd.readouterr().out.split() == ["up", "asked"]
    assert watched.run.beating_ranks() == []


def test_a_worker_that_starts_after_the_request_does_not_begin(watched: Watched) -> None:
    watched.run.ask_to_stop("cancel")
    for rank in range(2):
        words = [str(watched.folder), str(watched.folder), sys.executable, "-c", "print('begun')"]
        worker = [sys.executable, "-m", "ortlaunch.worker", *words]
        assert subprocess.run(worker, env={**os.environ, "RANK": str(rank)}, check=False, timeout=60).returncode == 0
        assert watched.run.rank_log(rank).read_text() == "the run was asked to stop before the script began\n"
    watch = ScriptWatch(watched.run)
    watch.start()
    watch.end(in_order=True)
    assert (watched.run.stopped().reason, watched.run.is_done()) == ("cancel", False)  # type: ignore[union-attr]


def test_an_attached_script_that_was_done_when_it_was_asked_to_stop_is_done(watched: Watched) -> None:
    watched.run.ask_to_stop("cancel")
    watch = ScriptWatch(watched.run)
    watch.start()
    until(lambda: watch._asked is not None)
    watched.run.note_done(14)
    watch.end(in_order=True)
    assert (watched.run.stopped(), watched.run.is_done()) == (None, True)


def test_a_script_that_ignores_the_signal_is_ended_after_the_grace_period(watched: Watched) -> None:
    watch = watched.start(COUNTS.format("SIGTERM", "time.sleep(600)\ntime.sleep(600)"), grace_seconds=1)
    watched.run.ask_to_stop()
    assert watched.codes() == [-signal.SIGKILL] * 2
    watch.end(in_order=False)
    assert watched.run.stopped() is not None


def test_what_leaves_the_workers_tree_ends_with_them(watched: Watched) -> None:
    code = (
        "import subprocess as s, sys\n"
        "print(s.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True).pid)"
    )
    watch = watched.start(code)
    assert watched.codes() == [0, 0]
    left = [psutil.Process(int(watched.run.rank_log(rank).read_text())) for rank in range(2)]
    watch.end(in_order=True)
    assert psutil.wait_procs(left, timeout=10)[1] == []


def test_workers_that_only_wait_are_ended_with_their_stacks(watched: Watched) -> None:
    watch = watched.start("import time\nprint('up')\ntime.sleep(600)", timeout_seconds=1)
    assert watched.codes() == [-signal.SIGABRT] * 2
    watch.end(in_order=False)
    assert 'File "<string>", line 3' in watched.run.rank_log(1).read_text()
    found = failure.first(watched.folder)
    assert found is not None
    assert "no progress for 1 s (launcher.timeout_seconds)" in found.message
    assert (watched.run.is_done(), watched.run.stopped()) == (False, None)


@pytest.mark.parametrize(("busy", "limit"), [("print('on')", 1), ("sum(range(10**6))", 2)], ids=["prints", "computes"])
def test_a_worker_that_prints_or_computes_does_not_hang(watched: Watched, busy: str, limit: int) -> None:
    code = (
        f"import time\nprint('up')\nend = time.time() + {2 * limit}\nwhile time.time() < end: {busy}; time.sleep(0.01)"
    )
    watch = watched.start(code, timeout_seconds=limit)
    assert watched.codes() == [0, 0]
    watch.end(in_order=True)
    assert watched.run.is_done()


TORCH = """
import sys, torch, torch.distributed as dist
print("up", flush=True)
for act in (lambda: dist.init_process_group("gloo"), lambda: dist.all_reduce(torch.ones(1)), lambda: None):
    sys.stdin.readline()
    act()
    print("done", flush=True)
"""


def test_workers_that_exchange_nothing_are_told_from_those_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Around torchrun the store is in the process that watches, as it is here."""
    monkeypatch.setattr("ortlaunch.launch.exchange._QUIET_SECONDS", 3.0)
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    started = {}
    for rank in "01":
        variables = {**os.environ, **place, "RANK": rank, "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "0"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        worker = subprocess.Popen([sys.executable, "-c", TORCH], env=variables, text=True, bufsize=1, **pipes)
        started[worker] = variables
    workers = {worker.pid: variables for worker, variables in started.items()}
    exchange, said, now = Exchange(), [], 0.0
    try:
        for _ in range(3):
            assert [worker.stdout.readline() for worker in started] in (["up\n"] * 2, ["done\n"] * 2)
            for _ in range(4):
                exchange.look(workers, now)
                said.append(exchange.said())
                now += 1.0
            for worker in started:
                worker.stdin.write("\n")
    finally:
        for worker in started:
            worker.communicate("\n\n\n", timeout=60)
    # Seen for a moment, a process group without a collective tells nothing.
    assert said == ["", *[NO_GROUP] * 3, *[""] * 3, NO_COLLECTIVE, *[""] * 4]


def test_memory_and_load_are_journalled(watched: Watched) -> None:
    samples = Samples(watched.run)
    go = watched.folder / "go"
    # A forked child shares its memory.
    code = (
        f"import os\nkept = bytearray(200 << 20)\nprint('up')\nos.fork()\nwhile not os.path.exists({str(go)!r}): pass"
    )
    watch = watched.start(code)
    until(lambda: all(watched.run.beat(rank).get("rss_gib", 0) > 0.19 for rank in range(2)))
    samples._looked = 0.0
    samples.look()
    go.touch()
    assert watched.codes() == [0, 0]
    watch.end(in_order=True)
    samples.journal()
    figures = watched.run.state().figures
    assert 200 / 1024 < figures["summary/peak_memory_gib"] < 0.3
    assert figures.keys() >= {"memory/rss_gib", "system/rank-1/memory_gib", "system/rank-0/cpu_utilization_percentage"}


def test_a_workers_gpu_is_journalled_and_its_memory_is_what_compares(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    worker = _Worker(psutil.Process(), {"RANK": "1", "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "2"}, 0.0)
    worker.sample(1.0, 0)
    watched.run.health.mkdir()
    watched.run.beat_file(1).write_text(json.dumps(worker.beat()))
    samples = Samples(watched.run)
    samples._read()
    samples.journal()
    figures = watched.run.state().figures
    assert figures["system/rank-1/gpu_utilization_percentage"] == 73.0
    assert figures["system/rank-1/gpu_memory_gib"] == figures["summary/peak_memory_gib"] == 2.0


def test_what_other_nodes_log_is_taken_over(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.logs.mkdir()
    with run.journal() as journal:
        journal.start("e", "n", "abc123")
    samples = Samples(run)
    with run.spool_file(1).open("w") as spool:
        spool.write(json.dumps({"event": "metrics", "t": 1, "step": 3, "values": {"loss": 2.5}}) + "\n")
    for _ in range(2):
        samples.journal()
    assert run.state().figures == {"loss": 2.5}
    assert run.journal_file.read_text().count("loss") == 1


def test_progress_is_the_newest_file_among_the_checkpoints(tmp_path: Path) -> None:
    run, work = Run(tmp_path), Script(script_run(tmp_path, "train.py"))
    assert work.progress(run) == ""
    (run.checkpoints / "a").mkdir(parents=True)
    (run.checkpoints / "a" / "model.pt").touch()
    first = work.progress(run)
    os.utime(run.checkpoints / "a" / "model.pt", ns=(2**61, 2**61))
    assert first != work.progress(run) != ""


def test_a_finished_script_has_nothing_left_and_keeps_its_command(tmp_path: Path) -> None:
    one = script_run(tmp_path, "train.py", "--lr", "1")
    other = dataclasses.replace(one, script=dataclasses.replace(one.script, command=["train.py", "--lr", "2"]))
    assert "its script ended with exit code 0" in Script(one).nothing_left(Script(one))
    kept = [list(Script(one).identity(Script(now), has_checkpoint=False)) for now in (one, other)]
    differing = [[key for key, old, new in keys if old != new] for keys in kept]
    assert differing == [[], ["script.command"]]
