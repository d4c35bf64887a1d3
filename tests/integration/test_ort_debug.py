"""What ORTModule's DebugOptions leave behind in a real run of two workers, and what stays off the terminal.

`debugged` is in conftest.py.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

GRAPHS = {
    f"net_{stage}_training.onnx"
    for stage in ("torch_exported", "post_processed", "optimized_pre_grad", "optimized", "execution_model")
}
BANNER = "ONNX Runtime Training (ORTModule) is accelerating your model"
MLP = ("model=mlp", "train.steps=2")


@pytest.fixture(scope="module")
def plain(train, tmp_path_factory):
    """A training without any debug option."""
    return train(tmp_path_factory.mktemp("plain"), *MLP, "tracking=none")


def test_the_graphs_lie_in_the_run_folder_once_for_all_workers(debugged):
    assert debugged.returncode == 0, debugged.report
    folder = debugged.run_dir / "onnx"
    assert {path.name for path in folder.iterdir()} == GRAPHS
    exported = onnx.load(folder / "net_torch_exported_training.onnx")
    assert "Relu" in {node.op_type for node in exported.graph.node}


def test_the_graphs_are_artifacts_of_the_mlflow_run(debugged, mlflow_run, tmp_path: Path):
    client, run = mlflow_run(debugged)
    listed = {item.path for item in client.list_artifacts(run.info.run_id, "onnx")}
    assert listed == {f"onnx/{name}" for name in GRAPHS}
    fetched = Path(client.download_artifacts(run.info.run_id, "onnx", str(tmp_path)))
    for name in GRAPHS:
        assert (fetched / name).read_bytes() == (debugged.run_dir / "onnx" / name).read_bytes()


def test_without_the_option_there_are_no_graphs(plain):
    assert plain.status == "FINISHED", plain.report
    assert not (plain.run_dir / "onnx").exists()
    assert not [event for event in plain.events if event["event"] == "artifact" and "onnx" in event["path"]]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_log_level_decides_what_a_ranks_log_holds(debugged, plain, rank):
    assert "do_export completed" in debugged.log(rank)
    assert "do_export" not in plain.log(rank)


def test_orts_banner_is_in_the_log_and_not_on_the_terminal(debugged):
    assert BANNER in debugged.log(0)
    for stream in (debugged.stdout, debugged.stderr):
        assert BANNER not in stream
        assert "orttraining" not in stream
        assert "\x1b[95m" not in stream
