"""The model families that people train, at a size that trains in a second, and what is known of each under ORT."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

import torch
import transformers

from ortlaunch.config.schema import (
    AdamWConfig,
    DataConfig,
    DigitsConfig,
    ModelConfig,
    OptimizerConfig,
    PysourceConfig,
    SgdConfig,
)
from ortlaunch.data.loader import build_loader
from ortlaunch.models.masking import HidesTokens
from ortlaunch.models.registry import build_model

Batch = dict[str, torch.Tensor]

ROWS, LENGTH = 8, 48
SHAPES = ((6, 32), (8, 24), (4, 48))
"""Rows and tokens of the batch of each step: the graph of the first serves them all."""

_SMALL = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_WIDE = {**_SMALL, "intermediate_size": 64}
_POSITIONS = {"max_position_embeddings": 64}
_SGD = SgdConfig(lr=0.05, momentum=0.9)
# One token is both: transformers' classes refuse ids that the vocabulary does not have.
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}


def _adamw() -> OptimizerConfig:
    # Where a gradient is nothing but rounding, as a key's bias has it, AdamW's usual eps makes full steps of it.
    return AdamWConfig(lr=1e-2, eps=1e-4)


@dataclass(frozen=True)
class Family:
    """One family: how to make it without dropout, on which data, and where it is known to fail."""

    name: str
    model: str
    """The class, as the table shows it."""
    build: Callable[[], torch.nn.Module]
    batch: Callable[[int], Batch]
    """The batch of a step, counted from 0."""
    data: str
    optimizer: OptimizerConfig = field(default_factory=_adamw)
    defects: Mapping[str, str] = field(default_factory=dict)
    """What does not equal eager (a part of `parity.PARTS`), and why."""


class DistilBertForMaskedLM(HidesTokens, transformers.DistilBertForMaskedLM):
    """transformers' class, hiding 15 % of the tokens itself."""


def _built_in(name: str, **params: object) -> Callable[[], torch.nn.Module]:
    return lambda: build_model(ModelConfig(name=name, params=params))


def _t5() -> torch.nn.Module:
    size = {"vocab_size": 256, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            **size, dropout_rate=0.0, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, use_cache=False
        )
    )


def _opt() -> torch.nn.Module:
    return transformers.OPTForCausalLM(
        transformers.OPTConfig(
            **_SMALL, **_POSITIONS, **_TOKENS, ffn_dim=64, word_embed_proj_dim=32, dropout=0.0, use_cache=False
        )
    )


def _distilbert() -> torch.nn.Module:
    size = {"vocab_size": 256, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}
    model = DistilBertForMaskedLM(
        transformers.DistilBertConfig(**size, **_POSITIONS, dropout=0.0, attention_dropout=0.0)
    )
    model.mask_token_id = 255
    return model


def _mistral() -> torch.nn.Module:
    # A window shorter than the sequences, so that it is there to go wrong.
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(
            **_WIDE, **_POSITIONS, **_TOKENS, num_key_value_heads=2, sliding_window=16, use_cache=False
        )
    )


@cache
def _drawn(size: int, images: bool) -> tuple[Batch, ...]:
    """The data's first batches: `size` tokens a sample, or images of `size` pixels a side."""
    cfg: DataConfig = DigitsConfig(image_size=size) if images else PysourceConfig(seq_len=size)
    with build_loader(cfg, batch_size=ROWS, rank=0, world_size=1, seed=0, pin_memory=False) as loader:
        return tuple(next(loader) for _ in SHAPES)


def _images(size: int = 8) -> Callable[[int], Batch]:
    """Handwritten digits, `size` pixels a side."""
    return lambda step: {name: tensor[: SHAPES[step][0]] for name, tensor in _drawn(size, images=True)[step].items()}


def _tokens(step: int) -> Batch:
    """The standard library's source as bytes."""
    rows, length = SHAPES[step]
    drawn = _drawn(LENGTH, images=False)[step]
    return {name: tensor[:rows, :length].contiguous() for name, tensor in drawn.items()}


def _halves(step: int) -> Batch:
    """The first half of a sequence in, the second out."""
    ids = _tokens(step)["input_ids"]
    middle = ids.shape[1] // 2
    return {"input_ids": ids[:, :middle].contiguous(), "labels": ids[:, middle:].contiguous()}


FAMILIES = (
    Family("mlp", "FeedForward", _built_in("mlp"), _images(), "digits", _SGD),
    Family(
        "resnet",
        "ResNetForImageClassification",
        _built_in("resnet", embedding_size=8, hidden_sizes=[8, 16]),
        _images(32),
        "digits",
        _SGD,
    ),
    Family(
        "vit",
        "ViTForImageClassification",
        _built_in("vit", hidden_size=32, num_hidden_layers=2, intermediate_size=64),
        _images(),
        "digits",
    ),
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        _built_in("gpt2_nano", n_embd=32, n_layer=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, n_positions=64),
        _tokens,
        "pysource",
    ),
    Family(
        "bert",
        "BertForMaskedLM",
        _built_in("bert", **_WIDE, **_POSITIONS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
        _tokens,
        "pysource",
    ),
    Family("llama", "LlamaForCausalLM", _built_in("llama", **_WIDE, **_POSITIONS), _tokens, "pysource"),
    Family("distilbert", "DistilBertForMaskedLM", _distilbert, _tokens, "pysource"),
    Family("opt", "OPTForCausalLM", _opt, _tokens, "pysource"),
    Family("mistral", "MistralForCausalLM", _mistral, _tokens, "pysource"),
    Family("t5", "T5ForConditionalGeneration", _t5, _halves, "pysource"),
)
BY_NAME = {family.name: family for family in FAMILIES}
