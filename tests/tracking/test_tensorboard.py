"""TensorBoard's event files, read back by TensorBoard: every point once, whatever happened to the relay."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.compose.rules import check
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import MlflowConfig
from ortlaunch.follow.sync import sync_main
from ortlaunch.run.journal import Journal
from ortlaunch.run.run import Run
from ortlaunch.tracking import trackers
from ortlaunch.tracking.relay import Relay, RelayResult, sync
from ortlaunch.tracking.state import Destination
from ortlaunch.tracking.tensorboard import TensorboardConfig, TensorboardSink
from tests.support.servers import free_port
from tests.support.waiting import until

NewRun = Callable[..., tuple[Path, Journal]]
BOARD = TensorboardConfig()


def scalars(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    """All points of a figure as TensorBoard reads them, in the order of the file."""
    return [(event.step, event.value) for event in accumulated(run_dir).Scalars(tag)]


def texts(run_dir: Path, tag: str) -> list[str]:
    events = accumulated(run_dir).Tensors(tag)
    return [event.tensor_proto.string_val[0].decode() for event in events]


def accumulated(run_dir: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run_dir / "tensorboard"), {"scalars": 0, "tensors": 0})
    read.Reload()
    return read


def event_file(run_dir: Path) -> Path:
    (found,) = (run_dir / "tensorboard").iterdir()
    return found


def test_a_run_is_there_as_it_was_journalled(new_run: NewRun) -> None:
    run_dir, journal = new_run("whole", "größe")
    journal.params({"optimizer": {"lr": 0.1}, "text": "a|b\nc"})
    journal.tags({"ortlaunch.backend": "ort"})
    journal.metrics(1, {"train/loss": 2.5, "odd": math.nan})
    journal.metrics(2, {"train/loss": 1.5, "odd": math.inf})
    journal.dataset("text", "abc", "data.path=größe.txt")
    journal.tags({"ortlaunch.state": "finished"})
    journal.end("FINISHED")
    result = sync(run_dir, BOARD)
    assert result.sent and result.message == ""
    assert scalars(run_dir, "train/loss") == [(1, 2.5), (2, 1.5)]
    assert math.isnan(scalars(run_dir, "odd")[0][1]) and math.isinf(scalars(run_dir, "odd")[1][1])
    events = [json.loads(line) for line in (run_dir / "journal.jsonl").read_text().splitlines()]
    times = [event["t"] / 1000 for event in events if event["event"] == "metrics"]
    assert [event.wall_time for event in accumulated(run_dir).Scalars("train/loss")] == times
    (parameters,) = texts(run_dir, "parameters")
    assert "| optimizer.lr | 0.1 |\n" in parameters and "| text | a\\|b c |\n" in parameters
    assert texts(run_dir, "tags/ortlaunch.backend") == ["ort"]
    assert texts(run_dir, "tags/ortlaunch.state") == ["finished"]
    assert texts(run_dir, "status") == ["FINISHED"]
    assert "größe.txt" in texts(run_dir, "data/text")[0]


def test_a_resumed_run_doubles_nothing(new_run: NewRun) -> None:
    run_dir, journal = new_run("resumed")
    for step in (1, 2, 3):
        journal.metrics(step, {"a": step})
    journal.end("KILLED")
    assert sync(run_dir, BOARD).sent_events == 5
    journal.start("resumed", "run", "x")
    journal.rewind(1, "from checkpoint step-1")
    for step in (2, 3, 4):
        journal.metrics(step, {"a": 10 * step})
    journal.end("FINISHED")
    assert sync(run_dir, BOARD).sent
    before = event_file(run_dir).read_bytes()
    assert sync(run_dir, BOARD).sent_events == 0
    assert event_file(run_dir).read_bytes() == before
    assert scalars(run_dir, "a") == [(1, 1), (2, 2), (3, 3), (4, 40)]
    assert texts(run_dir, "status") == ["KILLED", "RUNNING", "FINISHED"]


@pytest.mark.parametrize("at", ["between file and offset", "within the file"])
def test_a_killed_relay_doubles_nothing(new_run: NewRun, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    run_dir, journal = new_run("killed")
    journal.metrics(1, {"a": 1})
    assert sync(run_dir, BOARD).sent
    known = (run_dir / "relay-tensorboard.json").read_bytes()
    journal.metrics(2, {"a": 2})
    assert sync(run_dir, BOARD).sent
    (run_dir / "relay-tensorboard.json").write_bytes(known)
    if at == "within the file":
        path = event_file(run_dir)
        path.write_bytes(path.read_bytes()[:-3])
    journal.metrics(3, {"a": 3})
    assert sync(run_dir, BOARD).sent
    assert scalars(run_dir, "a") == [(1, 1), (2, 2), (3, 3)]


@pytest.mark.parametrize("lost", ["state", "folder", "end of the file"])
def test_what_is_lost_is_written_anew(new_run: NewRun, lost: str) -> None:
    run_dir, journal = new_run("lost")
    for step in (1, 2):
        journal.metrics(step, {"a": step})
    assert sync(run_dir, BOARD).sent
    path = event_file(run_dir)
    if lost == "state":
        (run_dir / "relay-tensorboard.json").unlink()
    elif lost == "folder":
        path.unlink()
        path.parent.rmdir()
    else:
        path.write_bytes(path.read_bytes()[:-3])
    assert sync(run_dir, BOARD).sent
    assert scalars(run_dir, "a") == [(1, 1), (2, 2)]


def test_a_moved_run_goes_on_in_its_file(new_run: NewRun) -> None:
    run_dir, journal = new_run("moved")
    journal.metrics(1, {"a": 1})
    assert sync(run_dir, BOARD).sent
    journal.metrics(2, {"a": 2})
    moved = run_dir.rename(run_dir.with_name("elsewhere"))
    assert sync(moved, BOARD).sent_events == 1
    assert scalars(moved, "a") == [(1, 1), (2, 2)]


def test_a_dead_server_holds_nothing_up_and_sync_brings_it_up_to_date(
    new_run: NewRun, store: MlflowConfig, client: Any, history: Any
) -> None:
    run_dir, journal = new_run("dead-server")
    relay = Relay(run_dir, MlflowConfig(uri=f"http://127.0.0.1:{free_port()}", timeout_seconds=1), BOARD)
    relay.start()
    journal.metrics(1, {"a": 1})
    journal.end("FINISHED")
    size, state = Run(run_dir).journal_file.stat().st_size, Run(run_dir).tracker_file("tensorboard")
    until(lambda: state.exists() and json.loads(state.read_text())["offset"] == size)
    mlflow, board = relay.finish(1).sinks
    assert (mlflow.sent, mlflow.unsent_events, board.sent, board.message) == (False, 3, True, "")
    assert scalars(run_dir, "a") == [(1, 1)]
    configure(run_dir, store)
    assert sync_main([str(run_dir)]) == 0
    run_id = json.loads((run_dir / "relay.json").read_text())["mlflow_run_id"]
    assert history(client(store.uri), run_id, "a") == scalars(run_dir, "a") == [(1, 1)]


def test_an_unwritable_folder_holds_nothing_up_and_sync_brings_it_up_to_date(
    new_run: NewRun, store: MlflowConfig, client: Any, history: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, journal = new_run("unwritable")
    (run_dir / "tensorboard").touch()  # where a folder is needed: also root cannot write there
    journal.metrics(1, {"a": 1})
    journal.end("FINISHED")
    result = sync(run_dir, store, BOARD)
    mlflow, board = result.sinks
    assert (mlflow.sent, mlflow.message, board.sent) == (True, "", False)
    assert board.message.startswith("3 journal events have not reached TensorBoard at tensorboard in the run folder (")
    assert history(client(store.uri), result.mlflow_run_id, "a") == [(1, 1)]
    (run_dir / "tensorboard").unlink()
    configure(run_dir, store)
    assert sync_main([str(run_dir)]) == 0
    assert f"3 events sent, TensorBoard at {run_dir}/tensorboard" in capsys.readouterr().out
    assert scalars(run_dir, "a") == [(1, 1)]


def test_a_full_disk_is_tried_again(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, journal = new_run("full")
    journal.metrics(1, {"a": 1})
    commit, failures = TensorboardSink.commit, []

    def full(self: TensorboardSink) -> str:
        if len(failures) < 2:
            failures.append(1)
            path = self._folder / self._mark.file
            path.write_bytes(self._pending.getvalue()[:20])
            raise OSError("No space left on device")
        return commit(self)

    monkeypatch.setattr(TensorboardSink, "commit", full)
    assert sync(run_dir, BOARD).sent and len(failures) == 2
    assert scalars(run_dir, "a") == [(1, 1)]


def test_one_folder_for_all_runs(new_run: NewRun, tmp_path: Path) -> None:
    run_dir, journal = new_run("central")
    journal.metrics(1, {"a": 1})
    result: RelayResult = sync(run_dir, TensorboardConfig(folder=str(tmp_path / "board")))
    assert result.sent and not (run_dir / "tensorboard").exists()
    assert len(list((tmp_path / "board" / "central" / run_dir.name).iterdir())) == 1
    assert result.sinks[0].lines("central") == [("tensorboard", f"tensorboard --logdir {tmp_path}/board/central")]


def configure(run_dir: Path, store: MlflowConfig) -> None:
    content = {"tracking": vars(store), "trackers": {"tensorboard": {"name": "tensorboard", "folder": None}}}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(content))


def test_it_is_chosen_beside_mlflow_and_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    both = to_config(compose(["tracking=[mlflow,tensorboard]", "trackers.tensorboard.folder=board"]))
    assert [cfg.name for cfg in trackers.chosen(both)] == ["mlflow", "tensorboard"]
    assert trackers.resolved(both, tmp_path).trackers["tensorboard"]["folder"] == str(tmp_path / "board")
    assert tmp_path / "board" in trackers.files(trackers.resolved(both, tmp_path))
    alone = to_config(compose(["tracking=tensorboard"]))
    assert [cfg.name for cfg in trackers.chosen(alone)] == ["tensorboard"]
    with pytest.raises(RequestError, match=r"^trackers\.tensorboard\.folder=s3://b: must be a folder, not a URL$"):
        check(to_config(compose(["tracking=tensorboard", "trackers.tensorboard.folder='s3://b'"])))


def test_a_missing_package_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"^tracking=tensorboard: .* pip install 'ortlaunch\[tensorboard\]'$"):
        check(to_config(compose(["device=cpu", "tracking=[mlflow,tensorboard]"])))


def test_neither_torch_nor_tensorflow_is_imported(new_run: NewRun) -> None:
    import subprocess

    run_dir, journal = new_run("light")
    journal.params({"a": 1})
    journal.metrics(1, {"a": 1})
    code = (
        "import sys; from pathlib import Path; from ortlaunch.tracking.tensorboard import TensorboardConfig\n"
        "from ortlaunch.tracking.relay import sync\n"
        "assert 'tensorboard' not in sys.modules\n"
        "assert sync(Path(sys.argv[1]), TensorboardConfig()).sent\n"
        "print(sorted({'torch', 'tensorflow', 'mlflow', 'pandas'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code, str(run_dir)], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_each_tracker_has_a_file_of_its_own(tmp_path: Path) -> None:
    names = {Destination(tmp_path, None, trackers.find(name)).lock.name for name in trackers.names()}
    assert names >= {".relay.lock", ".relay-tensorboard.lock"}
