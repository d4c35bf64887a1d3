"""What sending its record costs a run: ``python -m tests.benchmarks.bench_tracking [SERVER ...]``.

One run for each kind of server, on half of the cores, which its workers fill. It logs every step; a relay beside it on
the same cores, as a job on SLURM has one, is stopped and let go on in turns (SIGSTOP, SIGCONT), so that the very same
processes are timed with and without it. A turn with it begins when it has sent what was journalled in the one before.
The server has the other half of the cores, as it has a machine of its own in earnest, except where the line says so.
A ratio is that of the mean step of two turns that follow each other; the line without a server, whose relay does
nothing, shows what the machine's noise makes of it. Afterwards the rest is sent, and the points in MLflow are counted.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing import get_context
from pathlib import Path

from ortlaunch.compare.statistics import mean_of
from ortlaunch.config.schema import MlflowConfig
from ortlaunch.tracking.journal import read_events
from ortlaunch.tracking.relay import Relay, sync
from tests.support.servers import Server, between, free_port, points, silent

WORDS = (
    "model=gpt2_nano",
    "backend=eager",
    "trainer=ddp",
    "train.log_every=1",
    "train.steps=1000000",
    "train.save_weights=false",
    "tracking=none",
)
PAIRS = int(os.environ.get("ORTLAUNCH_BENCH_PAIRS", "8"))
TURN_SECONDS = 10.0
"""Twice what the relay gathers before it sends."""
_CATCH_UP_SECONDS = 3.0
_CORES = sorted(os.sched_getaffinity(0))
_OURS, _OTHERS = _CORES[: max(1, len(_CORES) // 2)], _CORES[len(_CORES) // 2 :]
_SETTLE_SECONDS = 0.25
"""At a turn's beginning: left out, for a step may lie in both."""
_SLOW_SECONDS = 0.2
_WARM_STEPS = 50

Place = Callable[[], AbstractContextManager[str | None]]
Turn = tuple[float, float, bool]
"""Begin and end in milliseconds since the epoch, and whether the relay ran."""


def main() -> None:
    """Measures and prints."""
    print(f"{PAIRS} pairs of turns of {TURN_SECONDS:g} s; 2 workers on {len(_OURS)} cores, every step logged")
    print(
        f"{'server':<24} {'step ms':>8} {'with/without':>13} {'95 % interval':>15}  points: journalled, missing, double"
    )
    only = sys.argv[1:]
    os.sched_setaffinity(0, _OTHERS)
    # So that what was started is ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as folder:
        for name, place in _places(Path(folder)).items():
            if only and name not in only:
                continue
            with place() as uri:
                _report(name, uri, Path(folder))


def _places(folder: Path) -> dict[str, Place]:
    @contextmanager
    def answering(*within: str) -> Iterator[str]:
        place = Path(tempfile.mkdtemp(dir=folder, prefix="server-"))
        server = Server(place, within=within)
        server.up()
        try:
            yield server.uri
        finally:
            server.kill()

    @contextmanager
    def slowly() -> Iterator[str]:
        with answering() as uri, between(uri, lambda path: time.sleep(_SLOW_SECONDS)) as way:
            yield way

    return {
        "none": lambda: nullcontext(None),
        "never there": lambda: nullcontext(f"http://127.0.0.1:{free_port()}"),
        "never answers": silent,
        f"answers after {_SLOW_SECONDS:g} s": slowly,
        "answers": answering,
        "on the run's cores": lambda: answering(*_on(_OURS), "nice", "-n", "19"),
        "none, but SQLite": lambda: nullcontext(f"sqlite:///{folder}/embedded.db"),
    }


def _on(cores: list[int]) -> list[str]:
    return ["taskset", "-c", ",".join(map(str, cores))]


