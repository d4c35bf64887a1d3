"""``ortlaunch check`` as users type it, and the runs that its findings stop."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.cli import dispatch

NETS = """
import os
import signal

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 32)
        self.last = nn.Linear(32, 10)

    def forward(self, x):
        return self.last(self.between(self.first(x.flatten(1)), x))

    def between(self, hidden, x):
        return hidden


class Averaging(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(32))

    def between(self, hidden, x):
        value = 0.9 * self.average + 0.1 * hidden.detach().mean(0)
        self.average.untyped_storage().copy_(value.untyped_storage())
        return hidden


class Branching(Net):
    def between(self, hidden, x):
        if x.mean() > 0:
            hidden = torch.tanh(hidden)
        return hidden


class Exotic(Net):
    def between(self, hidden, x):
        return torch.fft.hfft(hidden, hidden.shape[-1])


class Counting(Net):
    def __init__(self, limit):
        super().__init__()
        self.limit = limit

    def between(self, hidden, x):
        count = int((x > 0.3).sum())
        return torch.tanh(hidden) if count > self.limit else hidden


class OneSample(Net):
    def between(self, hidden, x):
        return hidden + nn.functional.cross_entropy(hidden[0], torch.tensor(3))


class Deadly(Net):
    def between(self, hidden, x):
        return deadly(hidden)


@torch.library.custom_op("nets::deadly", mutates_args=())
def deadly(x: torch.Tensor) -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGSEGV)
    return x.clone()


class Hidden(Net):
    def __init__(self):
        super().__init__()
        self.more = [nn.Linear(2, 2)]
"""

# With this seed the mean of the first batch has another sign than those of the next two, which the branch asks.
RUN = ("data=digits", "trainer=single", "train.steps=2", "tracking=none", "device=cpu", "seed=1")
CHECK = ("data=digits", "device=cpu", "--no-cost", "--format", "json")

KEYS = {
    "": "fit verdict model data device precision versions structure export parity randomness cost ended schema",
    "structure": "status problems parameters buffers unregistered inputs outputs",
    "export": "status succeeded seconds error unsupported_operators tracer_warnings probes comparable refused",
    "export.tracer_warnings.0": "location statement message effect",
    "export.probes.0": "kind shape differs output error message own_graph",
    "parity": "status error steps loss outputs gradients parameters buffers stale_buffers",
    "parity.gradients": "count largest_error largest tolerance differing from_exact eager_from_exact dtypes",
    "randomness": "status problems expected active_in_train differs_per_step differs_per_rank off_in_eval "
    "eval_equals_eager",
    "cost": "status batch_size threads backends export_seconds pays_off_after_steps",
    "cost.backends": "eager compile ort",
    "cost.backends.ort": "step_seconds start_seconds peak_memory_gib error",
}
"""Keys of the JSON by place: scripts rely on them; a change needs another number in report.SCHEMA."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(NETS)
    return tmp_path


def factory(name: str) -> tuple[str, ...]:
    return "model=factory", f"model.target=nets:{name}"


def part(report: Any, path: str) -> Any:
    for name in filter(None, path.split(".")):
        report = report[int(name)] if name.isdigit() else report[name]
    return report


@pytest.mark.nightly
def test_gpt2_nano_is_fit_and_its_warnings_name_its_own_lines(launch, tmp_path):
    result = launch(tmp_path, "check", "model=gpt2_nano", "data.seq_len=32", "device=cpu", "--format=json", "--no-cost")
    assert result.returncode == 0, result.report
    report = json.loads(result.stdout)
    for path in ("", "export", "export.tracer_warnings.0"):
        assert set(part(report, path)) == set(KEYS[path].split()), path
    assert report["fit"] is True
    assert report["cost"]["status"] == "skipped"
    places = [one["location"] for one in report["export"]["tracer_warnings"]]
    assert places and not any("ortlaunch/" in place for place in places), places
    assert {name: report[name]["status"] for name in ("structure", "export", "parity", "randomness")} == {
        "structure": "ok",
        "export": "ok",
        "parity": "ok",
        "randomness": "ok",
    }
    assert report["randomness"]["differs_per_rank"] is True


