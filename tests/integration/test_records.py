"""What a run leaves behind: its folder, its logs, its MLflow run, and a clean terminal."""

from __future__ import annotations

import json
import re
import shlex
import socket
from collections import Counter

import pytest
import torch

from tests.support.servers import points

STARTUP = {f"startup/{name}_seconds" for name in ("time_to_first_step", "import", "rendezvous", "build")}
HOST = re.sub(r"[^\w.-]", "_", socket.gethostname())
METRICS = {
    *("train/loss", "train/lr", "train/grad_norm", "memory/rss_gib"),
    *(f"throughput/{name}" for name in ("tokens_per_second", "samples_per_second", "step_seconds")),
    *("throughput/device/tokens_per_second", "throughput/data_wait_percent", "throughput/tflops_per_device"),
    *(f"summary/{name}" for name in ("tokens_per_second_median", "step_seconds_p50", "step_seconds_p95")),
    *(
        "summary/peak_memory_gib",
        "summary/steady_windows",
        "summary/goodput_percent",
        "summary/last_step",
        "throughput/steady",
    ),
    *(f"stragglers/{name}" for name in ("slowest_rank", "step_seconds_max", "spread_percent")),
    *(f"goodput/{name}_seconds" for name in ("productive", "startup", "lost", "down", "other", "wall")),
    *(f"system/{HOST}/{name}" for name in ("cpu_utilization_percentage", "system_memory_usage_percentage")),
    f"system/{HOST}/workers_rss_megabytes",
    *STARTUP,
}
TERMINAL = re.compile(
    r"ortlaunch: \S+ on cpu, \d workers? x \d+ threads?|run folder: /.*|step \d+/\d+  loss .*|"
    r"finished after .*|mlflow: +sqlite.*|compare: +ortlaunch compare .*|"
    # True of the machines that tests run on.
    r"warning: (this machine was busy with other work|rank \d on \S+ holds the others up).*"
)


@pytest.fixture(params=["ort-ddp", "eager-zero1"])
def result(request, matrix):
    return matrix[request.param]


def test_the_run_folder_tells_what_ran(result):
    """config.yaml, overrides.yaml and env.json: enough to repeat the run and to explain a difference."""
    config = (result.run_dir / "config.yaml").read_text()
    assert "steps: 20" in config
    assert "name: gpt2_nano" in config
    assert "- train.steps=20" in (result.run_dir / "overrides.yaml").read_text().splitlines()
    record = json.loads((result.run_dir / "env.json").read_text())
    assert record["command"][0] == "ortlaunch"
    assert "train.steps=20" in record["command"]
    assert {"torch", "deepspeed", "mlflow"} <= record["packages"].keys()
    assert "torch.distributed.run" in record["torchrun"]


def test_mlflow_has_the_parameters(result, mlflow_run):
    params = mlflow_run(result)[1].data.params
    assert params["model.name"] == "gpt2_nano"
    assert params["model.params.n_layer"] == "2"
    assert params["train.steps"] == "20"
    assert params["data.seq_len"] == "64"
    assert params["trainer.name"] in ("ddp", "deepspeed")


def test_mlflow_has_the_tags(result, mlflow_run):
    tags = mlflow_run(result)[1].data.tags
    assert tags["ortlaunch.backend"] in ("ort", "eager")
    assert tags["ortlaunch.trainer"] in ("ddp", "deepspeed")
    assert tags["ortlaunch.world_size"] == "2"
    assert tags["ortlaunch.device"] == "cpu"
    assert tags["ortlaunch.run_dir"] == str(result.run_dir)
    assert tags["ortlaunch.data_fingerprint"]
    assert tags["ortlaunch.hosts"] == socket.gethostname()
    assert tags["ortlaunch.device_name"]
    assert tags["ortlaunch.torch"] == torch.__version__
    command = shlex.split(tags["ortlaunch.command"])
    assert command[0] == "ortlaunch"
    assert "train.steps=20" in command


def test_mlflow_has_the_metrics_of_the_journal(result, mlflow_run):
    """Every metric that compare and people look for, and each point as the journal has it, once."""
    client, run = mlflow_run(result)
    names = run.data.metrics.keys()
    wanted = METRICS | ({"startup/ort_export_seconds"} if "ort" in result.tags["ortlaunch.backend"] else set())
    assert wanted <= names
    assert points(client, run) == Counter(result.points)


def test_mlflow_has_the_artifacts(result, mlflow_run):
    """The files that tell what ran lie in MLflow too, as they are in the run folder."""
    client, run = mlflow_run(result)
    names = {"config.yaml", "overrides.yaml", "env.json", "packages.txt", "machines.json"}
    assert {f"ortlaunch/{name}" for name in names} <= {
        found.path for found in client.list_artifacts(run.info.run_id, "ortlaunch")
    }
    copy = client.download_artifacts(run.info.run_id, "ortlaunch/config.yaml")
    with open(copy) as file:
        assert file.read() == (result.run_dir / "config.yaml").read_text()


def test_figures_hold_together(result):
    """Rates follow from the step's time and the tokens of a global batch; the summary is a median of the steps."""
    points = {(name, step): value for name, step, value in result.points}
    tokens = 2 * 2 * 64
    for step in range(1, 21):
        seconds = points["throughput/step_seconds", step]
        assert points["throughput/tokens_per_second", step] == pytest.approx(tokens / seconds)
        assert points["throughput/device/tokens_per_second", step] == pytest.approx(tokens / 2 / seconds)
    steady = [points["throughput/step_seconds", step] for step in range(4, 21)]
    assert [points["throughput/steady", step] for step in range(1, 21)] == [0.0] * 3 + [1.0] * 17
    assert points["summary/steady_windows", 20] == 17
    assert points["summary/step_seconds_p50", 20] == pytest.approx(sorted(steady)[len(steady) // 2])
    assert points["summary/tokens_per_second_median", 20] == pytest.approx(
        tokens / points["summary/step_seconds_p50", 20]
    )


def test_the_terminal_shows_the_run_and_no_library(result):
    """Of a good run standard error is empty, and standard output has nothing but ortlaunch's own lines."""
    assert result.stderr == ""
    assert [line for line in result.stdout.splitlines() if not TERMINAL.fullmatch(line)] == []


def test_onnx_runtime_speaks_in_the_logs(matrix):
    """ORTModule's banner shows that what is missing on the terminal was really said."""
    result = matrix["ort-ddp"]
    assert re.search(r"ORTModule.*is accelerating", result.log(0), re.DOTALL)
    assert (result.run_dir / "logs" / "rank-1.log").is_file()
    assert "ORTModule" not in result.stdout + result.stderr


def test_what_the_model_prints_goes_to_terminal_and_log(debugged):
    """Rank 0's words reach the terminal, every rank's its log."""
    assert debugged.returncode == 0, debugged.report
    assert "hello from 0" in debugged.stdout.splitlines()
    assert "hello from 1" not in debugged.stdout + debugged.stderr
    assert "hello from 0" in debugged.log(0).splitlines()
    assert "hello from 1" in debugged.log(1).splitlines()


def test_a_folder_of_any_name_will_do(debugged, mlflow_run):
    """Spaces, quotes and umlauts in the working folder and the experiment's name."""
    assert debugged.returncode == 0, debugged.report
    assert debugged.run_dir.is_relative_to(debugged.cwd / "runs")
    client, run = mlflow_run(debugged)
    assert run.info.status == "FINISHED"
    assert client.get_experiment(run.info.experiment_id).name == "größere Läufe"
    copy = client.download_artifacts(run.info.run_id, "ortlaunch/config.yaml")
    assert copy.endswith("config.yaml")