def _report(name: str, uri: str | None, folder: Path) -> None:
    with _training(folder) as run_dir:
        turns = _take_turns(run_dir, uri)
    steps = [
        (event["t"], event["values"]["throughput/step_seconds"])
        for event in read_events(run_dir / "journal.jsonl", 0)[0]
        if "throughput/step_seconds" in event.get("values", {})
    ]
    means = [_mean_step(steps, turn) for turn in turns]
    # With and without follow each other in either order, so that a machine that becomes slower favours none.
    ratios = [means[n + (not turns[n][2])] / means[n + turns[n][2]] for n in range(0, len(means), 2)]
    ratio = mean_of(ratios)
    assert ratio is not None and ratio.interval is not None
    step = 1000 * statistics.median(means)
    low, high = ratio.interval
    interval = f"{low:.3f} to {high:.3f}"
    print(f"{name:<24} {step:>8.1f} {ratio.mean:>13.3f} {interval:>15}  {_counted(run_dir, uri)}", flush=True)


def _mean_step(steps: list[tuple[int, float]], turn: Turn) -> float:
    begin, end, _ = turn
    return statistics.mean(seconds for t, seconds in steps if begin + 1000 * _SETTLE_SECONDS <= t < end)


@contextmanager
def _training(folder: Path) -> Iterator[Path]:
    """A run in its steady state; stopped at the end."""
    known = set(folder.glob("runs/*/*"))
    process = subprocess.Popen(
        [*_on(_OURS), sys.executable, "-m", "ortlaunch", *WORDS],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while process.poll() is None:
            found = set(folder.glob("runs/*/*")) - known
            if found and (run_dir := found.pop()) and (run_dir / "journal.jsonl").is_file():
                events, _ = read_events(run_dir / "journal.jsonl", 0)
                if any(event.get("step", 0) >= _WARM_STEPS for event in events):
                    break
            time.sleep(0.2)
        assert process.poll() is None, "the run has ended"
        yield run_dir
        assert process.poll() is None, "the run has ended"
        (run_dir / "STOP").touch()
        process.wait(60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def _take_turns(run_dir: Path, uri: str | None) -> list[Turn]:
    relay = get_context("spawn").Process(target=_relay, args=(run_dir, uri), daemon=True)
    relay.start()
    assert relay.pid is not None
    # Until it has caught up, or met what it meets.
    time.sleep(TURN_SECONDS)
    turns: list[Turn] = []
    for on in itertools.islice(itertools.cycle((True, False, False, True)), 2 * PAIRS):
        os.kill(relay.pid, signal.SIGCONT if on else signal.SIGSTOP)
        time.sleep(_CATCH_UP_SECONDS)
        begin = time.time()
        time.sleep(TURN_SECONDS)
        turns.append((1000 * begin, 1000 * time.time(), on))
    relay.kill()
    relay.join()
    return turns


def _relay(run_dir: Path, uri: str | None) -> None:
    os.sched_setaffinity(0, _OURS)
    if uri is not None:
        Relay(run_dir, _tracking(run_dir, uri)).start()
    while True:
        signal.pause()


def _tracking(run_dir: Path, uri: str) -> MlflowConfig:
    return MlflowConfig(uri=uri, artifacts=str(run_dir.parents[2] / "mlartifacts"))


def _counted(run_dir: Path, uri: str | None) -> str:
    """Sends the rest and compares what MLflow has with the journal."""
    journalled = Counter(
        (key, event["step"])
        for event in read_events(run_dir / "journal.jsonl", 0)[0]
        if event["event"] == "metrics"
        for key in event["values"]
    )
    if uri is None or not (result := sync(run_dir, _tracking(run_dir, uri))).sent:
        return f"{len(journalled)}, nowhere to send them"
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    arrived = points(client, client.get_run(str(result.mlflow_run_id)))
    sent = Counter((key, step) for key, step, _ in arrived.elements())
    return f"{len(journalled)}, {len(journalled.keys() - sent.keys())}, {sum(sent.values()) - len(sent)}"


if __name__ == "__main__":
    main()
