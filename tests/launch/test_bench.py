"""The order of a bench's runs, what it refuses, and that a cell that fails stops nobody else."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import LocalConfig
from ortlaunch.launch.local.launcher import LocalLauncher
from ortlaunch.run.sweep import note_end, opened
from ortlaunch.tracking.relay import RelayResult
from ortlaunch.verbs import bench
from tests.support.cli import answer, ortlaunch


@pytest.fixture
def grid(tmp_path: Path) -> bench.Grid:
    """Three cells of one worker."""
    made = bench.Grid(tmp_path / "runs" / "default" / "multirun-20260101-000000", ["x=1,2"])
    for name in ("a", "b", "c"):
        words = ["model=mlp", "trainer=single", "seed=7", f"run_root={tmp_path / 'runs'}"]
        made.cells.append(bench.Cell(name, to_config(compose(words)), words))
    return made


class Runs:
    """Takes the place of real runs."""

    def __init__(self, codes: dict[str, int | RequestError]) -> None:
        self.started: list[tuple[str, int]] = []
        self.words: list[list[str]] = []
        self._codes = codes

    def __call__(self, plan: Any) -> int:
        config = plan.config
        self.started.append((config.name, config.seed))
        self.words.append(list(plan.arguments))
        code = self._codes.get(config.name.partition("-")[0], 0)
        if isinstance(code, RequestError):
            raise code
        (plan.sweep.folder / "tasks" / str(plan.sweep.number)).write_text("")
        plan.run_dir.mkdir(parents=True)
        (plan.run_dir / "sweep.json").write_text(
            json.dumps({"folder": str(plan.sweep.folder), "task": plan.sweep.number})
        )
        note_end(plan.run_dir, "KILLED" if code >= 128 else "FAILED" if code else "FINISHED")
        return code


class Unsent:
    """Takes the place of the relay to MLflow."""

    def __init__(self, *_: object) -> None: ...

    def finish(self, *_: object) -> RelayResult:
        return RelayResult()


@pytest.fixture
def started(grid: bench.Grid, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the grid without real runs; says what was started, compared, and how the sweep ended."""

    def start(
        codes: dict[str, int | RequestError], repeat: int, compare: Any = None, **options: Any
    ) -> tuple[int, Runs, list[argparse.Namespace], str]:
        runs, compared = Runs(codes), []
        monkeypatch.setattr(LocalLauncher, "submit", runs)
        monkeypatch.setattr("ortlaunch.verbs.multirun.Relay", Unsent)
        monkeypatch.setattr("ortlaunch.compare.command.run", compare or (lambda wanted, *_: compared.append(wanted)))
        given = {"baseline": None, **options}
        code = bench._run(grid, repeat, ["bench", *grid.varied], argparse.Namespace(**given))
        events = [json.loads(line) for line in (grid.folder / "journal.jsonl").read_text().splitlines()]
        return code, runs, compared, next(event["status"] for event in events if event["event"] == "end")

    return start


def test_rounds_are_interleaved_and_have_seeds_of_their_own(started: Any, grid: bench.Grid, capsys: Any) -> None:
    code, runs, (compared,), status = started({}, 2)
    assert runs.started == [(f"{name}-seed={seed}", seed) for seed in (7, 8) for name in "abc"]
    assert (code, status) == (0, "FINISHED")
    assert runs.words[3][-1] == "seed=8" and "seed=7" not in runs.words[3]
    assert compared.sweep == str(grid.folder) and compared.baseline is None, "as the command that makes it again"
    assert f"bench:      {grid.folder}\n" in capsys.readouterr().out
    sweep = opened(grid.folder)
    assert sweep is not None and sweep.name == "bench-x"


@pytest.mark.parametrize("failed", [1, 2])
def test_a_cell_that_fails_is_named_and_the_others_go_on(
    started: Any, grid: bench.Grid, capsys: Any, failed: int
) -> None:
    code, runs, (compared,), status = started({"a": failed}, 2)
    assert [name for name, _ in runs.started] == ["a-seed=7", "b-seed=7", "c-seed=7", "b-seed=8", "c-seed=8"]
    assert (code, status) == (1, "FAILED")
    out, err = capsys.readouterr()
    assert f"a failed: exit code {failed} in round 1" in err
    assert [line.split()[0] for line in out.splitlines() if "round" in line] == ["1/6", "2/5", "3/5", "4/5", "5/5"]
    assert compared.sweep == str(grid.folder)