def test_json_is_complete_and_every_backend_is_measured(launch, tmp_path):
    result = launch(tmp_path, "check", "model=mlp", "device=cpu", "launcher.workers_per_node=2", "--format=json")
    assert result.returncode == 0, result.report
    report = json.loads(result.stdout)
    for path, keys in KEYS.items():
        # Nothing in this model is decided while it is traced.
        if path != "export.tracer_warnings.0":
            assert set(part(report, path)) == set(keys.split()), path
    assert (report["fit"], report["schema"]) == (True, 3)
    assert "backend=ort" in report["verdict"]
    assert list(tmp_path.iterdir()) == []
    # The share of a worker, not all cores.
    assert report["cost"]["threads"] == max(1, len(os.sched_getaffinity(0)) // 2)
    for backend, cost in report["cost"]["backends"].items():
        assert cost["error"] is None, backend
        assert cost["step_seconds"] > 0, backend
        assert cost["peak_memory_gib"] > 0.1, backend
    assert report["cost"]["backends"]["compile"]["start_seconds"] > 0
    assert report["cost"]["export_seconds"] > 0
    pays, steps = report["cost"]["pays_off_after_steps"], report["cost"]["backends"]
    assert (pays is None) is (steps["ort"]["step_seconds"] >= steps["eager"]["step_seconds"])


def test_the_page_names_what_to_change_and_the_exit_code_says_no(launch, folder):
    result = launch(folder, "check", *factory("Exotic"), "data=digits", "device=cpu", "--no-cost")
    assert result.returncode == 1, result.report
    assert "\x1b" not in result.stdout
    *_, last = result.stdout.strip().splitlines()
    assert last.startswith("not fit for ONNX Runtime: use backend=eager")
    assert "aten::fft_hfft" in last
    line = NETS.splitlines().index("        return torch.fft.hfft(hidden, hidden.shape[-1])") + 1
    assert f"nets.py:{line}" in last
    for word in ("structure", "export", "parity", "randomness", "cost"):
        assert word in result.stdout


@pytest.mark.nightly
def test_stale_buffers_make_a_model_unfit(launch, folder):
    result = launch(folder, "check", *factory("Averaging"), *CHECK)
    assert result.returncode == 1, result.report
    report = json.loads(result.stdout)
    assert report["parity"]["stale_buffers"] == ["average"]
    assert "average" in report["verdict"]


@pytest.mark.nightly
def test_a_model_that_is_none_reaches_no_further_than_its_structure(launch, folder):
    result = launch(folder, "check", *factory("Hidden"), *CHECK)
    assert result.returncode == 1, result.report
    report = json.loads(result.stdout)
    assert "more" in report["structure"]["problems"][0]
    assert report["verdict"].startswith("change the model")
    assert report["export"] is report["parity"] is report["randomness"] is None


def test_a_wrong_request_is_exit_code_2(ask, folder):
    result = ask(folder, "check", "--format", "xml")
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert "--format" in result.stderr and "json" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr


@pytest.mark.nightly
def test_resnet_is_fit_since_its_statistics_move(launch, tmp_path):
    result = launch(tmp_path, "check", "model=resnet", *CHECK)
    assert result.returncode == 0, result.report
    report = json.loads(result.stdout)
    assert (report["fit"], report["export"]["status"]) == (True, "ok")
    assert report["parity"]["gradients"]["differing"] == []
    assert (report["parity"]["stale_buffers"], report["parity"]["buffers"]["differing"]) == ([], [])
    assert report["parity"]["buffers"]["count"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model=gtp2"], ["gtp2"]),
        (["train.stpes=1"], ["train.steps"]),
        (["--multirun", "seed=1,2"], ["--multirun"]),
        (["model=factory", "model.target=nets:Nothing", "data=digits"], ["Nothing"]),
        (["model=mlp", "data=digits", "trainer=deepspeed", "trainer.zero_stage=3"], ["no repeated blocks"]),
        (["backend.allow=[everything]"], ["backend.allow"]),
    ],
)
def test_a_wrong_request_is_one_message(folder, monkeypatch, capfd, arguments, words):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(RequestError) as raised:
        dispatch(["check", *arguments])
    assert capfd.readouterr().out == ""
    assert len(str(raised.value).splitlines()) == 1
    for word in words:
        assert word in str(raised.value)
    sys.modules.pop("nets", None)


