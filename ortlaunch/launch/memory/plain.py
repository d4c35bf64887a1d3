"""A bound on the memory of a run by its sizes alone, far above what it takes: for runs that fit without a question.

It is known for the built-in models on data whose size is in the keys. It costs no process and no import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ortlaunch.config.candidates import possible
from ortlaunch.config.schema import Config
from ortlaunch.launch.memory.band import COMPILER, LOADER, MIB, compilers
from ortlaunch.launch.memory.question import PLAIN_DATA

PROCESS = 1200 * MIB
"""More than any worker holds beside its tensors."""
_COPIES = 12
"""Copies of the weights in fp32: gradients, moments, buckets, those of a checkpoint and of the end, and holes."""
_ACTIVATIONS = 3
"""Bytes for each byte of the activations counted here: temporaries, their gradients, and holes."""
_OF_ORT = 2
"""ONNX Runtime holds its own graph and arena."""
_FP32 = 4
_IMAGES = 2 * 1797
"""Those of data=digits, and their copies while it is opened."""

_Sizes = Mapping[str, Any]
_Numbers = tuple[int, int]
"""Parameters, and numbers that a sample's forward keeps."""


def bound(config: Config, workers: int) -> int | None:
    """Bytes that the workers of a machine stay far below; None if the keys do not tell.

    Args:
        config: the run's configuration.
        workers: workers on the machine.
    """
    sizes = _MODELS.get(config.model.name)
    is_own = config.model.target is not None or config.model.imports or config.model.weights is not None
    if sizes is None or is_own or config.data.name not in PLAIN_DATA or config.profile is not None:
        return None
    # The numbers of a sample: its tokens, or its grey pixels.
    pixels = int(getattr(config.data, "image_size", 0)) ** 2
    length = pixels or int(getattr(config.data, "seq_len", 1))
    try:
        parameters, kept = sizes(config.model.params, length)
    except (KeyError, TypeError, ValueError):
        return None  # Another parameter, or a value that the model itself refuses.
    tensors = _FP32 * (_COPIES * parameters + _ACTIVATIONS * config.train.batch_size * kept)
    data = 16 * config.train.eval_samples * length + _FP32 * _IMAGES * pixels
    backends = {one.backend.name for one in possible(config)}
    compiling = compilers() * COMPILER if "compile" in backends else 0
    loaders = PROCESS // 2 + config.data.workers * LOADER if config.data.workers else 0
    return workers * (PROCESS + compiling + loaders + (_OF_ORT if "ort" in backends else 1) * tensors + data)


def _transformer(width: str, layers: str, heads: str, wide: str | None, others: tuple[str, ...]) -> Callable[..., Any]:
    """The sizes of a transformer over tokens, by the names of its parameters."""

    def sizes(params: _Sizes, length: int) -> _Numbers:
        _only(params, {width, layers, heads, "vocab_size", *others} | ({wide} if wide else set()))
        one, count, words = _whole(params[width]), _whole(params[layers]), _whole(params["vocab_size"])
        inner = _whole(params[wide]) if wide else 4 * one
        positions = next((_whole(params[name]) for name in others if "positions" in name), 0)
        parameters = count * (4 * one * one + 3 * one * inner + 20 * one) + (2 * words + positions + 10) * one
        of_token = count * (30 * one + 6 * inner + 5 * _whole(params[heads]) * length) + 6 * words + 10 * one
        return parameters, length * of_token

    return sizes


def _mlp(params: _Sizes, _length: int) -> _Numbers:
    _only(params, {"input_dim", "hidden_dim", "output_dim"})
    inner = _whole(params["hidden_dim"])
    outer = _whole(params["input_dim"]) + _whole(params["output_dim"])
    return (outer + 2) * inner, 4 * (outer + inner)


def _resnet(params: _Sizes, pixels: int) -> _Numbers:
    _only(params, {"num_channels", "num_labels", "embedding_size", "hidden_sizes", "depths", "layer_type"})
    widths, depths = [*map(_whole, params["hidden_sizes"])], [*map(_whole, params["depths"])]
    widest = max(_whole(params["embedding_size"]), *widths)
    blocks = 3 * (sum(depths) + len(widths) + 1)
    # The stem leaves a quarter of the pixels, and the first stage has a sixteenth.
    return blocks * (9 * widest * widest + 4 * widest), (pixels // 4 + 48) * blocks * 6 * widest


def _vit(params: _Sizes, _length: int) -> _Numbers:
    names = {"image_size", "patch_size", "num_channels", "num_labels", "hidden_dropout_prob"}
    names |= {"attention_probs_dropout_prob", "hidden_size", "num_hidden_layers", "num_attention_heads"}
    _only(params, names | {"intermediate_size"})
    patch = _whole(params["patch_size"])
    tokens = (_whole(params["image_size"]) // patch) ** 2 + 1
    ends = _whole(params["num_channels"]) * patch * patch + 10 * _whole(params["num_labels"])
    one, inner, count = (_whole(params[name]) for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    parameters = count * (4 * one * one + 3 * one * inner + 20 * one) + (tokens + ends) * one
    heads = _whole(params["num_attention_heads"])
    return parameters, tokens * count * (30 * one + 6 * inner + 5 * heads * tokens) + 10 * tokens * one


_GPT2 = _transformer("n_embd", "n_layer", "n_head", None, ("n_positions", "resid_pdrop", "embd_pdrop", "attn_pdrop"))
_BERT = _transformer(
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    ("max_position_embeddings", "mask_token_id", "hidden_dropout_prob", "attention_probs_dropout_prob"),
)
_LLAMA = _transformer(
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    ("max_position_embeddings", "num_key_value_heads", "attention_dropout"),
)
_MODELS: dict[str, Callable[[_Sizes, int], _Numbers]] = {
    "mlp": _mlp,
    "resnet": _resnet,
    "vit": _vit,
    "gpt2": _GPT2,
    "gpt2_nano": _GPT2,
    "bert": _BERT,
    "llama": _LLAMA,
}


def _only(params: _Sizes, names: set[str]) -> None:
    """Refuses parameters that this module does not know: they may change the size."""
    if set(params) - names:
        raise KeyError("a parameter is not known here")


def _whole(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} is no size")
    return value
