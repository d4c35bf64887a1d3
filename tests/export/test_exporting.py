"""The forward as it trains: what is in the file, and that it is found out where it is not right."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.export import external_data, graph, names, onnx_file, proofs
from ortlaunch.export.forward import find_forward
from ortlaunch.export.source import ExportSource
from ortlaunch.ort.runtime import Graph


def exported(model, batches, tmp_path, *, own_loss=False, external=False):
    source = ExportSource(to_config(compose(["model=mlp"])), model, batches, "here")
    return onnx_file.export(source, tmp_path / "through" / "model.onnx", own_loss=own_loss, external=external)


def quiet(made):
    return graph.with_statistics(graph.without_dropout(made))


@pytest.fixture(autouse=True)
def through(tmp_path):
    (tmp_path / "through").mkdir()


def test_parameters_are_there_under_their_names_and_nothing_has_moved(net, batches, tmp_path) -> None:
    before = copy.deepcopy(net.state_dict())
    found = exported(net, batches, tmp_path)
    used = {name for name, _ in net.named_parameters() if not name.startswith("idle")}
    there = graph.initializers(found.graph)
    assert used <= set(there)
    assert set(found.names.parameters) == used
    assert set(found.names.unused) == {"idle.weight", "idle.bias"}
    assert found.names.aliases == {"again.weight": "wide.weight"}
    assert set(found.names.buffers) == {"norm.running_mean", "norm.running_var"}
    for name in (*used, *found.names.buffers):
        assert np.array_equal(graph.value(there[name]), before[name].numpy())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert net.training
    assert found.graph.ir_version <= graph.IR_VERSION and graph.opset(found.graph) == 17
    assert list((tmp_path / "through").iterdir()) == []


@pytest.mark.parametrize("several", [False, True])
def test_a_tied_weight_is_one_initializer_under_its_first_name(net, batches, tmp_path, several) -> None:
    found = exported(net, batches, tmp_path)
    made = found.graph
    if several:
        copied = graph.initializers(made)["wide.weight"]
        made.graph.initializer.append(onnx.numpy_helper.from_array(graph.value(copied).copy(), "again.weight"))
        (reader,) = [node for node in graph.nodes(made) if node.op_type == "Transpose" and "wide.weight" in node.input]
        reader.input[0] = "again.weight"
    else:
        graph.rename(made, {"wide.weight": "again.weight"})
    names.settle(net, found.forward, batches[0], made)
    assert [tensor.name for tensor in made.graph.initializer].count("wide.weight") == 1
    assert "again.weight" not in graph.initializers(made)
    assert not any("again.weight" in node.input for node in graph.nodes(made))


def test_training_behaviour_is_kept(net, batches, tmp_path) -> None:
    found = exported(net, batches, tmp_path)
    assert found.proofs.dropout == [0.25]
    assert found.proofs.batch_norms == 1
    assert found.proofs.largest_error < 1e-5
    assert [4, 1, 8, 8] in found.proofs.shapes and [8, 1, 8, 8] in found.proofs.shapes
    run = Graph(found.graph.SerializeToString())
    first, second = run(batches[0]), run(batches[0])
    assert not torch.equal(first["logits"], second["logits"])


def test_the_models_own_loss_goes_in(net, batches, tmp_path) -> None:
    found = exported(net, batches, tmp_path, own_loss=True)
    run = Graph(quiet(found.graph).SerializeToString())
    assert run.inputs == ("pixel_values", "labels") and run.outputs[:2] == ("loss", "logits")
    with proofs.dropout_off(), torch.no_grad():
        expected = net(**batches[1])["loss"]
    torch.testing.assert_close(run(batches[1])["loss"], expected)


def test_names_and_sizes_of_inputs_and_outputs(net, batches) -> None:
    forward = find_forward(net, batches[0], with_labels=True)
    assert forward.axes == {
        "pixel_values": {0: "batch"},
        "labels": {0: "batch"},
        "loss": {},
        "logits": {0: "batch"},
    }

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 5)

        def forward(self, ids):
            return self.embed(ids)

    tokens = {"input_ids": torch.zeros(3, 6, dtype=torch.int64), "labels": torch.zeros(3, 6, dtype=torch.int64)}
    forward = find_forward(Tokens(), tokens, with_labels=False)
    assert forward.inputs == ("input_ids",)
    assert forward.axes == {"input_ids": {0: "batch", 1: "sequence"}, "logits": {0: "batch", 1: "sequence"}}


def test_fewer_inputs_than_forward_needs(batches, tmp_path) -> None:
    class Needs(nn.Linear):
        def forward(self, pixel_values, other):
            return super().forward(pixel_values)

    with pytest.raises(RequestError, match="forward needs other and the data gives pixel_values"):
        exported(Needs(8, 2), batches, tmp_path)


class Folded(nn.Module):
    """Computes with a copy that the trace takes for a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.scale = nn.Parameter(torch.ones(10))

    def forward(self, pixel_values):
        return self.head(pixel_values.flatten(1)) * torch.tensor(self.scale.tolist())


