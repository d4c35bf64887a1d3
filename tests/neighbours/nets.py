"""Small models of packages that people have beside ortlaunch, for ``model.target``."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class Classifier(nn.Module):
    """Classifies images by a network of timm."""

    def __init__(self) -> None:
        super().__init__()
        from timm import create_model

        self.net = create_model("test_resnet", in_chans=1, num_classes=10)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.net(pixel_values), labels)


class Language(nn.Module):
    """Predicts the next token by a decoder of x-transformers."""

    def __init__(self) -> None:
        super().__init__()
        from x_transformers import Decoder, TransformerWrapper

        layers = Decoder(dim=32, depth=1, heads=2)
        self.net = TransformerWrapper(num_tokens=256, max_seq_len=32, attn_layers=layers)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.net(input_ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def adapted() -> nn.Module:
    """GPT-2 with peft's LoRA."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=1, n_head=2, use_cache=False)
    return get_peft_model(GPT2LMHeadModel(config), LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
