"""What follows one of PyTorch's kernels in the graph is differentiated in the shape that it really has."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ortlaunch.config.schema import OrtConfig
from ortlaunch.ort import session
from ortlaunch.trainer.wrapping import wrap_backend


class Product(nn.Module):
    """A batch of matrices, as a linear layer makes them, in a product that sums no gradient over the batch."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 6, bias=bias)
        self.other = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return (y @ self.other @ y.transpose(1, 2)).square().mean()


class LearnedBias(nn.Module):
    """Attention whose scores are shifted by what is learned, as T5's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.table = nn.Embedding(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        distance = (torch.arange(length)[:, None] - torch.arange(length)[None, :]).abs()
        bias = self.table(distance).permute(2, 0, 1)[None]
        heads = self.linear(x).view(rows, length, 2, 4).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias).square().mean()


@pytest.mark.parametrize(
    "make",
    [lambda: Product(bias=False), lambda: Product(bias=True), LearnedBias],
    ids=["linear", "linear_bias", "learned_bias"],
)
def test_gradients_are_eagers_at_every_batch_size_and_length(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make()
    ort = wrap_backend(copy.deepcopy(model), OrtConfig(), threads=1, onnx_dir=tmp_path)
    for rows, length in ((3, 6), (5, 9), (1, 2)):
        x = torch.randn(rows, length, 8)
        for each in (model, ort):
            each.zero_grad()
            each(x).backward()
        for name, parameter in model.named_parameters():
            # By the largest element: a sum in which large terms cancel out has their rounding errors.
            error = (ort.get_parameter(name).grad - parameter.grad).abs().max() / parameter.grad.abs().max()
            assert error < 1e-5, name
    assert session.is_active(ort)


def test_a_failed_inference_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnx import TensorProto, helper

    session.import_ortmodule()
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

    from ortlaunch.ort.operators import shapes

    shapes.register()
    monkeypatch.chdir(tmp_path)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])
    y = helper.make_empty_tensor_value_info("y")
    node = helper.make_node("Unknown", ["x"], ["y"], domain="nobody")
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("nobody", 1)]
    model = helper.make_model(helper.make_graph([node], "graph", [x], [y]), opset_imports=opsets)
    with pytest.raises(Exception, match="Incomplete symbolic shape inference"):
        SymbolicShapeInference.infer_shapes(model)
    assert not list(tmp_path.iterdir())


def test_batch_norm_keeps_the_sizes_of_its_input() -> None:
    """Otherwise each concatenation or sum behind it is one more inference of the whole graph."""
    from onnx import TensorProto, helper

    session.import_ortmodule()
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

    from ortlaunch.ort.operators import shapes

    shapes.register()
    half, single = TensorProto.FLOAT16, TensorProto.FLOAT
    given = {"x": (half, ["rows", 3, "height", 5])}
    given |= {name: (kind, [3]) for name, kind in (("weight", half), ("bias", half), ("mean", single), ("var", single))}
    inputs = [helper.make_tensor_value_info(name, *each) for name, each in given.items()]
    names = ["y", "next_mean", "next_var", "batch_mean", "batch_inverse_std"]
    node = helper.make_node("BatchNormInternal", list(given), names, domain="com.microsoft", training_mode=1)
    outputs = [helper.make_empty_tensor_value_info(name) for name in names]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "graph", inputs, outputs), opset_imports=opsets)
    inferred = SymbolicShapeInference.infer_shapes(model, auto_merge=True, guess_output_rank=True)
    found = [helper.make_tensor_value_info(name, *given["x" if name == "y" else "mean"]) for name in names]
    assert list(inferred.graph.output) == found
