"""The configurations that `tests.benchmarks.bench_estimate` draws, and the models of a user's own among them.

Family, trainer and backend follow the number in cycles of 9, 7 and 4, which have no common divisor: in any 252 numbers
in a row, each combination of the three occurs once. All else is drawn by a generator with the seed and the number.
Sizes are such that a worker's tensors take a hundred MiB and more, and a step a few seconds on one core.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

MODELS = "{models}"
"""Stands in a configuration for the folder of `make_models`."""
TRAINERS = (
    ("trainer=single",),
    ("trainer=ddp",),
    ("trainer=fsdp",),
    *(("trainer=deepspeed", f"trainer.zero_stage={stage}") for stage in range(4)),
)
_BACKENDS = ("eager", "eager", "eager", "ort")
_STEPS = 3
_MOST_OPERATIONS = 250.0
"""Of a step of all workers, in billions: some five seconds of one core."""
_SLOWER = 5
"""In bf16 and fp16, on a CPU without instructions for them."""

_Draw = Callable[[random.Random], tuple[list[str], float]]
"""Draws the words of a model, and returns with them the operations of one of its samples in billions."""


def draw(seed: int, number: int) -> tuple[str, ...]:
    """The words of a configuration, a function of both numbers."""
    choice = random.Random(f"{seed}-{number}")
    model, billions = _FAMILIES[number % len(_FAMILIES)](choice)
    trainer = TRAINERS[number % len(TRAINERS)]
    backend = _BACKENDS[number % len(_BACKENDS)]
    if backend == "ort" and trainer == ("trainer=fsdp",):
        trainer = TRAINERS[1]  # ONNX Runtime does not run under fsdp.
    if backend == "ort" and trainer == TRAINERS[-1] and {"model=mlp", "model=factory"} & set(model):
        trainer = TRAINERS[-2]  # Nor under ZeRO 3 without repeated blocks.
    words = [*model, *trainer, f"backend={backend}", *_of_trainer(choice, trainer)]
    words += _of_training(choice, trainer, backend, is_transformer="data.seq_len" in " ".join(model))
    batch = _batch(choice, words, billions)
    if "train.eval_every=2" in words:
        words.append(f"train.eval_samples={4 * batch}")
    return (*words, f"train.batch_size={batch}")


def _batch(choice: random.Random, words: Sequence[str], billions: float) -> int:
    """A micro-batch with which a step does not take too long."""
    keys = dict(word.split("=") for word in words)
    times = int(keys.get("launcher.workers_per_node", 1)) * int(keys.get("train.grad_accumulation", 1))
    times *= _SLOWER if keys.get("train.precision", "fp32") != "fp32" else 1
    fitting = [size for size in (1, 2, 4, 8, 16, 32, 64, 128) if size * times * billions <= _MOST_OPERATIONS]
    # Batch normalization of small images needs more than one sample.
    return max(choice.choice(fitting[-3:] or [1]), 2 if "model=resnet" in words else 1)


def _of_trainer(choice: random.Random, trainer: Sequence[str]) -> list[str]:
    if trainer[0] == "trainer=single":
        return []
    words = [f"launcher.workers_per_node={choice.choice((2, 2, 2, 3))}"]
    if trainer[0] == "trainer=ddp":
        words += choice.choice(([], [], ["trainer.bucket_cap_mb=1"], ["trainer.bucket_cap_mb=100"]))
    if trainer[0] == "trainer=fsdp":
        words += choice.choice(([], [], ["trainer.reshard_after_forward=false"], ["trainer.accumulate_sharded=true"]))
    if trainer[-1] in ("trainer.zero_stage=1", "trainer.zero_stage=2"):
        words += choice.choice(([], [], ["+trainer.config.zero_optimization.reduce_bucket_size=5000000"]))
    if trainer[-1] == "trainer.zero_stage=3":
        persistence = "+trainer.config.zero_optimization.stage3_param_persistence_threshold"
        distance = "+trainer.config.zero_optimization.stage3_max_reuse_distance=0"
        words += choice.choice(([], [], [f"{persistence}=0", distance], [f"{persistence}=10000000"]))
    return words


def _of_training(choice: random.Random, trainer: Sequence[str], backend: str, *, is_transformer: bool) -> list[str]:
    checkpoint = choice.choice(("null", "2", str(_STEPS)))
    words = [f"train.steps={_STEPS}", f"train.checkpoint_every={checkpoint}"]
    if checkpoint != "null" and choice.random() < 0.2:
        words.append("train.checkpoint_async=false")
    if choice.random() < 0.25:
        words.append("train.save_weights=false")
    if choice.random() < 0.3:
        words.append("train.eval_every=2")
    if choice.random() < 0.35:
        words.append(f"train.grad_accumulation={choice.choice((2, 3))}")
    if is_transformer and choice.random() < 0.25:
        words.append("train.activation_checkpointing=true")
    if choice.random() < 0.2:
        words.append("train.clip_grad_norm=null")
    if backend == "eager":
        # DeepSpeed needs instructions for fp16 that few CPUs have.
        low = ("bf16",) if trainer[0] == "trainer=deepspeed" else ("bf16", "bf16", "fp16")
        words += [f"train.precision={choice.choice(low)}"] if choice.random() < 0.35 else []
    is_whole = trainer[0] in ("trainer=single", "trainer=ddp") or trainer[-1] == "trainer.zero_stage=0"
    words += choice.choice(
        (
            *([],) * 4,
            ["optimizer=sgd"],
            ["optimizer=sgd", "optimizer.momentum=0"],
            ["optimizer=adafactor"] if is_whole else ["optimizer=sgd"],
        )
    )
    return words


def _mlp(choice: random.Random) -> tuple[list[str], float]:
    width, size = choice.choice((50_000, 200_000, 500_000)), choice.choice((8, 8, 16))
    words = _model("mlp", hidden_dim=width, input_dim=size * size)
    return [*words, f"data.image_size={size}"], 6e-9 * width * (size * size + 10)


def _resnet(choice: random.Random) -> tuple[list[str], float]:
    wide, size = choice.choice((128, 256, 384)), choice.choice((16, 32))
    depth = choice.choice((1, 2))
    words = [
        "model=resnet",
        "model.params.embedding_size=64",
        f"model.params.hidden_sizes=[{wide // 2},{wide}]",
        f"model.params.depths=[{depth},{depth}]",
        f"data.image_size={size}",
    ]
    # Products of 3 x 3 pixels; the second stage has a quarter of the first one's positions, and twice its channels.
    return words, 6e-9 * 2 * 2 * depth * 9 * (wide // 2) ** 2 * (size // 4) ** 2


def _vit(choice: random.Random) -> tuple[list[str], float]:
    width, layers, size = choice.choice((256, 384, 512)), choice.randint(3, 8), choice.choice((8, 16))
    words = _model("vit", image_size=size, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers)
    return [*words, f"data.image_size={size}"], 6e-9 * 12 * layers * width * width * ((size // 2) ** 2 + 1)


def _model(name: str, **parameters: int) -> list[str]:
    """A model of the registry and its parameters, as words."""
    return [f"model={name}", *(f"model.params.{key}={value}" for key, value in parameters.items())]


def _tokens(choice: random.Random, lengths: Sequence[int] = (64, 128, 256)) -> tuple[list[str], int]:
    length = choice.choice(lengths)
    return [f"data.seq_len={length}", *choice.choice(([], ["data=synthetic"]))], length


def _gpt2(choice: random.Random) -> tuple[list[str], float]:
    layers = choice.choice((1, 2, 3, 4))
    of_data, length = _tokens(choice, (64, 128))
    return [*_model("gpt2", n_layer=layers), *of_data], 6e-9 * length * (7_100_000 * layers + 768 * 50_257)


def _gpt2_nano(choice: random.Random) -> tuple[list[str], float]:
    width, layers = choice.choice((256, 512, 640)), choice.randint(3, 9)
    of_data, length = _tokens(choice)
    words = _model("gpt2_nano", n_embd=width, n_head=width // 64, n_layer=layers)
    words += choice.choice(([], [f"model.params.{name}_pdrop=0" for name in ("attn", "resid", "embd")]))
    return [*words, *of_data], 6e-9 * length * 12 * layers * width * width


def _bert(choice: random.Random) -> tuple[list[str], float]:
    width, layers = choice.choice((384, 512, 768)), choice.randint(2, 6)
    of_data, length = _tokens(choice, (64, 128))
    words = _model(
        "bert",
        hidden_size=width,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
    )
    return [*words, *of_data], 6e-9 * length * (12 * layers * width * width + width * 30_522)


def _llama(choice: random.Random) -> tuple[list[str], float]:
    width, layers, few = choice.choice((384, 512, 768)), choice.randint(2, 7), choice.choice((True, False))
    of_data, length = _tokens(choice)
    words = _model(
        "llama",
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_attention_heads=width // 64,
        num_key_value_heads=2 if few else width // 64,
        num_hidden_layers=layers,
    )
    return [*words, *of_data], 6e-9 * length * 12 * layers * width * width


def _own(choice: random.Random) -> tuple[list[str], float]:
    """A model of the user's own with frozen parameters."""
    width, layers = choice.choice((1024, 1536, 2048)), choice.randint(4, 9)
    frozen = choice.choice((0, layers // 2, layers - 1))
    words = ["model=factory", "model.target=tests.benchmarks.estimate_draws:frozen_below", "data=digits"]
    words += [f"+model.params.{name}={value}" for name, value in (("width", width), ("layers", layers))]
    return [*words, f"+model.params.frozen={frozen}"], 6e-9 * layers * width * width


def _hf(choice: random.Random) -> tuple[list[str], float]:
    """A model of transformers that is read from a folder."""
    name, task, parameters = choice.choice(_PRETRAINED)
    of_data, length = _tokens(choice, (64, 128))
    mask = ["+model.params.mask_token_id=3"] if task == "masked-lm" else []
    words = ["model=hf", f"model.params.pretrained={MODELS}/{name}", f"model.params.task={task}", *mask]
    return [*words, *of_data], 6e-9 * length * parameters


_FAMILIES: tuple[_Draw, ...] = (_mlp, _gpt2_nano, _resnet, _llama, _own, _bert, _vit, _gpt2, _hf)
_PRETRAINED = (("opt", "causal-lm", 2e7), ("distilbert", "masked-lm", 2e7), ("gpt_neox", "causal-lm", 2e7))


def make_models(folder: Path) -> None:
    """Writes the models with random weights that model=hf reads, unless they are there."""
    if not all((folder / name / "config.json").is_file() for name, _, _ in _PRETRAINED):
        subprocess.run([sys.executable, "-m", "tests.benchmarks.estimate_draws", str(folder)], check=True)


def _write_models(folder: Path) -> None:
    import transformers

    common = {"vocab_size": 2000, "max_position_embeddings": 512}
    configs = {
        "opt": ("OPT", "CausalLM", {"hidden_size": 512, "word_embed_proj_dim": 512, "ffn_dim": 2048, **common}),
        "distilbert": ("DistilBert", "MaskedLM", {"dim": 512, "hidden_dim": 2048, "n_heads": 8, "n_layers": 5}),
        "gpt_neox": ("GPTNeoX", "CausalLM", {"hidden_size": 512, "intermediate_size": 2048, **common}),
    }
    layers = {"num_hidden_layers": 6, "num_attention_heads": 8}
    for name, (kind, task, sizes) in configs.items():
        sizes = {**sizes, **(layers if name != "distilbert" else {"vocab_size": 2000})}
        config = getattr(transformers, f"{kind}Config")(**sizes)
        getattr(transformers, f"{kind}For{task}")(config).save_pretrained(folder / name)


def frozen_below(width: int, layers: int, frozen: int):  # type: ignore[no-untyped-def]  # torch is imported late
    """A feed-forward network on digits whose first layers are not trained.

    Args:
        width: units of each hidden layer.
        layers: hidden layers.
        frozen: how many of them are not trained.
    """
    from torch import nn

    blocks = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    for block in blocks[:frozen]:
        block.requires_grad_(False)
    first = nn.Linear(64, width).requires_grad_(frozen == 0)
    hidden = nn.Sequential(*blocks)
    return nn.Sequential(nn.Flatten(), first, hidden, nn.Linear(width, 10))


if __name__ == "__main__":
    _write_models(Path(sys.argv[1]))
