"""A tokenizer with a chat template, and conversations, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for one in messages %}<|start|>{{ one.role }}\n{{ one.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for one in messages %}<|start|>{{ one.role }}\n{% if one.role == 'assistant' %}"
    "{% generation %}{{ one.content }}<|end|>{% endgeneration %}{% else %}{{ one.content }}<|end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """Writes a byte-level tokenizer of some 260 tokens, as `save_pretrained` does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE(vocab={one: number for number, one in enumerate(alphabet)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="<|end|>", pad_token="<|pad|>", additional_special_tokens=["<|start|>"]
    )
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(str(folder))


def write_model(folder: Path) -> None:
    """Writes a small GPT-2 with its tokenizer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"n_positions": 128, "n_embd": 32, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(vocab_size=300, eos_token_id=0, bos_token_id=0, **size)).save_pretrained(folder)
    write_tokenizer(folder)


def write_classifier(folder: Path) -> None:
    """Writes a small BERT for two classes, with its tokenizer."""
    from transformers import BertConfig, BertForSequenceClassification

    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertForSequenceClassification(BertConfig(vocab_size=300, **size)).save_pretrained(folder)
    write_tokenizer(folder)


def conversations(count: int) -> list[list[dict[str, str]]]:
    """Questions and answers of different lengths, some with several turns."""
    return [
        [
            {"role": role, "content": f"{role[0]}{number}" * (1 + (number * 7 + turn) % 4)}
            for turn in range(1 + number % 3)
            for role in ("user", "assistant")
        ]
        for number in range(count)
    ]


def write_conversations(path: Path, rows: list[Any]) -> None:
    """Writes conversations as JSON lines."""
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in rows))
