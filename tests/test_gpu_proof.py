"""The proof for GPU machines without a GPU: its report, its time, and the packages that its bundle brings."""

from __future__ import annotations

import importlib.metadata
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ortlaunch.cli import dispatch
from ortlaunch.config import devices
from ortlaunch.launch.local import launcher, rules
from tests.gpu.needed import needed, read_machine, read_pins, read_roots, requirements_in
from tests.gpu.proof import numbers, speed, watching
from tests.gpu.proof.budget import Budget, OutOfTime
from tests.gpu.proof.numbers import OFFLOADED, SMALL, TRAINERS, furthest
from tests.gpu.proof.proof import Check, Failed, NotPossible, Proof, end_with_children, judged
from tests.gpu.proof.report import LONGEST, Outcome, Report, Row, Table
from tests.gpu.proof.speed import speed_words
from tests.gpu.proof.survival import KEPT, SLOW, end_of, reach
from tests.gpu.proof.watching import PROFILED, WATCHED
from tests.gpu.prove import Section, prove
from tests.support.waiting import until


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def proof(tmp_path: Path) -> Proof:
    return Proof("cpu", 2, 1, tmp_path, Budget(60, Clock()))


def test_the_report_has_a_table_for_each_theme_and_its_counts() -> None:
    rows = [Row("a | b", "one\nline", "x" * 1000, Outcome.ok), Row("c", "d", "no GPU", Outcome.not_possible)]
    report = Report("Proof", {"machine": "2 cores"}, [Table("First", rows, 12.3), Table("Second")])
    page = report.markdown().splitlines()
    assert page[:4] == [
        *("# Proof", "", "- machine: 2 cores"),
        "- rows: 1 ok, 0 failed, 1 not possible here, 0 skipped for lack of time",
    ]
    assert page[5:9] == ["## First (12 s)", "", "| what | expected | seen | |", "| --- | --- | --- | --- |"]
    assert page[9].startswith("| a \\| b | one line | xx") and page[9].endswith("x | ok |")
    assert len(page[9]) < LONGEST + 50
    assert page[10] == "| c | d | no GPU | not possible here |"
    assert "## Second (not over)" in page


def test_the_report_says_how_skipped_rows_are_reached() -> None:
    page = Report("Proof", {}, [Table("First", [Row("a", "b", "no time", Outcome.skipped)])]).markdown()
    assert "- for what was skipped: --only and the section's name, with more --minutes" in page


@pytest.mark.parametrize(("outcome", "code"), [(one, int(one is Outcome.failed)) for one in Outcome])
def test_only_a_failed_row_makes_exit_code_1(outcome: Outcome, code: int) -> None:
    assert Report("Proof", {}, [Table("First", [Row("a", "b", "c", outcome)])]).exit_code == code


def test_a_section_has_its_own_time_and_never_more_than_is_left() -> None:
    clock = Clock()
    budget = Budget(100, clock)
    with budget.section(30):
        assert budget.take(50) == 30
        assert budget.take(10) == 10
        clock.now = 28
        with pytest.raises(OutOfTime, match="the section had 2 s left, and it takes more than 5 s"):
            budget.take(50, least=5)
    assert budget.left == 72
    clock.now = 90
    with budget.section(30):
        assert budget.left == 10
    clock.now = 200
    with pytest.raises(OutOfTime):
        budget.take(1)


def raising(error: Exception) -> Callable[[], str]:
    def look() -> str:
        raise error

    return look


@pytest.mark.parametrize(
    ("error", "outcome", "seen"),
    [
        (NotPossible("no GPU"), Outcome.not_possible, "no GPU"),
        (OutOfTime("0 s"), Outcome.skipped, "0 s"),
        (Failed("other"), Outcome.failed, "other"),
        (KeyError("loss"), Outcome.failed, "KeyError: 'loss'"),
    ],
)
def test_each_check_becomes_a_row(error: Exception, outcome: Outcome, seen: str) -> None:
    assert judged(Check("a", "b", raising(error))) == Row("a", "b", seen, outcome)


