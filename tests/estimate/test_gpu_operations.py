"""Operations on tensors of the CPU that keep the memory of those on a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from ortlaunch.estimate import gpu_operations
from ortlaunch.estimate.gpu_operations import as_on_gpu
from ortlaunch.estimate.ledger import Ledger


def listed(name: str) -> set[str]:
    """The operations of one of autocast's lists in the header of the installed torch."""
    header = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text()
    body = re.search(rf"#define {name}\(_\)((?:.*\\\n)+.*\n)", header)
    assert body is not None
    return {
        f"{operation}.{overload}" if overload else operation
        for operation, overload in re.findall(r"_\((\w+)(?:, (\w+))?\)", body[1])
    }


def test_autocasts_lists_are_those_of_the_installed_torch() -> None:
    assert listed("AT_FORALL_FP32") <= set(gpu_operations._IN_FP32)
    assert listed("AT_FORALL_FP32_SET_OPT_DTYPE") <= set(gpu_operations._TO_FP32)


def test_autocast_computes_in_the_precision_of_a_gpu() -> None:
    with as_on_gpu(), FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        half = functional.linear(torch.ones(2, 8), torch.ones(8, 8))
        assert half.dtype == torch.bfloat16
        for result in (
            functional.layer_norm(half, (8,), torch.ones(8), torch.ones(8)),
            half.softmax(-1),
            half**3,
            half.sum(),
            functional.cross_entropy(half, torch.zeros(2, dtype=torch.long)),
        ):
            assert result.dtype == torch.float32
        for result in (torch.tanh(half), functional.gelu(half), functional.dropout(half, 0.1)):
            assert result.dtype == torch.bfloat16


def kept_by(step: str) -> int:
    """Bytes that a piece of a forward keeps for its backward, without those of its input."""
    ledger = Ledger(on_gpu=True)
    with as_on_gpu(), FakeTensorMode(), ledger:
        query = torch.zeros(2, 4, 256, 64, requires_grad=True)
        before = ledger.now
        result = (
            functional.dropout(query, 0.1)
            if step == "dropout"
            else functional.scaled_dot_product_attention(query, query, query, dropout_p=0.1, is_causal=True)
        )
        kept = ledger.now - before
        result.sum().backward()
        assert query.grad is not None
        assert query.grad.shape == query.shape
    return kept


def test_dropout_keeps_a_byte_and_attention_a_number_for_each_row() -> None:
    size = 2 * 4 * 256 * 64
    assert kept_by("dropout") == 4 * size + size
    assert kept_by("attention") == 4 * size + 4 * size // 64


def test_the_cpus_operations_are_back_afterwards() -> None:
    with as_on_gpu():
        pass
    tensor = torch.ones(100, requires_grad=True)
    assert "NativeDropout" not in str(functional.dropout(tensor, 0.5).grad_fn)
    with torch.autocast("cpu", torch.bfloat16):
        assert functional.layer_norm(tensor.bfloat16(), (100,)).dtype == torch.bfloat16
