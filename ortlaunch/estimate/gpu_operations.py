"""The operations of a GPU on tensors of the CPU, as far as they keep other memory than those of the CPU.

A trace runs on tensors without content whose device is the CPU, so that it needs no GPU and no CUDA build of torch. The
operations below are those that torch implements otherwise on a GPU: dropout keeps a mask of one byte, attention is one
kernel that keeps no scores, and autocast computes other operations in fp32. The last are the lists of torch's
``ATen/autocast_mode.h``.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

_IN_FP32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh"),
    *("tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm"),
    *("rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity"),
    *("poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div"),
    *("l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss"),
    *("soft_margin_loss", "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist"),
    *("pdist", "cdist", "renorm", "logsumexp"),
    *("upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d"),
    *("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d"),
    *("_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa"),
)
"""Autocast casts the arguments of these to fp32."""
_TO_FP32 = (
    *("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm"),
    *("linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList"),
)
"""Autocast asks these for a result in fp32."""
_IN_LOW_PRECISION = ("addmv", "addr", "mv", "einsum", "chain_matmul", "linalg_multi_dot", "lstm_cell", "gru_cell")
"""Autocast casts the arguments of these to its own precision, and on the CPU it does not."""
_HALF = (torch.float16, torch.bfloat16)
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


@contextlib.contextmanager
def as_on_gpu() -> Iterator[None]:
    """Within it, operations on tensors of the CPU keep the memory that those on a GPU keep."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            # torch says that an operation is replaced, which is the purpose.
            warnings.simplefilter("ignore")
            _replace(library)
        yield
    finally:
        library._destroy()


def _replace(library: torch.library.Library) -> None:
    library.impl("dropout", _dropout, "AutogradCPU")
    library.impl("scaled_dot_product_attention", _attention, "AutogradCPU")
    for names, cast in ((_IN_FP32, _in_fp32), (_TO_FP32, _to_fp32), (_IN_LOW_PRECISION, _in_low_precision)):
        for name in names:
            packet, _, overload = name.partition(".")
            operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, cast(operation), "AutocastCPU", allow_override=True)


def _in_fp32(operation: Any) -> Callable[..., Any]:
    return _casting(operation, lambda: torch.float32, _HALF)


def _in_low_precision(operation: Any) -> Callable[..., Any]:
    return _casting(operation, lambda: torch.get_autocast_dtype("cpu"), (torch.float32, *_HALF))


def _casting(operation: Any, wanted: Callable[[], torch.dtype], taken: tuple[torch.dtype, ...]) -> Callable[..., Any]:
    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(wanted()) if value.dtype in taken else value
        return [cast(one) for one in value] if isinstance(value, list | tuple) else value

    def called(*arguments: Any, **named: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return operation(*map(cast, arguments), **{name: cast(value) for name, value in named.items()})

    return called


def _to_fp32(operation: Any) -> Callable[..., Any]:
    most = len(operation._schema.arguments)

    def called(*arguments: Any, **named: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            if arguments[0].dtype in _HALF and named.get("dtype") is None and len(arguments) < most:
                named["dtype"] = torch.float32
            return operation(*arguments, **named)

    return called


def _dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0 or tensor.numel() == 0:
        return tensor
    return torch.native_dropout(tensor, p, True)[0]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    return _Attention.apply(query, key, value, attn_mask)


class _Attention(torch.autograd.Function):
    """Attention as one kernel, which keeps one number for each row of the scores."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any) -> torch.Tensor:
        *batch, rows, _ = query.shape
        # The heads of a token lie beside each other, as in query, whatever the order of the dimensions.
        result = query.new_empty(*batch[:-1], rows, batch[-1], value.shape[-1]).transpose(-2, -3)
        sums = query.new_empty((*batch, rows), dtype=torch.float32)
        ctx.save_for_backward(query, key, value, result, sums)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        query, key, value, _result, _sums = ctx.saved_tensors
        # The kernel adds up the gradient of the queries in fp32.
        summed = torch.empty_like(query, dtype=torch.float32)
        del summed
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None
