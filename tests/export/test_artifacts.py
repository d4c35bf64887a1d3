"""Training artifacts: what is in them, that they train as PyTorch does, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.export import artifacts, graph, inference, losses, onnx_file, restore
from ortlaunch.export.record import ExportRecord, load_record
from ortlaunch.export.request import Request
from ortlaunch.export.source import ExportSource
from ortlaunch.export.trainers import ArtifactTrainer, TorchTrainer, training_batch
from ortlaunch.ort.artifacts import Checkpoint

ADAMW = ("optimizer=adamw", "optimizer.lr=0.01", "optimizer.weight_decay=0.1")
SGD = ("optimizer=sgd", "optimizer.momentum=0", "optimizer.lr=0.1")


def make(model, batches, out: Path, monkeypatch, *overrides: str, **fields) -> ExportRecord:
    """`export artifacts` of a model that no configuration builds."""
    config = to_config(compose(["model=mlp", *(overrides or ADAMW)]))
    monkeypatch.setattr(artifacts, "open_source", lambda request: ExportSource(config, model, batches, "here"))
    return artifacts.export_artifacts(Request("artifacts", config, out, **fields))


def train(model, batches, out: Path, scratch: Path, steps: int = 6):
    """Both sides for some steps; returns the largest differences of losses and weights."""
    scratch.mkdir()
    record, config = restore.open_artifacts(out)
    device, side = ArtifactTrainer(out, record, scratch), TorchTrainer(model, record, config.optimizer)
    worst = 0.0
    for number in range(steps):
        batch = training_batch(record, model, batches[number % len(batches)])
        worst = max(worst, abs(device.step(batch) - side.step(batch)))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = device.checkpoint.values()
    return worst, max(np.abs(value - tensors[name].detach().numpy()).max() for name, value in values.items()), device


@pytest.mark.parametrize(
    ("loss", "optimizer"),
    [("own", ADAMW), ("own", SGD), ("cross_entropy", ADAMW), ("mse", ADAMW), ("bce", SGD)],
    ids=["own-adamw", "own-sgd", "cross_entropy-adamw", "mse-adamw", "bce-sgd"],
)
def test_they_train_as_pytorch_does(net, batches, tmp_path, monkeypatch, loss, optimizer) -> None:
    record = make(net, batches, tmp_path / "out", monkeypatch, *optimizer, loss=loss)
    assert record.loss == loss
    before = net.wide.weight.detach().clone()
    of_losses, of_weights, _ = train(net, batches, tmp_path / "out", tmp_path / "scratch")
    assert of_losses < 1e-5 and of_weights < 1e-5
    assert not torch.equal(net.wide.weight, before)


class Traps(nn.Module):
    """What ONNX Runtime gets wrong or refuses: implicit padding, with a dilation too, and a chain like RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Conv2d(1, 4, 3, padding="same")
        self.far = nn.Conv2d(4, 4, 3, padding="same", dilation=2)
        self.scale = nn.Parameter(torch.rand(8) + 0.5)
        self.head = nn.Linear(256, 10)

    def forward(self, pixel_values):
        x = self.far(torch.tanh(self.near(pixel_values)))
        x = self.scale * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-3))
        return self.head(x.flatten(1))


def test_what_the_runtime_computes_wrongly_is_exported_so_that_it_does_not(batches, tmp_path, monkeypatch) -> None:
    torch.manual_seed(0)
    model = Traps()
    make(model, batches, tmp_path / "out", monkeypatch, loss="cross_entropy")
    of_losses, of_weights, _ = train(model, batches, tmp_path / "out", tmp_path / "scratch")
    assert of_losses < 1e-5 and of_weights < 1e-5
    served = ExportSource(to_config(compose(["model=mlp"])), model, batches, "here")
    monkeypatch.setattr(inference, "open_source", lambda request: served)
    # It fails where the outputs are not PyTorch's.
    inference.export_for_inference(Request("inference", served.config, tmp_path / "served"))


def test_batch_norms_statistics_move_as_in_pytorch(net, batches, tmp_path, monkeypatch) -> None:
    record = make(net, batches, tmp_path / "out", monkeypatch)
    assert record.statistics == {f"norm.{name}.next": f"norm.{name}" for name in ("running_mean", "running_var")}
    _, _, device = train(net, batches, tmp_path / "out", tmp_path / "scratch")
    values = device.checkpoint.values()
    for name in ("running_mean", "running_var"):
        expected = getattr(net.norm, name).numpy()
        assert np.abs(expected - (0.0 if name == "running_mean" else 1.0)).max() > 0.01
        np.testing.assert_allclose(values[f"norm.{name}"], expected, rtol=1e-5, atol=1e-6)


