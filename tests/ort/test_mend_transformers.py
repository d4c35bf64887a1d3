"""Transformer layers of ``torch.nn``, whose attention uses ``unflatten``."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture(params=[True, False], ids=["torch_kernels", "ort_kernels"])
def torch_kernels(request: pytest.FixtureRequest) -> bool:
    """Both, for the GPU has ONNX Runtime's alone."""
    return request.param


class Encoder(torch.nn.Module):
    def __init__(self, masked: bool, **options: Any) -> None:
        super().__init__()
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, **options)
        self.masked = masked

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(5) if self.masked else None
        return self.layer(x, src_mask=mask, src_key_padding_mask=padding, is_causal=self.masked)


@pytest.mark.parametrize(
    ("options", "masked", "padded"),
    [
        ({}, False, False),
        ({"batch_first": True}, True, False),
        ({"batch_first": True, "norm_first": True, "activation": "gelu"}, False, True),
    ],
    ids=["sequence_first", "causal", "padded"],
)
def test_a_transformer_encoder_layer(assert_parity: Any, options: dict[str, Any], masked: bool, padded: bool) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(3, 5, 8)} if options else {"x": torch.randn(5, 3, 8)}
    if padded:
        batch["padding"] = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
    eager = Encoder(masked, **options)
    ort = assert_parity(eager, batch, tolerance=1e-5)
    # torch evaluates these layers by an operator of their own.
    with torch.no_grad():
        expected, actual = eager.eval()(**batch), ort.eval()(**batch)
    seen = ~batch["padding"] if padded else torch.ones(expected.shape[:2], dtype=torch.bool)
    torch.testing.assert_close(actual[seen], expected[seen], rtol=1e-5, atol=1e-5)


class Decoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return self.layer(x, memory)


def test_a_transformer_decoder_layer(assert_parity: Any) -> None:
    torch.manual_seed(0)
    assert_parity(Decoder(), {"x": torch.randn(3, 5, 8), "memory": torch.randn(3, 4, 8)}, tolerance=1e-5)
