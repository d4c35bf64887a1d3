"""Families of transformers that ortlaunch has no model for: small, with random weights, for ``ortlaunch check``.

``ortlaunch check model=factory model.target=tests.ort.foreign:build model.params.family=NAME data=… device=cpu`` takes
them; the table in ``tests/ort/families.md`` shows the verdict on each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ortlaunch.models.from_config import build_from_config

_TOKENS = ("data=pysource", "data.seq_len=16")
_IMAGES = ("data=digits", "data.image_size=32")
_WINDOW = 8
"""A window of attention that is shorter than the sequences, so that its mask hides something."""

_VOCABULARY = {"vocab_size": 256}
_SMALL = {**_VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_WIDE = {**_SMALL, "intermediate_size": 64, "max_position_embeddings": 64}
_GROUPED = {**_WIDE, "num_key_value_heads": 2}
_HEADS = {**_GROUPED, "head_dim": 8}
_MIXED = {"sliding_window": _WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_PADDED = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_PAIR = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
_TRANSLATOR = {**_VOCABULARY, **_PAIR, **_PADDED, "d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
_PICTURE = {"num_channels": 1, "num_labels": 10}
_PATCHES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 8}
# Layers that are skipped at random and masks drawn with NumPy are decisions of Python, which a graph cannot repeat.
_WAVES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": [16, 16],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 4],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "num_labels": 10,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
}


@dataclass(frozen=True)
class Foreign:
    """One family: its class, its size, and what the class is given of a batch."""

    name: str
    kind: str
    model: str
    """The class of transformers."""
    has: str
    """What it has that others have not."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Of its configuration, where they are not the default."""
    data: tuple[str, ...] = _TOKENS
    """Keys of the command."""
    given: Callable[[Tensor, Tensor], dict[str, Tensor]] | None = None
    """The arguments of forward from images and labels; None for a class that takes the batch as it is."""


class Fed(nn.Module):
    """Gives a model other inputs than those of the batch."""

    def __init__(self, model: nn.Module, given: Callable[[Tensor, Tensor], dict[str, Any]]) -> None:
        super().__init__()
        self.model = model
        self._given = given

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        """Returns the loss of images [B, 1, H, W] with labels [B]."""
        loss: Tensor = self.model(**self._given(pixel_values, labels)).loss
        return loss