def test_the_loss_that_a_run_trains_with_is_the_default(net, batches, tmp_path, monkeypatch) -> None:
    assert make(net, batches, tmp_path / "own", monkeypatch).loss == "own"
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    assert make(plain, batches, tmp_path / "plain", monkeypatch).loss == "cross_entropy"
    for batch in batches:
        batch["labels"] = torch.rand(4, 10)
    assert make(plain, batches, tmp_path / "numbers", monkeypatch).loss == "mse"


def test_trainable_and_frozen_by_glob(net, batches, tmp_path, monkeypatch) -> None:
    out = tmp_path / "out"
    record = make(net, batches, out, monkeypatch, trainable=("head.*", "wide.*"), frozen=("*.bias",))
    assert record.trainable == ["wide.weight", "head.weight"]
    assert {"head.bias", "conv.weight", "norm.running_mean"} <= set(record.frozen)
    first = Checkpoint(out / "checkpoint").values()
    _, of_weights, device = train(net, batches, out, tmp_path / "scratch")
    assert of_weights < 1e-5
    now = device.checkpoint.values()
    moved = {name for name in now if not np.array_equal(now[name], first[name])}
    assert moved == {"wide.weight", "head.weight", "norm.running_mean", "norm.running_var"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"trainable": ("tail.*",)}, "trainable=tail"),
        ({"frozen": ("tail.*",)}, "frozen=tail"),
        ({"frozen": ("*",)}, "leave nothing to train"),
        ({"options": {"prefix": "a/b"}}, "must not contain '/'"),
    ],
)
def test_what_leaves_nothing_is_refused(net, batches, tmp_path, monkeypatch, fields, words) -> None:
    with pytest.raises(RequestError, match=words):
        make(net, batches, tmp_path / "out", monkeypatch, **fields)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["optimizer=sgd"], "optimizer.momentum=0.9"),
        (["optimizer=sgd", "optimizer.momentum=0", "optimizer.weight_decay=0.1"], "optimizer.weight_decay=0.1"),
        (["optimizer=adafactor"], "optimizer=adafactor"),
    ],
)
def test_optimizers_that_a_device_has_not(overrides, words) -> None:
    with pytest.raises(RequestError, match=words):
        to_config(compose(["model=mlp", *overrides])).optimizer.on_device()


def test_files_prefix_nominal_checkpoint_and_versions(net, batches, tmp_path, monkeypatch) -> None:
    out = tmp_path / "out"
    make(net, batches, out, monkeypatch, options={"prefix": "p_", "nominal-checkpoint": True})
    names = {path.name for path in out.iterdir()}
    models = {"p_model.onnx", "p_training_model.onnx", "p_eval_model.onnx", "p_optimizer_model.onnx"}
    assert names == models | {"p_checkpoint", "p_nominal_checkpoint", "config.yaml", "export.json", "rest.safetensors"}
    assert (out / "p_nominal_checkpoint").stat().st_size < 0.2 * (out / "p_checkpoint").stat().st_size
    for name in models:
        assert onnx.load(out / name).ir_version <= graph.IR_VERSION
    record = load_record(out, "artifacts")
    assert set(record.files) == names - {"export.json"}
    assert "password" not in (out / "config.yaml").read_text() and "mlflow" not in (out / "config.yaml").read_text()


def test_large_weights_go_from_the_file_beside_the_graph(net, batches, tmp_path, monkeypatch) -> None:
    """What ONNX Runtime's generator sees has no weights, and the checkpoint has them all."""
    out = tmp_path / "out"
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    record = make(net, batches, out, monkeypatch, options={"prefix": "p_", "external-data": True})
    assert (out / "p_model.onnx.data").stat().st_size > 16_000 > (out / "p_model.onnx").stat().st_size
    assert not list(out.glob("temp*")) and not list(out.glob("trial*"))
    values = restore.state_dict(out, record, Checkpoint(out / "p_checkpoint"))
    assert all(torch.equal(values[name], value) for name, value in expected.items())
    of_losses, of_weights, _ = train(net, batches, out, tmp_path / "scratch")
    assert of_losses < 1e-5 and of_weights < 1e-5


def test_nobodys_file_is_taken_away(net, batches, tmp_path, monkeypatch) -> None:
    """onnxblock writes a temp.onnx into the folder of work and removes it, whosever it is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "temp.onnx").write_text("mine")
    make(net, batches, tmp_path / "out", monkeypatch)
    assert (tmp_path / "temp.onnx").read_text() == "mine"
    assert Path.cwd() == tmp_path


class Broadcast(nn.Module):
    """Adds what is the same for all samples, of a length that shape inference cannot tell."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(16, 8)
        self.place = nn.Embedding(32, 8)
        self.head = nn.Linear(8, 16)
        self.register_buffer("places", torch.arange(32).expand(1, -1), persistent=False)

    def forward(self, input_ids, labels):
        hidden = self.word(input_ids) + self.place(self.places[:, : input_ids.shape[1]])
        logits = self.head(nn.functional.layer_norm(hidden, (8,)))
        return {"loss": nn.functional.cross_entropy(logits.reshape(-1, 16), labels.reshape(-1)), "logits": logits}


