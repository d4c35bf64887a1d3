"""LoRA by peft: small matrices beside those of a model, which alone are trained, stored and loaded by peft."""

from __future__ import annotations

import copy
import hashlib
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ortlaunch.base.errors import RequestError
from ortlaunch.base.modules import is_missing
from ortlaunch.config.schema import LoraConfig

_NAME = "default"
"""peft's name of the only adapter."""
_PREFIX = "base_model.model."
"""What peft puts before a model's own names in its files."""
_ALL_LINEAR = "all-linear"
_HEADS = ("classifier", "score")
"""The new layers of transformers' classifiers, which are trained whole, as peft does by itself."""
_TASKS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
}
_CLASSIFIES = ("SEQ_CLS", "TOKEN_CLS")
_SAMPLED = 1 << 12


def add_lora(model: nn.Module, cfg: LoraConfig) -> None:
    """Puts the matrices into a plain model, in place, and lets them alone be trained.

    Raises:
        RequestError: peft is missing, or it finds no module to adapt.
    """
    peft = _peft()
    task = next((task for end, task in _TASKS.items() if type(model).__name__.endswith(end)), None)
    heads = [name for name in _HEADS if task in _CLASSIFIES and isinstance(getattr(model, name, None), nn.Module)]
    config = peft.LoraConfig(
        r=cfg.rank,
        lora_alpha=cfg.alpha,
        lora_dropout=cfg.dropout,
        target_modules=_ALL_LINEAR if cfg.targets == [_ALL_LINEAR] else list(cfg.targets) or None,
        modules_to_save=heads or None,
        task_type=task,
        base_model_name_or_path=getattr(model, "name_or_path", None) or None,
    )
    named = f"adapter.targets=[{','.join(cfg.targets)}]" if cfg.targets else "adapter=lora"
    try:
        with warnings.catch_warnings():
            # peft says of transformers' Conv1D that it sets an argument by itself.
            warnings.simplefilter("ignore")
            peft.inject_adapter_in_model(config, model, _NAME)
    except (ValueError, TypeError, NotImplementedError) as error:
        ends = dict.fromkeys(name.rpartition(".")[2] for name, one in model.named_modules() if _can_be_adapted(one))
        remedy = f"name some of these by adapter.targets=[NAME,…]: {', '.join(ends) or 'there are none'}"
        raise RequestError(f"{named} does not suit {type(model).__name__}: {error}: {remedy}") from error


def save_lora(weights: dict[str, torch.Tensor], model: nn.Module, folder: Path) -> None:
    """Writes the adapter as peft reads it.

    Args:
        weights: at least the trained weights, by the model's names.
        model: the model that `add_lora` changed.
        folder: exists.
    """
    from safetensors.torch import save_file

    peft: Any = _peft()
    config = copy.copy(_config(model))
    config.inference_mode = True
    state = peft.get_peft_model_state_dict(model, state_dict=weights, save_embedding_layers=False)
    tensors = {_PREFIX + name: value.contiguous() for name, value in state.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(str(folder))


def merged(weights: dict[str, torch.Tensor], model: nn.Module, plain: nn.Module) -> nn.Module:
    """The model with the adapter in its own weights.

    Args:
        weights: at least the trained weights, by the names of `model`.
        model: the model that `add_lora` changed.
        plain: the same model without an adapter, which is changed.
    """
    peft: Any = _peft()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = peft.LoraModel(plain, copy.copy(_config(model)), _NAME)
    needed = {name for name, one in model.named_parameters() if one.requires_grad}
    plain.load_state_dict({name: weights[name] for name in needed}, strict=False)
    found: nn.Module = whole.merge_and_unload(safe_merge=True)
    return found


def base_digest(model: nn.Module) -> str:
    """A hash of some numbers of each weight that is not trained: a checkpoint of an adapter fits one model alone."""
    state = hashlib.blake2b(digest_size=8)
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            flat = weight.detach().reshape(-1)
            some = torch.cat([flat[:_SAMPLED], flat[-_SAMPLED:]]).contiguous()
            state.update(f"{name} {tuple(weight.shape)}".encode())
            state.update(some.view(torch.uint8).numpy().data)
    return state.hexdigest()


def _config(model: Any) -> Any:
    return model.peft_config[_NAME]


def _can_be_adapted(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding | nn.modules.conv._ConvNd) or type(module).__name__ == "Conv1D"


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        if not is_missing("peft", error) and not is_missing("accelerate", error):
            raise
        raise RequestError(
            "adapter=lora needs the libraries peft and accelerate: pip install 'ortlaunch[lora]'"
        ) from error
    return peft