def _wave(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """An image as a sound, line by line."""
    return {"input_values": images.flatten(1), "labels": labels}


def _spectrum(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """An image as a sound's spectrum over time."""
    return {"input_values": images[:, 0], "labels": labels}


def _speech(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """A spectrum, and four tokens that were said."""
    return {"input_features": images[:, 0], "labels": labels[:, None] + torch.arange(3, 7, device=labels.device)}


def _described(images: Tensor, labels: Tensor) -> dict[str, Any]:
    """An image, and a text of three tokens."""
    begin, end = torch.ones_like(labels), torch.full_like(labels, 15)
    return {"pixel_values": images, "input_ids": torch.stack([begin, labels + 3, end], 1), "return_loss": True}


def _decoders() -> list[Foreign]:
    gpt = {**_VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    # A dropout that people train with; the others have none by default.
    falling = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    neo = {
        **_VOCABULARY,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "max_position_embeddings": 64,
        "attention_types": [[["global", "local"], 1]],
        "window_size": _WINDOW,
    }
    bloom = {**_VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, **falling}
    mpt = {**_VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}
    starcoder = {"sliding_window": _WINDOW, "residual_dropout": 0.1, "embedding_dropout": 0.1}
    kind = "decoder"
    return [
        Foreign("gpt_neo", kind, "GPTNeoForCausalLM", "global and local attention in turn", neo),
        Foreign("gpt_neox", kind, "GPTNeoXForCausalLM", "parallel residual, partial rotation", {**_WIDE, **falling}),
        Foreign("gptj", kind, "GPTJForCausalLM", "interleaved rotation", {**gpt, "rotary_dim": 4}),
        Foreign("bloom", kind, "BloomForCausalLM", "ALiBi, dropout", bloom),
        Foreign("mpt", kind, "MptForCausalLM", "ALiBi without biases", mpt),
        Foreign("falcon", kind, "FalconForCausalLM", "multi-query attention", {**_SMALL}),
        Foreign("phi", kind, "PhiForCausalLM", "partial rotation, dropout", {**_WIDE, "resid_pdrop": 0.1}),
        Foreign("gemma2", kind, "Gemma2ForCausalLM", "soft caps, sliding window", {**_HEADS, **_MIXED}),
        Foreign("gemma3", kind, "Gemma3ForCausalLM", "two rotations, norms of Q and K", {**_HEADS, **_MIXED}),
        Foreign("qwen2", kind, "Qwen2ForCausalLM", "grouped heads, biases of Q, K, V", _GROUPED),
        Foreign("qwen3", kind, "Qwen3ForCausalLM", "norms of Q and K", _HEADS),
        Foreign("cohere", kind, "CohereForCausalLM", "parallel block, scaled logits", _GROUPED),
        Foreign("cohere2", kind, "Cohere2ForCausalLM", "sliding window, layers without positions", _GROUPED | _MIXED),
        Foreign("glm", kind, "GlmForCausalLM", "partial rotation", _HEADS),
        Foreign("glm4", kind, "Glm4ForCausalLM", "four norms in a block", _HEADS),
        Foreign("olmo2", kind, "Olmo2ForCausalLM", "norms after the layers", _GROUPED),
        Foreign("starcoder2", kind, "Starcoder2ForCausalLM", "sliding window, dropout", {**_GROUPED, **starcoder}),
        Foreign("stablelm", kind, "StableLmForCausalLM", "partial rotation, LayerNorm", _GROUPED),
    ]


def _experts() -> list[Foreign]:
    routed = {"num_experts_per_tok": 2}
    qwen = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32}
    deepseek = {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 16,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "qk_nope_head_dim": 8,
        "num_key_value_heads": 4,
    }
    oss = {"num_local_experts": 4, **_MIXED}
    kind = "mixture of experts"
    return [
        Foreign("mixtral", kind, "MixtralForCausalLM", "two of four", {**_GROUPED, **routed, "num_local_experts": 4}),
        Foreign("qwen2_moe", kind, "Qwen2MoeForCausalLM", "a shared expert", {**_GROUPED, **routed, **qwen}),
        Foreign("deepseek_v3", kind, "DeepseekV3ForCausalLM", "latent attention", {**_WIDE, **routed, **deepseek}),
        Foreign("gpt_oss", kind, "GptOssForCausalLM", "attention sinks", {**_HEADS, **routed, **oss}),
    ]


def _recurrent() -> list[Foreign]:
    layers = {**_VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
    scan = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8}
    hybrid = {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    }
    gemma = {
        "num_hidden_layers": 3,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "lru_width": 32,
        "attention_window_size": _WINDOW,
    }
    kind = "state space"
    return [
        Foreign("mamba", kind, "MambaForCausalLM", "a loop over the tokens", {**layers, "state_size": 8}),
        Foreign("mamba2", kind, "Mamba2ForCausalLM", "chunks", {**layers, **scan}),
        Foreign("falcon_h1", kind, "FalconH1ForCausalLM", "attention beside state space", {**_GROUPED, **hybrid}),
        Foreign("recurrent_gemma", kind, "RecurrentGemmaForCausalLM", "a loop over the tokens", {**layers, **gemma}),
    ]


def _encoders() -> list[Foreign]:
    disentangled = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
    modern = {**_PADDED, "cls_token_id": 1, "sep_token_id": 2, "local_attention": _WINDOW}
    xlnet = {**_VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}
    kind = "encoder"
    return [
        Foreign("roberta", kind, "RobertaForMaskedLM", "positions from the padding", _WIDE),
        Foreign("electra", kind, "ElectraForMaskedLM", "narrow embeddings", {**_WIDE, "embedding_size": 16}),
        Foreign("albert", kind, "AlbertForMaskedLM", "one layer used again", {**_WIDE, "embedding_size": 16}),
        Foreign("deberta", kind, "DebertaForMaskedLM", "disentangled attention", {**_WIDE, **disentangled}),
        Foreign("deberta_v2", kind, "DebertaV2ForMaskedLM", "disentangled attention", {**_WIDE, **disentangled}),
        Foreign("mpnet", kind, "MPNetForMaskedLM", "relative positions in buckets", _WIDE),
        Foreign("modernbert", kind, "ModernBertForMaskedLM", "local attention, gated layers", {**_WIDE, **modern}),
        Foreign("xlnet", kind, "XLNetLMHeadModel", "relative attention", xlnet),
    ]


def _pairs() -> list[Foreign]:
    # LayerDrop skips layers by a decision of Python.
    whole = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
    m2m = {**_TRANSLATOR, **whole, "decoder_start_token_id": 2, "max_position_embeddings": 64}
    mt5 = {**_VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    kind = "encoder-decoder"
    return [
        Foreign("bart", kind, "BartForConditionalGeneration", "learned positions", {**m2m}),
        Foreign("m2m_100", kind, "M2M100ForConditionalGeneration", "sines as positions", {**m2m}),
        Foreign("mt5", kind, "MT5ForConditionalGeneration", "relative positions, gated layers", mt5),
    ]


def _vision() -> list[Foreign]:
    stages = {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4, "patch_size": 2}
    seg = {
        "num_encoder_blocks": 2,
        "depths": [1, 1],
        "sr_ratios": [2, 1],
        "hidden_sizes": [8, 16],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2],
    }
    efficient = {
        "width_coefficient": 1.0,
        "depth_coefficient": 1.0,
        "in_channels": [32, 8],
        "out_channels": [8, 16],
        "kernel_sizes": [3, 5],
        "strides": [1, 2],
        "num_block_repeats": [1, 2],
        "expand_ratios": [1, 2],
        "hidden_dim": 1280,
    }
    regnet = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4}
    shaped = {"image_size": 32, "intermediate_size": 64}
    kind = "vision"
    return [
        Foreign(name, kind, f"{model}ForImageClassification", has, {**_PICTURE, **fields}, _IMAGES)
        for name, model, has, fields in (
            ("dinov2", "Dinov2", "positions interpolated to the image", {**_PATCHES, "image_size": 32}),
            ("swin", "Swin", "shifted windows, DropPath", {**stages, "image_size": 32}),
            (
                "convnext",
                "ConvNext",
                "depthwise convolution",
                {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1]},
            ),
            (
                "beit",
                "Beit",
                "relative positions, DropPath",
                {**_PATCHES, **shaped, "use_relative_position_bias": True},
            ),
            ("segformer", "Segformer", "attention to fewer places, DropPath", seg),
            ("mobilenet_v2", "MobileNetV2", "ReLU6, BatchNorm", {"image_size": 32, "depth_multiplier": 0.25}),
            ("efficientnet", "EfficientNet", "squeeze and excitation, BatchNorm", efficient),
            ("regnet", "RegNet", "grouped convolution, BatchNorm", regnet),
        )
    ]


def _audio() -> list[Foreign]:
    spectrum = {"num_mel_bins": 32, "max_length": 32, "frequency_stride": 8, "time_stride": 8, "num_labels": 10}
    whisper = {
        **_TRANSLATOR,
        "num_mel_bins": 32,
        "max_source_positions": 16,
        "max_target_positions": 16,
        "decoder_start_token_id": 1,
        "dropout": 0.1,
    }
    kind = "audio"
    return [
        Foreign("wav2vec2", kind, "Wav2Vec2ForSequenceClassification", "weight norm", _WAVES, _IMAGES, _wave),
        Foreign("wavlm", kind, "WavLMForSequenceClassification", "gated positions", _WAVES, _IMAGES, _wave),
        Foreign(
            *("ast", kind, "ASTForAudioClassification", "patches of a spectrum"),
            *({**_PATCHES, **spectrum, "intermediate_size": 64}, _IMAGES, _spectrum),
        ),
        Foreign(
            *("whisper", kind, "WhisperForConditionalGeneration", "spectrum to text"),
            *(whisper, _IMAGES, _speech),
        ),
    ]


def _joint() -> list[Foreign]:
    layers = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    text = {**layers, "vocab_size": 16, "max_position_embeddings": 8, "eos_token_id": 15, "bos_token_id": 1}
    vision = {**layers, "image_size": 32, "patch_size": 8, "num_channels": 1}
    both = {"text_config": text, "vision_config": vision, "projection_dim": 16}
    return [Foreign("clip", "text and image", "CLIPModel", "contrastive loss", both, _IMAGES, _described)]


FOREIGN = (
    *(*_decoders(), *_experts(), *_recurrent(), *_encoders()),
    *(*_pairs(), *_vision(), *_audio(), *_joint()),
)
BY_NAME = {family.name: family for family in FOREIGN}


def build(family: str) -> nn.Module:
    """Builds a family, for ``model.target``."""
    chosen = BY_NAME[family]
    model = build_from_config(getattr(transformers, chosen.model), {}, chosen.fields)
    return model if chosen.given is None else Fed(model, chosen.given)


def keys(family: Foreign) -> list[str]:
    """Returns the keys of ``ortlaunch`` that choose a family and data for it."""
    model = ("model=factory", "model.target=tests.ort.foreign:build", f"model.params.family={family.name}")
    return [*model, *family.data, "device=cpu"]
