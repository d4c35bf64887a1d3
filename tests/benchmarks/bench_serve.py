"""The service under load: `python -m tests.benchmarks.bench_serve [RUNS [FOLLOWERS]]`.

A real `ortlaunch serve` over 10,000 runs on this machine, with the people who look at it in this process: both share
its cores. Each line has the figure and what it may be at most.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ortlaunch.run.identity import start_ticks
from ortlaunch.run.run import Run
from ortlaunch.serve.access import Role
from ortlaunch.serve.streams import MOST_STREAMS
from tests.launch.follow.conftest import Maker
from tests.support.service import InProcess, Server, in_process, start

RUNS, FOLLOWERS = 10_000, 100
CURVES, STEPS = 20, 1000
LINES_PER_SECOND, SECONDS = 200, 10.0
RELAYED_PER_SECOND, RELAYED_SECONDS = 50, 20
PAIRS, WINDOW_SECONDS = 12, 3.0
T_OF_PAIRS = 2.2
"""Student's t of 95 % for eleven degrees of freedom."""
TRAINING = ("model=mlp", "backend=eager", "trainer=single", "device=cpu", "tracking=none", "train.log_every=20")


@dataclass
class Bench:
    """The service, its people, and what was measured."""

    folder: Path
    server: Server
    people: InProcess
    peak: int = 0
    tokens: list[dict[str, str]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def get(self, path: str, number: int) -> tuple[float, bytes]:
        """Asks as one of some people; returns how long it took, and the answer."""
        began = time.perf_counter()
        answer = self.server.ask("GET", path, headers=self.tokens[number % len(self.tokens)])
        assert answer.status == 200, (path, answer.status, answer.body[:200])
        return time.perf_counter() - began, answer.body

    def say(self, what: str, value: float, most: float, unit: str) -> None:
        """Prints one figure, and looks at the service's memory."""
        self.peak = max(self.peak, self.memory())
        good = value <= most
        self.failed += [] if good else [what]
        print(f"{what:<58} {value:8.3g} {unit:<3} (at most {most:g}){'' if good else '  TOO MUCH'}", flush=True)

    def memory(self) -> int:
        """The memory of the service's process, without its children, in MB."""
        return psutil.Process(self.server.process.pid).memory_info().rss // 1_000_000

    def cpu(self) -> float:
        """The CPU seconds that the service's process has taken, without its children."""
        taken = psutil.Process(self.server.process.pid).cpu_times()
        return taken.user + taken.system


def main() -> None:
    """Makes the runs, starts the service, and measures."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else RUNS
    followers = int(sys.argv[2]) if len(sys.argv) > 2 else FOLLOWERS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["ORTLAUNCH_CACHE"] = str(folder / "cache")
        make = Maker(folder / "runs")
        for number in range(runs):
            make(experiment=f"experiment-{number % 20}", end="FAILED" if number % 7 == 0 else "FINISHED")
        server = start(folder, "--shared-account", wait=120)
        try:
            bench = Bench(folder, server, in_process(folder / "runs", shared_account=True))
            bench.tokens = [bench.people.token(f"person-{number}", Role.runner) for number in range(20)]
            measure(bench, make, runs, followers)
        finally:
            server.end()
    sys.exit(1 if bench.failed else 0)


def measure(bench: Bench, make: Maker, runs: int, followers: int) -> None:
    """Takes each figure in turn."""
    indexing(bench, runs)
    listing(bench)
    curves(bench, make)
    log_lines(bench, make, followers)
    relaying(bench, make)
    submitting(bench)
    training(bench)
    bench.say("memory of the service", bench.peak, 150, "MB")


def indexing(bench: Bench, runs: int) -> None:
    """Waits for the index, which is made in the background."""
    began = time.perf_counter()
    while json.loads(bench.get("/api/runs?size=1", 0)[1])["total"] < runs:
        assert time.perf_counter() - began < 300
        time.sleep(0.5)
    print(f"{runs} runs are in the index after {time.perf_counter() - began:.1f} s", flush=True)
    time.sleep(2)


def listing(bench: Bench) -> None:
    """Pages of the list, with filters and sorted in several ways, one after the other."""
    queries = [
        "",
        "?page=150",
        "?sort=name",
        "?sort=-loss&size=100",
        "?state=failed",
        "?text=0001",
        "?experiment=experiment-3",
    ]
    found = [bench.get(f"/api/runs{queries[number % len(queries)]}", number) for number in range(140)]
    bench.say(f"list of the runs, p95 of {len(found)}", 1000 * percentile([one for one, _ in found], 95), 100, "ms")
    bench.say("largest page of the list", max(len(body) for _, body in found) / 1000, 100, "kB")


def curves(bench: Bench, make: Maker) -> None:
    """The data of a page with twenty curves of twenty runs, six questions at a time as browsers ask."""
    ids = []
    for _ in range(CURVES):
        run_dir = make(step=None, end=None)
        ids.append(f"{run_dir.name[:15]}-{run_dir.name[-6:]}")
        with Run(run_dir).journal() as journal:
            for step in range(STEPS):
                journal.metrics(step, {f"metric/{number}": step * 0.1 + number for number in range(CURVES)})
    wait_for(bench, ids[-1])
    names = ",".join(f"metric/{number}" for number in range(CURVES))
    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        paths = [f"/api/runs/{run}/metrics?names={names}&points=200" for run in ids]
        bodies = list(pool.map(lambda pair: bench.get(pair[1], pair[0])[1], enumerate(paths)))
    seconds = time.perf_counter() - began
    assert all(len(json.loads(body)["curves"]) == CURVES for body in bodies)
    bench.say(f"data of {CURVES} curves of {CURVES} runs, first time", seconds, 2, "s")


def log_lines(bench: Bench, make: Maker, followers: int) -> None:
    """From a line in the file to all who follow it."""
    run_dir = make(run_id="abcdef", end=None)
    log = run_dir / "logs" / "rank-0.log"
    log.write_text("")
    wait_for(bench, "abcdef")
    tokens = tokens_for(bench, followers)

    async def follow() -> list[float]:
        delays: list[float] = []

        def take(data: bytes) -> None:
            """Notes how long the oldest line of an event was on its way."""
            if (at := data.find(b'"text":"')) >= 0:
                delays.append(time.monotonic() - float(data[at + 8 :].partition(b" ")[0]))

        async with crowd(bench, tokens, "log:abcdef:0", followers, take):
            with log.open("a", buffering=1) as file:
                end = time.monotonic() + SECONDS
                while time.monotonic() < end:
                    for _ in range(LINES_PER_SECOND // 20):
                        file.write(f"{time.monotonic():.6f} step loss and some more text of a usual length\n")
                    await asyncio.sleep(0.05)
            await asyncio.sleep(2)
        return delays

    delays = asyncio.run(follow())
    assert len(delays) >= followers * (SECONDS - 1), f"only {len(delays)} events came"
    bench.say(f"log line to {followers} followers, p99 of {len(delays)}", percentile(delays, 99), 1.5, "s")


def relaying(bench: Bench, make: Maker) -> None:
    """What the service's process computes while a hundred browsers follow the log and the curves of one run."""
    run_dir = make(run_id="fedcba", step=None, end=None)
    (run_dir / "logs" / "rank-0.log").write_text("")
    wait_for(bench, "fedcba")
    tokens, topics = tokens_for(bench, 100), "run:fedcba,log:fedcba:0,list"
    seconds = {count: asyncio.run(cpu_seconds(bench, run_dir, topics, tokens, count)) for count in (0, 100)}
    lines = 2 * RELAYED_PER_SECOND * RELAYED_SECONDS
    for count, value in seconds.items():
        print(f"CPU time of the service for 1,000 lines to {count} followers: {1000 * value / lines:.3f} s", flush=True)


async def cpu_seconds(bench: Bench, run_dir: Path, topics: str, tokens: list[dict[str, str]], count: int) -> float:
    """The service's own CPU time while a log and a journal grow evenly, one line each at a time."""
    async with crowd(bench, tokens, topics, count):
        before = bench.cpu()
        with (run_dir / "logs" / "rank-0.log").open("a", buffering=1) as log, Run(run_dir).journal() as journal:
            began = time.monotonic()
            for number in range(RELAYED_PER_SECOND * RELAYED_SECONDS):
                log.write("some text of a usual length that a worker has printed\n")
                journal.metrics(number, {"train/loss": 1.0, "throughput/tokens_per_second": 1000.0 + number})
                await asyncio.sleep(max(0.0, began + (number + 1) / RELAYED_PER_SECOND - time.monotonic()))
        after = bench.cpu()
    return after - before


def tokens_for(bench: Bench, followers: int) -> list[dict[str, str]]:
    """Tokens of as many people as it takes to have so many streams."""
    return [bench.people.token(f"follower-{number}", Role.viewer) for number in range(-(-followers // MOST_STREAMS))]


@asynccontextmanager
async def crowd(
    bench: Bench,
    tokens: list[dict[str, str]],
    topics: str,
    count: int,
    take: Callable[[bytes], Any] | None = None,
) -> AsyncIterator[None]:
    """Browsers that follow some topics, until the context ends; it fails if one of them did not stay.

    Without `take` they read what comes and look at nothing: browsers are on other machines, and what these ones cost is
    not what the service costs.
    """
    tasks = []
    for number in range(count):
        headers = tokens[number % len(tokens)]
        tasks.append(asyncio.create_task(listen(bench.server.port, headers, topics, take)))
        # One token may send ten requests a second.
        await asyncio.sleep(0.15 / len(tokens))
    await asyncio.sleep(1)
    yield
    gone = [task for task in tasks if task.done()]
    for task in tasks:
        task.cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert not gone, f"{len(gone)} of {count} followers were sent away: {found[tasks.index(gone[0])]!r}"


async def listen(port: int, headers: dict[str, str], topics: str, take: Callable[[bytes], Any] | None) -> None:
    """One browser: takes the data of each event, or reads and forgets it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    lines = [f"GET /api/events?topics={topics} HTTP/1.1", f"Host: 127.0.0.1:{port}"]
    writer.write("\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "\r\n"]).encode())
    try:
        status = await reader.readline()
        assert b" 200 " in status, status
        while take is None and await reader.read(1 << 16):
            pass
        while take is not None and (line := await reader.readline()):
            if line.startswith(b"data: "):
                take(line)
    finally:
        writer.close()


def submitting(bench: Bench) -> None:
    """From the request to the answer that names the run; the queue is paused, so that none starts."""
    bench.server.first_administrator()
    assert bench.server.ask("POST", "/api/queue/pause", {}).status < 300
    seconds = []
    for number in range(20):
        body = {"keys": {"model": "mlp", "train.steps": 10 + number}}
        began = time.perf_counter()
        answer = bench.server.ask("POST", "/api/runs", body)
        seconds.append(time.perf_counter() - began)
        assert answer.status == 201, answer.body
    bench.say("submit, p95 of 20", percentile(seconds, 95), 1.5, "s")


def training(bench: Bench) -> None:
    """A run's step time while a hundred browsers follow it, over that without them, in turns."""
    words = [
        sys.executable,
        "-m",
        "ortlaunch",
        "run",
        *TRAINING,
        "train.steps=100000000",
        f"run_root={bench.folder}/runs",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    with open(bench.folder / "training.out", "w") as output:
        process = subprocess.Popen(words, cwd=bench.folder, env=environment, stdout=output, stderr=output)
    try:
        run_dir = wait_for_training(bench.folder / "runs" / "default", process)
        ratios = asyncio.run(in_turns(bench, run_dir))
    finally:
        process.terminate()
        process.wait(60)
    # Ratios are compared by their logarithms, so that a pair and its reverse cancel each other.
    logs = [math.log(one) for one in ratios]
    middle, spread = statistics.mean(logs), T_OF_PAIRS * statistics.stdev(logs) / len(logs) ** 0.5
    low, best, high = (math.exp(one) for one in (middle - spread, middle, middle + spread))
    print(f"step time with 100 followers over that without: {best:.3f}, 95 % interval {low:.3f} to {high:.3f}")
    bench.failed += [] if low <= 1 else ["step time"]


async def in_turns(bench: Bench, run_dir: Path) -> list[float]:
    """Pairs of windows, one with followers and one without, in changing order; the ratios of their step times.

    What the service computes in these windows is printed; the coming and going of browsers is not part of it.
    """
    run = f"{run_dir.name[:15]}-{run_dir.name[-6:]}"
    topics = f"run:{run},log:{run}:0,list"
    tokens = tokens_for(bench, 100)
    # Browsers are on other machines: what they compute here must not take the training's time.
    os.nice(19)
    ratios, spent = [], {True: 0.0, False: 0.0}
    for number in range(PAIRS):
        times = {}
        for crowded in (number % 2 == 0, number % 2 == 1):
            async with crowd(bench, tokens, topics, 100 if crowded else 0):
                before = bench.cpu()
                times[crowded] = await step_seconds(run_dir)
                spent[crowded] += bench.cpu() - before
        ratios.append(times[True] / times[False])
    with_all, with_none = (60 * spent[crowded] / (PAIRS * WINDOW_SECONDS) for crowded in (True, False))
    print(f"CPU time of the service in a minute beside a training: {with_all:.2f} s with 100 followers", end="")
    print(f", {with_none:.2f} s without", flush=True)
    return ratios


async def step_seconds(run_dir: Path) -> float:
    """The mean time of a step over one window."""
    before, began = last_step(run_dir), time.perf_counter()
    await asyncio.sleep(WINDOW_SECONDS)
    return (time.perf_counter() - began) / max(1, last_step(run_dir) - before)


def last_step(run_dir: Path) -> int:
    """The step that the run has journalled last."""
    with open(run_dir / "journal.jsonl", "rb") as file:
        file.seek(max(0, file.seek(0, 2) - 8192))
        steps = [json.loads(line) for line in file.read().splitlines()[1:] if line.endswith(b"}")]
    return max((one["step"] for one in steps if one["event"] == "metrics"), default=0)


def wait_for_training(folder: Path, process: subprocess.Popen[bytes]) -> Path:
    """The folder of the run, once it trains."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        for journal in folder.glob(f"{time.strftime('%Y')}*/journal.jsonl"):
            launcher = journal.parent / "launcher.json"
            own = launcher.exists() and json.loads(launcher.read_text())["start_ticks"] == start_ticks(process.pid)
            if own and last_step(journal.parent) > 100:
                return journal.parent
        time.sleep(0.5)
    raise AssertionError((folder.parents[1] / "training.out").read_text())


def wait_for(bench: Bench, run: str) -> None:
    """Waits until the index has a run."""
    deadline = time.monotonic() + 60
    number = 0
    while bench.server.ask("GET", f"/api/runs/{run}/metrics", headers=bench.tokens[number % 20]).status != 200:
        assert time.monotonic() < deadline, run
        number += 1
        time.sleep(0.2)


def percentile(values: list[float], percent: int) -> float:
    """The smallest value that so many per cent do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