def test_a_parameter_that_the_trace_has_folded_is_found_out(batches, tmp_path) -> None:
    with pytest.raises(RequestError, match="computes another logits than PyTorch"):
        exported(Folded(), batches, tmp_path)


def test_a_folded_parameter_is_named() -> None:
    model = nn.Linear(4, 2)
    batch = {"pixel_values": torch.ones(3, 4)}
    forward = find_forward(model, batch, with_labels=False)
    weight = onnx.numpy_helper.from_array(model.weight.detach().numpy(), "weight")
    made = onnx.helper.make_model(onnx.helper.make_graph([], "folded", [], [], [weight]))
    with pytest.raises(RequestError, match="has folded bias"):
        names.settle(model, forward, batch, made)


class Branch(nn.Module):
    """Decides by a tensor's value."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, pixel_values):
        flat = pixel_values.flatten(1)
        if flat.sum() > 0:
            return self.head(flat)
        return self.head(-2 * flat)


def test_a_frozen_branch_is_refused_with_its_line(batches, tmp_path) -> None:
    batches[0]["pixel_values"] = batches[0]["pixel_values"].abs()
    batches[2]["pixel_values"] = -batches[2]["pixel_values"].abs()
    with pytest.raises(RequestError) as caught:
        exported(Branch(), batches, tmp_path)
    assert "computes another logits than PyTorch" in str(caught.value)
    assert "if flat.sum() > 0:" in str(caught.value)


class Unknown(nn.Module):
    """Uses an operator that the exporter does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 10)

    def forward(self, pixel_values):
        return torch.special.i0e(self.inner(pixel_values.flatten(1)))


def test_a_model_that_cannot_be_exported_is_refused_with_the_operator(batches, tmp_path) -> None:
    with pytest.raises(RequestError) as caught:
        exported(Unknown(), batches, tmp_path)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("the model cannot be exported to ONNX: ")
    assert any("unsupported: aten::special_i0e" in line and "test_exporting.py" in line for line in lines[1:])


def test_dropout_that_the_graph_has_lost_is_found_out(net, batches, tmp_path) -> None:
    found = exported(net, batches, tmp_path)
    lost = graph.without_dropout(found.graph)
    with pytest.raises(RequestError, match="0 active dropouts, and the model has 1"):
        proofs.prove_training(net, found.forward, batches, lost, found.names, [])


def test_batch_norm_in_eval_mode_is_found_out(net, batches, tmp_path) -> None:
    found = exported(net, batches, tmp_path)
    for node in found.graph.graph.node:
        for attribute in node.attribute:
            if attribute.name == "training_mode":
                attribute.i = 0
    with pytest.raises(RequestError, match="0 BatchNorms in train mode"):
        proofs.prove_training(net, found.forward, batches, found.graph, found.names, [])


def test_an_ortmodule_before_it_leaves_no_trace(net, batches, tmp_path) -> None:
    """What ORTModule registers for its own exports must not get into this one, and must be there again after it."""
    from ortlaunch.ort import session
    from ortlaunch.ort.operators import symbolics

    session.import_ortmodule()
    from onnxruntime.training.ortmodule._custom_op_symbolic_registry import CustomOpSymbolicRegistry
    from torch.onnx._internal import registration

    CustomOpSymbolicRegistry.register_all(17)
    symbolics.register()

    def overridden() -> dict[str, list[int]]:
        groups = registration.registry._registry.items()
        return {name: sorted(group._functions._overrides) for name, group in groups if group._functions._overrides}

    before = overridden()
    assert "aten::cross_entropy_loss" in before
    found = exported(net, batches, tmp_path, own_loss=True)
    assert {node.domain for node in graph.nodes(found.graph)} == {""}
    assert overridden() == before


def test_large_weights_lie_beside_the_graph(net, batches, tmp_path, monkeypatch) -> None:
    """The way of models whose weights no protobuf message holds: by path, with a graph that has none of them."""
    whole = exported(net, batches, tmp_path)
    monkeypatch.setattr(external_data, "EXTERNAL_BYTES", 17_000)
    found = exported(net, batches, tmp_path)
    folder, data = found.folder, found.folder / "model.onnx.data"
    assert list(folder.iterdir()) == [data]
    assert data.stat().st_size > 16_000 > found.graph.ByteSize()
    assert found.names == whole.names and found.proofs.shapes == whole.proofs.shapes
    assert found.proofs.dropout == [0.25] and found.proofs.largest_error < 1e-5
    graph.save(quiet(found.graph), folder / "model.onnx")
    expected = Graph(quiet(whole.graph).SerializeToString())(batches[0])["logits"]
    torch.testing.assert_close(Graph(folder / "model.onnx")(batches[0])["logits"], expected)
    # As any reader of ONNX finds it.
    again = graph.initializers(graph.load(folder / "model.onnx"))
    assert np.array_equal(graph.value(again["wide.weight"]), net.wide.weight.detach().numpy())
    lies = graph.initializers(found.graph)
    assert np.array_equal(external_data.value(lies["wide.weight"], folder), net.wide.weight.detach().numpy())
    offsets = [int(entry.value) for one in lies.values() for entry in one.external_data if entry.key == "offset"]
    assert offsets and all(offset % 4096 == 0 for offset in offsets)