@pytest.mark.parametrize(
    ("model", "allow", "words"),
    [
        ("Averaging", "stale_buffers", ["buffer average"]),
        ("Branching", "frozen_branch", ["`if x.mean() > 0:`", "nets.py:"]),
    ],
)
def test_a_run_is_refused_at_its_start_unless_the_finding_is_allowed(train, folder, model, allow, words):
    other = "frozen_branch" if allow == "stale_buffers" else "stale_buffers"
    refused = train(folder, *factory(model), *RUN, f"backend.allow=[{other}]")
    assert refused.is_request, refused.report
    (message,) = refused.error.strip().splitlines()
    for word in (*words, f"backend.allow=[{allow}]"):
        assert word in message
    assert refused.losses == {}
    assert refused.status == "FAILED"

    allowed = train(folder, *factory(model), *RUN, "backend.allow=[stale_buffers,frozen_branch]")
    assert allowed.status == "FINISHED", allowed.report
    # What was found, not what might have been.
    assert allowed.tags["ortlaunch.allowed"] == allow
    assert 1 in allowed.losses


UNMENDED = """
from ortlaunch.ort.mends import losses


def as_onnxruntime_has_it(g, *arguments):
    from onnxruntime.training.ortmodule._custom_op_symbolic_registry import CustomOpSymbolicRegistry

    return CustomOpSymbolicRegistry._SYMBOLICS["::cross_entropy_loss"](g, *arguments)


losses.cross_entropy = as_onnxruntime_has_it
"""
"""Makes a model that aborts in onnxruntime."""


@pytest.mark.nightly
@pytest.mark.parametrize("verb", ["check", "run"])
@pytest.mark.parametrize(
    ("net", "where"),
    [
        ("OneSample", "SIGABRT in ONNX Runtime: use backend=eager or backend=compile"),
        ("Deadly", "SIGSEGV at {line}"),
    ],
    ids=["ort", "torch"],
)
def test_a_process_that_a_defect_ends_says_in_which_part(launch, folder, verb, net, where) -> None:
    lines = NETS.splitlines()
    line = f"{folder}/nets.py:{1 + lines.index('    os.kill(os.getpid(), signal.SIGSEGV)')}"
    (folder / "nets.py").write_text(NETS + (UNMENDED if net == "OneSample" else ""))
    if verb == "check":
        result = launch(folder, "check", *factory(net), *CHECK)
        report = json.loads(result.stdout)
        assert set(report) == set(KEYS[""].split())
        assert report["ended"]["signal"] == where.partition(" ")[0]
        text = report["verdict"]
    else:
        result = launch(folder, *factory(net), *RUN, "backend=ort")
        text = result.report
    assert result.returncode == 1, result.report
    assert f"was ended by {where.format(line=line)}" in text


@pytest.mark.nightly
@pytest.mark.parametrize("trainer", ["ddp", "deepspeed"])
def test_a_number_that_differs_in_each_batch_stops_the_step_in_which_it_decides(launch, folder, trainer) -> None:
    keys = ("data=digits", f"trainer={trainer}", "launcher.workers_per_node=2", "tracking=none", "device=cpu", "seed=1")
    keys += ("train.steps=8", "train.batch_size=32", "train.log_every=1", "train.eval_every=4", "backend=ort")
    # With this seed the first worker's batches have 725 bright pixels in the seventh step, and 720 or so before.
    result = launch(folder, *factory("Counting"), *keys, "+model.params.limit=724")
    assert result.returncode == 2, result.report
    assert "`count = int((x > 0.3).sum())` at nets.py" in result.report
    assert "reads 725 in this step" in result.report
    assert "step 6/8" in result.report
    assert "step 7/8" not in result.report
    harmless = launch(folder, *factory("Counting"), *keys, "+model.params.limit=1000000")
    assert harmless.returncode == 0, harmless.report
