"""`train.memory_check` before a run starts, and beside one."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ortlaunch.base.free_memory import available
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.compose.prepare import prepared
from ortlaunch.config.load import to_config
from ortlaunch.launch.memory import cache
from ortlaunch.launch.memory.band import Band
from ortlaunch.launch.memory.cache import Change, Estimate
from ortlaunch.launch.memory.question import key_of
from tests.support.cli import answer
from tests.support.stand_in import KEYS, start, wait_for_line
from tests.support.waiting import until

SECONDS = 150
WORDS = (*KEYS, "device=cpu", "tracking=none")
HUGE = 2**49
LINE = "the run does not fit into memory: 1 worker on a machine takes"
SMALLER = Change("train.batch_size=1 train.grad_accumulation=4", Band(1, 2, 3))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(folder))
    return folder


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


def keep(low: int, middle: int, high: int, *words: str, workers: int = 1) -> str:
    """Keeps an estimate of the run that these words compose; returns its key."""
    config = prepared(to_config(compose([*WORDS, *words])))
    key = key_of(config, workers, 1)
    cache.store(key, Estimate(Band(low, middle, high), middle, (SMALLER,)))
    return key


def test_a_run_that_does_not_fit_is_refused_before_it_has_a_folder(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keep(HUGE, HUGE, HUGE)
    result = answer(here, capfd, *WORDS, "train.memory_check=error")
    assert result.returncode == 2
    assert LINE in result.stderr
    assert "too little. train.batch_size=1 train.grad_accumulation=4 fits; train.memory_check=off" in result.stderr
    assert list(here.iterdir()) == []


def test_a_warning_starts_the_run_all_the_same(here: Path) -> None:
    keep(HUGE, HUGE, HUGE)
    process = start(here, 1, "none", *WORDS)
    out, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert "finished after" in out
    assert errors.startswith(f"ortlaunch: warning: {LINE}")
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize("words", [("train.memory_check=off",), ("train.steps=2000",)], ids=["off", "another run"])
def test_nothing_is_said_where_nothing_is_known_or_asked(
    here: Path, capfd: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    keep(HUGE, HUGE, HUGE)
    result = answer(here, capfd, *WORDS, *words, "launcher.dry_run=true")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("shares", "word"),
    [((0.1, 0.2, 0.5), ""), ((0.5, 0.8, 4), "may not fit"), ((0.5, 4, 5), "most likely does not fit")],
    ids=lambda value: str(value),
)
def test_a_dry_run_says_how_sure_it_is(
    here: Path, capfd: pytest.CaptureFixture[str], shares: tuple[float, ...], word: str
) -> None:
    low, middle, high = (int(share * available()) for share in shares)
    keep(low, middle, high)
    result = answer(here, capfd, *WORDS, "launcher.dry_run=true")
    assert result.returncode == 0
    assert (word in result.stderr) if word else result.stderr == ""


def test_a_run_that_may_not_fit_is_not_refused(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    keep(1, 2, HUGE, "train.memory_check=error")
    process = start(here, 1, "none", *WORDS, "train.memory_check=error")
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert "may not fit" in errors


def test_a_slurm_job_is_refused_by_the_memory_that_it_asks_for(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("launcher=slurm", "launcher.memory=4G", "launcher.workers_per_node=2", "train.memory_check=error")
    keep(2**33, 2**33, 2**33, *words, "trainer=ddp", workers=2)
    result = answer(here, capfd, *WORDS, *words, "trainer=ddp")
    assert result.returncode == 2
    assert "8.00 GiB), and 4.00 GiB are there (launcher.memory), 4.00 GiB too little" in result.stderr
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("memory", "where"),
    [("4G", "4.00 GiB are there (launcher.memory)"), ("null", "(free on this machine)"), ("9G", "5.00 GiB are")],
)
def test_a_job_is_warned_of_on_its_node(here: Path, monkeypatch: pytest.MonkeyPatch, memory: str, where: str) -> None:
    from ortlaunch.launch.memory import check
    from ortlaunch.launch.memory.check import watched_in_job

    monkeypatch.setattr(check, "available", lambda: 5 * 2**30)
    words = ("launcher=slurm", f"launcher.memory={memory}", "launcher.workers_per_node=2", "trainer=ddp")
    keep(HUGE, HUGE, HUGE, *words, workers=2)
    with watched_in_job(prepared(to_config(compose([*WORDS, *words]))), 2) as watch:
        (line,) = watch.look()
        assert line.startswith("ortlaunch: warning: the run does not fit into memory: 2 workers on a machine take")
        assert where in line
        assert watch.look() == []


def test_what_a_run_has_measured_is_kept_for_the_next_estimate(here: Path, own_cache: Path) -> None:
    from ortlaunch.launch.memory.calibration import Calibration
    from ortlaunch.launch.memory.check import watched
    from ortlaunch.launch.planning import make_plan

    keep(2**28, 2**29, 2**30)
    config = prepared(to_config(compose([*WORDS])))
    with watched(make_plan(config), config) as watch:
        watch.learn(None)
        assert Calibration.of(config).near(2**29).runs == 0
        watch.learn(0.75)
    assert Calibration.of(config).near(2**29).most == 1.5
    # What a run reads at its start is in its measurement and not in the estimate.
    for more in (
        replace(config, model=replace(config.model, weights="weights")),
        replace(config, train=replace(config.train, resume="runs/earlier")),
    ):
        cache.store(key_of(more, 1, 1), Estimate(Band(2**28, 2**29, 2**30), 2**29, ()))
        with watched(make_plan(more), more) as watch:
            watch.learn(1.5)
    assert Calibration.of(config).near(2**29).most == 1.5
    # A run whose estimate nobody has made measures nothing that it could be compared with.
    other = replace(config, train=replace(config.train, batch_size=7))
    with watched(make_plan(other), other) as watch:
        watch.learn(0.1)
    assert Calibration.of(config).near(2**29).runs == 1


def estimates_of(launcher: int) -> list[psutil.Process]:
    return [
        one
        for one in psutil.process_iter(["ppid", "cmdline"])
        if one.info["ppid"] == launcher and "ortlaunch.estimate.process" in (one.info["cmdline"] or [])
    ]


def test_an_estimate_that_hangs_is_ended_with_the_run(here: Path) -> None:
    (here / "nets.py").write_text("import time\ndef Net(): time.sleep(600)\n")
    process = start(here, 10_000, "none", *WORDS, "model=factory", "model.target=nets:Net", "data=digits")
    (child,) = until(lambda: estimates_of(process.pid))
    child.suspend()
    folder = Path(child.cmdline()[-1])
    assert (child.nice(), folder.is_dir()) == (19, True)
    # A signal that comes before the launcher catches it would end it at once.
    wait_for_line(process, "printed at step 3")
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=SECONDS)
    assert "stopped after" in out
    assert errors == ""
    assert not child.is_running()
    assert not folder.exists()


@pytest.mark.nightly
def test_the_warning_comes_while_the_run_goes_on(here: Path, own_cache: Path) -> None:
    # Wide and not deep: the time of an estimate grows with the layers, and this one has the lowest priority.
    sizes = {"hidden_size": 131_072, "num_hidden_layers": 2, "num_attention_heads": 64, "num_key_value_heads": 64}
    words = ("model=llama", "data=synthetic", *(f"model.params.{name}={size}" for name, size in sizes.items()))
    process = start(here, 4_000, "none", *WORDS, *words)
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith("ortlaunch: warning"):
            process.send_signal(signal.SIGTERM)
            break
    _, errors = process.communicate(timeout=SECONDS)
    assert seen[-1].startswith(f"ortlaunch: warning: {LINE}"), "".join(seen[-20:]) + errors
    assert len(list(own_cache.glob("estimates/*"))) == 1


@pytest.mark.nightly
def test_an_estimate_that_fails_says_nothing(here: Path) -> None:
    (here / "nets.py").write_text("def Net():\n    raise RuntimeError('no')\n")
    process = start(here, 10_000, "none", *WORDS, "model=factory", "model.target=nets:Net", "data=digits")
    deadline = time.monotonic() + SECONDS
    seen: list[psutil.Process] = []
    while time.monotonic() < deadline and not (seen and not seen[0].is_running()):
        seen = seen or [one for one in psutil.Process(process.pid).children() if one.nice() == 19]
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=SECONDS)
    assert seen
    assert "stopped after" in out
    assert "warning" not in out + errors