def test_a_cell_that_is_refused_as_it_starts_is_named_and_the_others_go_on(
    started: Any, grid: bench.Grid, capsys: Any
) -> None:
    code, runs, (compared,), status = started({"b": RequestError("no such compiler")}, 2)
    assert [name for name, _ in runs.started] == ["a-seed=7", "b-seed=7", "c-seed=7", "a-seed=8", "c-seed=8"]
    assert (code, status, compared.sweep) == (1, "FAILED", str(grid.folder))
    assert "ortlaunch: b failed: no such compiler\n" in capsys.readouterr().err


def test_fail_fast_ends_the_bench_at_its_first_failure(started: Any, grid: bench.Grid, capsys: Any) -> None:
    for cell in grid.cells:
        assert isinstance(cell.config.launcher, LocalConfig)
        cell.config.launcher.fail_fast = True
    code, runs, (compared,), status = started({"b": 1}, 2)
    assert [name for name, _ in runs.started] == ["a-seed=7", "b-seed=7"]
    assert (code, status, compared.sweep) == (1, "FAILED", str(grid.folder))
    assert "b failed: exit code 1 in round 1" in capsys.readouterr().err


def test_all_that_fails_is_not_compared(started: Any) -> None:
    code, _, compared, _ = started(dict.fromkeys("abc", 1), 1)
    assert (code, compared) == (1, [])


def test_a_request_to_stop_ends_the_bench(started: Any) -> None:
    code, runs, compared, status = started({"b": 130}, 3)
    assert [name for name, _ in runs.started] == ["a-seed=7", "b-seed=7"]
    assert (code, compared, status) == (130, [], "KILLED")


def test_a_combination_that_is_left_out_is_named_by_what_varies(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("model=mlp", "trainer=fsdp", "tracking.uri=http://me:geheim@host", "launcher.dry_run=true")
    result = answer(tmp_path, capfd, "bench", "backend=eager,ort", "train.steps=2,3", *words)
    assert result.returncode == 0, result.stderr
    for steps in (2, 3):
        named = f"ortlaunch: backend=ort train.steps={steps} is left out: backend=ort does not go with trainer=fsdp"
        assert named in result.stderr
    assert "http://me:***@host" in result.stdout and "backend=eager" in result.stdout
    assert "geheim" not in result.stdout + result.stderr


def test_no_password_of_the_command_line_is_kept(started: Any, grid: bench.Grid) -> None:
    grid.folder.mkdir(parents=True)
    # As Hydra leaves it.
    (grid.folder / "multirun.yaml").write_text("tracking:\n  uri: http://me:geheim@host\n")
    grid.varied = ["tracking.uri=http://me:geheim@host", "x=1,2"]
    started({}, 1)
    assert (grid.folder / "multirun.yaml").read_text() == "tracking:\n  uri: http://me:***@host\n"
    kept = "".join(path.read_text() for path in grid.folder.rglob("*") if path.is_file())
    assert "http://me:***@host" in kept and "geheim" not in kept


def test_a_baseline_that_is_named_stays(started: Any) -> None:
    _, _, (compared,), _ = started({}, 1, baseline="mine")
    assert compared.baseline == "mine"


def test_a_baseline_that_there_is_not_is_told_at_the_end(started: Any, grid: bench.Grid, capsys: Any) -> None:
    def compare(wanted: argparse.Namespace, *_: object) -> None:
        raise RequestError(f"no run is {wanted.baseline}")

    with pytest.raises(RequestError, match=r"^the runs have ended, but cannot be compared: no run is nosuch$"):
        started({}, 1, compare, baseline="nosuch")
    assert f"compare:    ortlaunch compare --sweep {grid.folder}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "repeat"), [(["model=mlp"], 3), (["repeat=5"], 5), (["repeat=2", "-m", "--multirun"], 2)]
)
def test_how_often_and_what_is_left_for_hydra(words: list[str], repeat: int) -> None:
    found, rest = bench._repeat(words)
    assert found == repeat
    assert rest == ["train.save_weights=false", *(["model=mlp"] if "model=mlp" in words else [])]
    assert bench._repeat(["train.save_weights=true"])[1] == ["train.save_weights=true"]