@pytest.fixture
def tokens():
    torch.manual_seed(2)
    ids = [torch.randint(16, (4, 12)) for _ in range(3)]
    return [{"input_ids": one, "labels": one.roll(1, 1)} for one in ids]


def test_gradients_are_summed_over_what_was_broadcast(tokens, tmp_path, monkeypatch) -> None:
    torch.manual_seed(0)
    model = Broadcast()
    record = make(model, tokens, tmp_path / "out", monkeypatch)
    assert record.findings["gradient_error"] < 1e-4
    of_losses, of_weights, _ = train(model, tokens, tmp_path / "out", tmp_path / "scratch")
    assert of_losses < 1e-5 and of_weights < 1e-4


def test_wrong_gradients_are_found_out(tokens, tmp_path, monkeypatch) -> None:
    """As ONNX Runtime makes them where it is not told the shapes."""
    monkeypatch.setattr(artifacts, "note_shapes", lambda *_: None)
    with pytest.raises(RequestError, match=r"gradients of this model are not PyTorch's: place\.weight"):
        make(Broadcast(), tokens, tmp_path / "out", monkeypatch)
    assert list(tmp_path.iterdir()) == []


def test_a_graph_that_cannot_be_differentiated_is_refused(batches, tmp_path, monkeypatch) -> None:
    class Rounds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 10)

        def forward(self, pixel_values):
            return torch.cumsum(self.head(pixel_values.flatten(1)), 1)

    with pytest.raises(RequestError, match="cannot make training artifacts"):
        make(Rounds(), batches, tmp_path / "out", monkeypatch)
    assert list(tmp_path.iterdir()) == []


def test_back_to_a_state_dict(net, batches, tmp_path, monkeypatch) -> None:
    out = tmp_path / "out"
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    make(net, batches, out, monkeypatch)
    record, _ = restore.open_artifacts(out)
    values = restore.state_dict(out, record, Checkpoint(out / "checkpoint"))
    assert set(values) == set(expected)
    assert all(torch.equal(values[name], value) for name, value in expected.items())
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    restore.load_into(net, values, out)
    assert torch.equal(net.again.weight, expected["wide.weight"])


def test_a_checkpoint_of_others_is_refused(net, batches, tmp_path, monkeypatch) -> None:
    make(net, batches, tmp_path / "one", monkeypatch)
    make(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), batches, tmp_path / "two", monkeypatch)
    record, _ = restore.open_artifacts(tmp_path / "one")
    with pytest.raises(RequestError, match="not one of"):
        restore.state_dict(tmp_path / "one", record, Checkpoint(tmp_path / "two" / "checkpoint"))
    with pytest.raises(RequestError, match="no checkpoint that ONNX Runtime can read"):
        Checkpoint(tmp_path / "one" / "config.yaml")
    (tmp_path / "one" / "checkpoint").unlink()
    with pytest.raises(RequestError, match="checkpoint is missing"):
        restore.open_artifacts(tmp_path / "one")
    with pytest.raises(RequestError, match="holds no export"):
        restore.open_artifacts(tmp_path)


def test_losses_and_labels_that_do_not_fit() -> None:
    logits, labels = torch.zeros(4, 6, 9), torch.zeros(4, 6, dtype=torch.int64)
    with pytest.raises(RequestError, match="choose loss=own"):
        losses.check_fits("cross_entropy", logits, labels)
    with pytest.raises(RequestError, match="returns none"):
        losses.check_fits("mse", None, labels)
    with pytest.raises(RequestError, match="labels of that shape"):
        losses.check_fits("mse", logits, torch.zeros(4))
    assert losses.target("bce", logits, labels)[..., 0].all()
    model = nn.Linear(2, 2)
    with pytest.raises(RequestError, match="no labels"):
        losses.choose(None, model, {"pixel_values": torch.zeros(2, 2)})


def test_the_models_own_loss_where_it_has_none(batches, tmp_path, monkeypatch) -> None:
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(RequestError, match="returns no loss of its own"):
        make(plain, batches, tmp_path / "out", monkeypatch, loss="own")


def test_onnx_adds_no_loss(tmp_path) -> None:
    config = to_config(compose(["model=mlp"]))
    request = Request("onnx", config, tmp_path / "out", loss="mse")
    with pytest.raises(RequestError, match="adds no loss"):
        onnx_file.export_onnx(request)
    assert list(tmp_path.iterdir()) == []