@pytest.mark.parametrize("external", [False, True])
def test_weights_that_torch_has_left_in_a_file_each(net, batches, tmp_path, external) -> None:
    """As it does of a graph of 2 GB and more."""
    made, folder = exported(net, batches, tmp_path).graph, tmp_path / "through"
    kinds = {"save_as_external_data": True, "all_tensors_to_one_file": False, "convert_attribute": True}
    copied = onnx.ModelProto.FromString(made.SerializeToString())
    onnx.save(copied, folder / "model.onnx", size_threshold=0, **kinds)
    assert len(list(folder.iterdir())) > 8
    taken = external_data.read_exported(folder / "model.onnx", external=external)
    assert [path.name for path in folder.iterdir()] == (["model.onnx.data"] if external else [])
    assert external_data.used_by(taken) is external
    for name, tensor in graph.initializers(taken).items():
        assert np.array_equal(external_data.value(tensor, folder), graph.value(graph.initializers(made)[name]))
    run = external_data.runnable(quiet(taken), folder)
    expected = Graph(quiet(made).SerializeToString())(batches[1])["logits"]
    torch.testing.assert_close(run(batches[1])["logits"], expected)


def test_weights_beside_the_graph_that_are_not_the_models_are_found_out(net, batches, tmp_path) -> None:
    found = exported(net, batches, tmp_path, external=True)
    data = found.folder / "model.onnx.data"
    content = bytearray(data.read_bytes())
    content[-1] ^= 0x40
    data.write_bytes(content)
    with pytest.raises(RequestError, match=r"has changed the values of head\.weight"):
        names.settle(net, found.forward, batches[0], found.graph, found.folder)
    with pytest.raises(RequestError, match="computes another logits than PyTorch"):
        proofs.prove_training(net, found.forward, batches, found.graph, found.names, [], found.folder)


def test_a_weight_beside_the_graph_that_nothing_reads_is_found_out(net, batches, tmp_path) -> None:
    """Folded into another: the graph follows its own weights, and not those put in."""
    found = exported(net, batches, tmp_path, external=True)
    (tensor,) = [one for one in found.graph.graph.initializer if one.name == "wide.weight"]
    folded = onnx.TensorProto()
    folded.CopyFrom(tensor)
    folded.name = "folded"
    found.graph.graph.initializer.append(folded)
    for node in found.graph.graph.node:
        node.input[:] = ["folded" if name == "wide.weight" else name for name in node.input]
    with pytest.raises(RequestError, match="computes another logits than PyTorch"):
        proofs.prove_training(net, found.forward, batches, found.graph, found.names, [], found.folder)


def test_a_version_that_the_runtime_does_not_read_is_lowered(tmp_path) -> None:
    made = onnx.helper.make_model(
        onnx.helper.make_graph(
            [onnx.helper.make_node("Relu", ["x"], ["y"])],
            "one",
            [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2])],
            [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2])],
        ),
        opset_imports=[onnx.helper.make_opsetid("", 17)],
    )
    made.ir_version = 14
    onnx.save(made, tmp_path / "new.onnx")
    with pytest.raises(Exception, match="IR version"):
        Graph(tmp_path / "new.onnx")
    graph.save(made, tmp_path / "old.onnx")
    assert Graph(tmp_path / "old.onnx")({"x": torch.tensor([-1.0, 1.0])})["y"].tolist() == [0.0, 1.0]


def test_foreign_operators_are_refused() -> None:
    node = onnx.helper.make_node("ATen", ["x"], ["y"], domain="org.pytorch.aten")
    made = onnx.helper.make_model(onnx.helper.make_graph([node], "foreign", [], []))
    for training in (False, True):
        with pytest.raises(RequestError, match=r"org\.pytorch\.aten::ATen"):
            graph.check_operators(made, for_training=training, what="it")


class OnlyWithLabels(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.head(x), labels)  # type: ignore[arg-type]


def test_a_forward_that_needs_labels_is_told_what_to_return_without_them() -> None:
    batch = {"x": torch.rand(2, 4), "labels": torch.tensor([0, 1])}
    assert find_forward(OnlyWithLabels(), batch, with_labels=True)
    with pytest.raises(RequestError, match=r"without labels it is to return the logits\): TypeError"):
        find_forward(OnlyWithLabels(), batch, with_labels=False)