@pytest.mark.parametrize("word", ["repeat=0", "repeat=x", "repeat=", "seed=1,2"])
def test_what_is_no_number_of_rounds(word: str) -> None:
    with pytest.raises(RequestError, match="repeat="):
        bench._repeat([word])


def test_a_dry_run_lists_the_runs_and_leaves_nothing(tmp_path: Path) -> None:
    result = ortlaunch(
        tmp_path, "bench", "model=mlp", "backend=eager,compile", "repeat=2", "launcher.dry_run=true", "device=cpu"
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("4 runs")
    assert [line.split()[2] for line in lines[1:]] == ["mlp-eager-ddp", "mlp-compile-ddp"] * 2
    assert [line.split()[-1] for line in lines[1:]] == ["seed=0", "seed=0", "seed=1", "seed=1"]
    assert list(tmp_path.iterdir()) == []


def test_a_combination_that_is_asked_for_twice_runs_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It would have the same seeds, and count in the comparison as a repeat of its own."""
    result = answer(
        tmp_path, capfd, "bench", "model=mlp", "backend=eager,eager", "device=cpu", "launcher.dry_run=true", "repeat=2"
    )
    first, *runs = result.stdout.splitlines()
    assert first.startswith("ortlaunch: mlp-eager-ddp is asked for twice and runs once a round: repeat=N")
    assert runs[0].startswith("2 runs") and [line.split()[-1] for line in runs[1:]] == ["seed=0", "seed=1"]
    assert list(tmp_path.iterdir()) == []


def test_keys_that_a_ready_job_sweeps_are_in_the_names(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "rates.yaml").write_text(
        "# @package _global_\nhydra:\n  sweeper:\n    params:\n      optimizer.lr: 0.1,0.2\n"
    )
    words = ("+jobs=rates", "--config-dir", str(tmp_path), "model=mlp", "backend=eager", "device=cpu")
    result = answer(tmp_path, capfd, "bench", *words, "launcher.dry_run=true", "repeat=1")
    names = [line.split()[2] for line in result.stdout.splitlines()[1:]]
    assert names == ["mlp-eager-ddp-lr=0.1", "mlp-eager-ddp-lr=0.2"], result.stderr


def test_cells_that_cannot_work_are_named_and_the_others_stay(tmp_path: Path) -> None:
    result = ortlaunch(tmp_path, "bench", "model=mlp", "train.steps=0,5", "launcher.dry_run=true", "device=cpu")
    assert result.returncode == 0 and "train.steps=0" in result.stderr and "left out" in result.stderr
    assert result.stdout.startswith("3 runs")


def test_a_cell_that_does_not_compose_leaves_nothing(tmp_path: Path) -> None:
    result = ortlaunch(tmp_path, "bench", "model=mlp", "backend=ort,eager", "backend.threads=2")
    assert result.returncode == 2 and "backend.threads: the chosen backend has no such key" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["launcher=slurm"], "launcher=slurm: a bench runs on this machine"),
        (["launcher.nodes=2", "launcher.master_addr=h"], "launcher.nodes=2: a bench"),
        (["experiment=x,y"], "experiment: the runs of a bench"),
        (["tracking.uri=sqlite:///a.db,sqlite:///b.db"], "tracking.uri: the runs of a bench"),
        (["train.steps=0"], "train.steps=0"),
        (["--html", "no/where.html"], "no/where.html: there is no folder"),
        (["model=nothing"], "nothing"),
    ],
)
def test_requests_that_cannot_work_leave_nothing(tmp_path: Path, words: list[str], said: str) -> None:
    result = ortlaunch(tmp_path, "bench", "model=mlp", "backend=eager", *words)
    assert result.returncode == 2 and said in result.stderr, result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