def test_a_section_that_fails_does_not_end_the_others(proof: Proof) -> None:
    def left(proof: Proof) -> Iterator[Row]:
        yield from proof.judge([Check("left", "", lambda: f"{proof.budget.left:.0f} s")])

    def broken(proof: Proof) -> Iterator[Row]:
        yield from left(proof)
        raise OSError("disk")

    report, seen = Report("Proof", {}), []
    sections = {"one": Section("One", 1, broken), "two": Section("Two", 1, left), "three": Section("Three", 2, left)}
    prove(sections, proof, report, lambda: seen.append(report.summary))
    first, *others = report.tables
    # Of a minute each may take half more than its part, and the last one all that is left.
    assert first.rows == [
        Row("left", "", "22 s", Outcome.ok),
        Row("the section itself", "comes to its end", "OSError: disk", Outcome.failed),
    ]
    assert [table.rows for table in others] == [[Row("left", "", f"{seconds} s", Outcome.ok)] for seconds in (30, 60)]
    assert report.exit_code == 1
    assert len(seen) == 7


def test_a_command_that_hangs_is_ended_with_what_it_started(proof: Proof, tmp_path: Path) -> None:
    program = (
        "import os, time; print(os.posix_spawnp('sleep', ['sleep', '600'], os.environ), flush=True); time.sleep(600)"
    )
    began = time.monotonic()
    with pytest.raises(Failed, match=r"no end after 2 s") as caught:
        proof.command(["-I", "-S", "-c", program], tmp_path, most=1.5)
    assert time.monotonic() - began < 200
    child = int(str(caught.value).split()[-1])
    until(lambda: not is_running(child))


@pytest.mark.parametrize("jobs", [1, 4])
def test_no_row_waits_for_the_compilation(proof: Proof, jobs: int) -> None:
    """It is the longest, and the rows after it were never reached on two cores."""
    over = replace(proof, jobs=jobs, budget=Budget(0))
    rows = list(numbers.rows(over))
    assert rows[-1].what == "torch.compile under DDP, fp32"
    assert list(speed.rows(over))[-1].what == "torch.compile"
    assert {row.outcome for row in rows} == {Outcome.skipped, Outcome.not_possible}
    assert rows[-1].seen == "the section had 0 s left, and it takes more than 5 s"


def test_sections_that_measure_no_speed_run_together_where_several_commands_may(proof: Proof) -> None:
    begun = threading.Barrier(2, timeout=60)

    def meet(_: Proof) -> Iterator[Row]:
        begun.wait()
        yield Row("met", "", "", Outcome.ok)

    def alone(proof: Proof) -> Iterator[Row]:
        yield Row("alone", "", f"{proof.is_shared}, {begun.n_waiting} others", Outcome.ok)

    sections = {
        "one": Section("One", 1, meet, shares=True),
        "two": Section("Two", 1, meet, shares=True),
        "three": Section("Three", 1, alone),
        "four": Section("Four", 1, alone, shares=True),
    }
    report = Report("Proof", {})
    prove(sections, replace(proof, jobs=2), report, lambda: None)
    assert [[(row.what, row.seen) for row in table.rows] for table in report.tables] == [
        *[[("met", "")]] * 2,
        [("alone", "False, 0 others")],
        [("alone", "True, 0 others")],
    ]


def test_commands_take_turns_and_a_thread_keeps_its_place(proof: Proof) -> None:
    both = replace(proof, jobs=2)
    pairs = threading.Barrier(2, timeout=60)
    lock = threading.Lock()
    running = [0]
    most = 0

    def look() -> str:
        nonlocal most
        with both.place(), both.place():
            with lock:
                running[0] += 1
                most = max(most, running[0])
            pairs.wait()
            with lock:
                running[0] -= 1
        return ""

    rows = list(both.judge([Check(name, "", look) for name in "abcd"], together=True))
    assert rows == [Row(name, "", "", Outcome.ok) for name in "abcd"]
    assert most == 2


def test_a_command_that_gets_no_place_is_skipped(proof: Proof, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.gpu.proof.proof._LEAST", 0.0)
    one = replace(proof, budget=Budget(0.5))
    with ThreadPoolExecutor(1) as pool, one.place(), pytest.raises(OutOfTime, match="before one of 1 commands"):
        pool.submit(one.command, ["-I", "-S", "-c", ""], tmp_path).result(60)


def test_a_run_that_the_proof_has_is_not_made_again(proof: Proof) -> None:
    """Half of the time of tests/gpu went to runs that a section had made before."""
    over = replace(proof, budget=Budget(0))
    with pytest.raises(OutOfTime):
        over.train("train.steps=1")
    (folder,) = proof.folder.glob("run-*")
    run_dir = folder / "runs" / "default" / "first"
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").touch()
    events = [{"event": "metrics", "step": 1, "values": {"train/loss": 2.0}}, {"event": "end", "status": "FINISHED"}]
    for number, event in enumerate(events):
        with (run_dir / "journal.jsonl").open("a") as journal:
            journal.write(json.dumps(event) + "\n")
        # As another process of the same proof asks.
        other = replace(over, _trainings={})
        if number == 0:
            with pytest.raises(OutOfTime):
                other.train("train.steps=1")
    assert other.train("train.steps=1").losses == {1: 2.0}


def rounds_of(*ratios: float, busy: float = 0.0, end: Exception | None = None) -> Iterator[speed.Round]:
    for ratio in ratios:
        yield speed.Round(1000.0 * ratio, 1000.0, busy)
    if end is not None:
        raise end


def test_a_ratio_tells_the_rounds_that_there_was_time_for() -> None:
    """The row was skipped when one round was there, and the second one had no time left."""
    over = OutOfTime("the section had 4 s left")
    text = "1,000 tokens/s by hand; ours 1.20 of it (1.20); no further round: the section had 4 s left"
    assert speed.judged_rounds(rounds_of(1.2, end=over), 0.95) == text
    with pytest.raises(Failed, match="no further round"):
        speed.judged_rounds(rounds_of(0.9, end=over), 0.95)
    with pytest.raises(OutOfTime):
        speed.judged_rounds(rounds_of(end=over), 0.95)
    with pytest.raises(NotPossible, match="other work used up to 20 %"):
        speed.judged_rounds(rounds_of(0.9, 1.0, busy=20.0), 0.95)
    assert speed.judged_rounds(rounds_of(0.9, 1.2), 0.95).endswith("ours 1.05 of it (0.90, 1.20)")


@pytest.mark.parametrize(
    ("lines", "may_be_deepspeeds", "fails"),
    [
        ({}, False, False),
        ({"transformers.masking_utils:755": 39}, True, True),
        ({"deepspeed.runtime.utils:233": 39}, False, True),
        ({"deepspeed.runtime.utils:233": 39}, True, False),
        ({"deepspeed.runtime.utils:233": 39, "ortlaunch.trainer.guard:40": 1}, True, True),
    ],
)
def test_only_deepspeed_may_wait_off_log_steps(lines: dict[str, int], may_be_deepspeeds: bool, fails: bool) -> None:
    with pytest.raises(Failed) if fails else nullcontext():
        watching.judged_syncs(39, Counter(lines), may_be_deepspeeds=may_be_deepspeeds)


def test_a_run_that_compiles_on_a_cpu_is_slow_and_not_hung(proof: Proof, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.gpu.proof.proof.LONGEST_RUN", 0.2)
    monkeypatch.setattr("tests.gpu.proof.proof._LEAST", 0.0)
    short = replace(proof, budget=Budget(0.5))
    with pytest.raises(OutOfTime, match="the section's time was over when it had run for"):
        short.train("train.steps=1000000", long=True)
    with pytest.raises(Failed, match="no end after 0 s"):
        replace(proof, budget=Budget(60)).train("train.steps=1000001")


def test_a_run_to_kill_that_is_slow_is_skipped_and_one_that_ends_has_failed(proof: Proof, tmp_path: Path) -> None:
    """A section that had no time left for its kill counted as failed."""
    slow = proof.start(["-I", "-S", "-c", "import time; time.sleep(600)"], tmp_path)
    try:
        with pytest.raises(OutOfTime, match="before step 8"):
            reach(replace(proof, budget=Budget(0.3)), slow, tmp_path, 8)
        with pytest.raises(OutOfTime, match="before the end"):
            end_of(replace(proof, budget=Budget(0.3)), slow)
    finally:
        end_with_children(slow.pid)
    slow.communicate(timeout=60)
    with pytest.raises(Failed, match="it ended before step 8: exit code 1: no model"):
        reach(proof, proof.start(["-I", "-S", "-c", "import sys; sys.exit('no model')"], tmp_path), tmp_path, 8)


def test_a_cpu_shows_once_that_the_watch_for_syncs_is_in_place(proof: Proof) -> None:
    """Its runs under the other trainers took a minute of two cores and showed no more."""
    _, *syncs = watching.rows(replace(proof, budget=Budget(0)))
    assert [row.outcome for row in syncs] == [Outcome.skipped, *[Outcome.not_possible] * 2]


def test_what_was_compiled_before_is_not_used(proof: Proof, tmp_path: Path) -> None:
    """A proof changes nothing else on the machine, and a compilation is not shorter for what it compiled before."""
    program = "import os; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    folder = proof.command(["-I", "-S", "-c", program], tmp_path).output.strip()
    assert Path(folder).is_relative_to(proof.folder)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_losses_are_compared_step_by_step() -> None:
    assert furthest({1: 2.0, 2: 1.0}, {1: 2.0, 2: 1.0}) == "the same 2 losses to the bit"
    assert furthest({1: 2.0, 2: 1.0001}, {1: 2.0, 2: 1.0}) == "furthest 1.0e-04 at step 2"
    for mine in ({1: 2.0, 2: 1.1}, {1: 2.0}, {1: 2.0, 2: float("nan")}):
        with pytest.raises(Failed):
            furthest(mine, {1: 2.0, 2: 1.0})


def installed(wanted: dict[str, str]) -> dict[str, list[str]]:
    return {name: importlib.metadata.requires(name) or [] for name in wanted}


def test_the_bundle_and_a_machine_have_all_that_ortlaunch_needs() -> None:
    machine = read_machine()
    found = needed(read_roots(), machine, read_pins(), installed)
    assert found.conflicts == []
    assert {"deepspeed", "hydra-core", "omegaconf", "antlr4-python3-runtime", "mlflow"} <= found.wheels.keys()
    assert not found.wheels.keys() & machine.keys()
    assert found.wheels["deepspeed"] == read_pins()["deepspeed"]


def test_what_does_not_fit_together_is_named() -> None:
    def of(wanted: dict[str, str]) -> dict[str, list[str]]:
        return {name: ["torch>=2.6", "numpy<2; extra == 'old'", "lost"] for name in wanted}

    found = needed(
        ["Deep_Speed>=0.19", "absent; python_version < '3.12'"], {"torch": "2.5"}, {"deep-speed": "0.19.8"}, of
    )
    assert found.wheels == {"deep-speed": "0.19.8"}
    assert found.conflicts == [
        "deep-speed needs torch>=2.6, and there is torch 2.5",
        "deep-speed needs lost, which constraints.txt does not pin",
    ]


def test_requirements_are_read_from_metadata() -> None:
    text = "Name: a\nRequires-Dist: b>=1 ; extra == 'x'\nRequires-Dist: c\n\nRequires-Dist: not a header\n"
    assert requirements_in(text) == ["b>=1 ; extra == 'x'", "c"]


REQUESTS = {
    "fp16": (*SMALL, *TRAINERS["DeepSpeed ZeRO 2"], "train.precision=fp16"),
    "offload": (*SMALL, *OFFLOADED),
    "profile": PROFILED,
    "syncs": (*WATCHED, *TRAINERS["FSDP2"]),
    "kill": (*KEPT, SLOW),
    "speed": (*speed_words("cuda", Path("text.txt")), "backend=compile"),
}


def test_its_runs_on_cuda_are_requests_that_ortlaunch_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A key that is renamed would otherwise show on a GPU machine alone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_bytes(bytes(10_000))
    for module in (devices, launcher, rules):
        monkeypatch.setattr(module, "visible_gpus", lambda: 1)
    for words in REQUESTS.values():
        common = ("device=cuda", "launcher.workers_per_node=1", "launcher.dry_run=true")
        assert dispatch([*common, *words]) == 0, capsys.readouterr().err
