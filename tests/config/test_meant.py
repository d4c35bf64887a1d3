"""The key that an unknown one stands for: names of other tools, words, misspellings, and what has no such key here."""

from __future__ import annotations

import random
import string
from collections.abc import Callable

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.keys import known_keys
from ortlaunch.config.load import to_config
from ortlaunch.config.meant import meant_keys
from ortlaunch.config.schema import GROUPS
from ortlaunch.config.synonyms import KEYS

ELSEWHERE = {
    "transformers": "learning_rate=optimizer.lr per_device_train_batch_size=train.batch_size "
    "num_train_epochs=train.epochs "
    "max_steps=train.steps gradient_accumulation_steps=train.grad_accumulation max_grad_norm=train.clip_grad_norm "
    "logging_steps=train.log_every eval_steps=train.eval_every save_steps=train.checkpoint_every "
    "save_total_limit=train.keep_checkpoints output_dir=run_root run_name=name warmup_steps=scheduler.warmup_steps "
    "lr_scheduler_type=scheduler gradient_checkpointing=train.activation_checkpointing fp16=train.precision=fp16 "
    "bf16=train.precision=bf16 tf32=train.tf32 dataloader_num_workers=data.workers optim=optimizer "
    "adam_beta1=optimizer.beta1 adam_beta2=optimizer.beta2 adam_epsilon=optimizer.eps report_to=tracking "
    "resume_from_checkpoint=train.resume torch_compile=backend=compile ddp_timeout=trainer.timeout_seconds "
    "ddp_bucket_cap_mb=trainer.bucket_cap_mb ddp_find_unused_parameters=trainer.find_unused_parameters "
    "model_name_or_path=model.params.pretrained full_determinism=train.deterministic use_cpu=device=cpu "
    "lora_alpha=adapter.alpha target_modules=adapter.targets",
    "Lightning": "max_epochs=train.epochs accumulate_grad_batches=train.grad_accumulation "
    "devices=launcher.workers_per_node "
    "num_nodes=launcher.nodes precision=train.precision gradient_clip_val=train.clip_grad_norm strategy=trainer "
    "log_every_n_steps=train.log_every val_check_interval=train.eval_every default_root_dir=run_root "
    "accelerator=device save_top_k=train.keep_checkpoints ckpt_path=train.resume num_workers=data.workers",
    "Accelerate": "mixed_precision=train.precision num_processes=launcher.workers_per_node num_machines=launcher.nodes "
    "machine_rank=launcher.node_rank main_process_ip=launcher.master_addr main_process_port=launcher.master_port "
    "project_dir=run_root log_with=tracking",
    "DeepSpeed": "train_micro_batch_size_per_gpu=train.batch_size gradient_clipping=train.clip_grad_norm "
    "zero_optimization.stage=trainer.zero_stage fp16.enabled=train.precision=fp16 steps_per_print=train.log_every "
    "optimizer.params.lr=optimizer.lr warmup_num_steps=scheduler.warmup_steps stage=trainer.zero_stage",
    "torchtitan": "training.local_batch_size=train.batch_size training.seq_len=data.seq_len training.steps=train.steps "
    "metrics.log_freq=train.log_every checkpoint.interval=train.checkpoint_every job.dump_folder=run_root "
    "activation_checkpoint.mode=train.activation_checkpointing",
    "torchrun": "nproc_per_node=launcher.workers_per_node nnodes=launcher.nodes master_addr=launcher.master_addr "
    "max_restarts=launcher.max_restarts rdzv_endpoint=launcher.master_addr node_rank=launcher.node_rank",
    "sbatch": "launcher.time_limit=launcher.time launcher.mem=launcher.memory "
    "ntasks_per_node=launcher.workers_per_node "
    "launcher.cpus_per_task=launcher.cpus_per_node queue=launcher.partition job_name=name",
    "this": "launcher.workers=launcher.workers_per_node launcher.gpus=launcher.workers_per_node lr=optimizer.lr "
    "train.lr=optimizer.lr batch_size=train.batch_size data.batch_size=train.batch_size epochs=train.epochs "
    "gpus=launcher.workers_per_node log_interval=train.log_every trainer.steps=train.steps train_steps=train.steps "
    "maxSteps=train.steps optimizer_name=optimizer model.n_layer=model.params.n_layer train.seed=seed "
    "data_path=data.path "
    "launcher.num_nodes=launcher.nodes train.checkpoint=train.checkpoint_every optimizer.learning_rate=optimizer.lr "
    "grad_accum=train.grad_accumulation trainer.stage=trainer.zero_stage scheduler.warmup=scheduler.warmup_steps "
    "learing_rate=optimizer.lr gradient_acumulation_steps=train.grad_accumulation data.sequence_length=data.seq_len",
}
"""What users of other tools type, and the key that they mean; written without a look at the table of synonyms."""
ABSENT = (
    *("hidden_size", "foo", "train.foo", "train.shuffle", "early_stopping", "label_smoothing"),
    *("tensor_parallel", "wandb", "optimizer.nesterov", "trainer.fsdp", "launcher.hostfile", "data.pin_memory"),
    *(
        "data.prefetch",
        "backend.opset",
        "temperature",
        "loss",
        "num_layers",
        "group_by_length",
        "train.every",
    ),
)
"""What has no key here: a guess would be wrong."""
NAMES = [(name, key) for line in ELSEWHERE.values() for name, _, key in (pair.partition("=") for pair in line.split())]


@pytest.mark.parametrize(("name", "key"), NAMES, ids=[name for name, _ in NAMES])
def test_the_name_of_another_tool_leads_to_the_key(name: str, key: str) -> None:
    assert meant_keys(name)[:1] == [key]


@pytest.mark.parametrize("name", ABSENT)
def test_no_guess_is_better_than_a_wrong_one(name: str) -> None:
    assert meant_keys(name) == []


def _drop(word: str, at: int, draw: random.Random) -> str:
    return word[:at] + word[at + 1 :]


def _double(word: str, at: int, draw: random.Random) -> str:
    return word[: at + 1] + word[at:]


def _swap(word: str, at: int, draw: random.Random) -> str:
    at = min(at, len(word) - 2)
    return word[:at] + word[at + 1] + word[at] + word[at + 2 :]


def _replace(word: str, at: int, draw: random.Random) -> str:
    return word[:at] + draw.choice(string.ascii_lowercase) + word[at + 1 :]


def _typos(rounds: int) -> list[tuple[str, str]]:
    """Misspelt keys of four letters and more, each with the key that was meant; drawn with a fixed seed."""
    draw = random.Random(14)
    edits: list[Callable[[str, int, random.Random], str]] = [_drop, _double, _swap, _replace]
    keys = [key for key in known_keys() if len(key.rpartition(".")[2]) >= 4]
    found = []
    for key in keys * rounds:
        head, dot, leaf = key.rpartition(".")
        wrong = draw.choice(edits)(leaf, draw.randrange(len(leaf)), draw)
        if f"{head}{dot}{wrong}" not in known_keys():
            found.append((f"{head}{dot}{wrong}", key))
    return found


def test_of_misspelt_keys_99_percent_lead_to_the_right_one() -> None:
    typos = _typos(10)
    wrong = [(name, key, meant_keys(name)) for name, key in typos if meant_keys(name)[:1] != [key]]
    assert len(typos) > 1000
    assert len(wrong) <= 0.01 * len(typos), wrong


def test_of_misspelt_groups_99_percent_lead_to_the_right_key() -> None:
    draw = random.Random(7)
    keys = [key for key in known_keys() if key.partition(".")[0] in GROUPS and key.count(".") == 1]
    typos = [(_swap(key, draw.randrange(3), draw), key) for key in keys]
    wrong = [(name, key, meant_keys(name)) for name, key in typos if name != key and meant_keys(name)[:1] != [key]]
    assert len(wrong) <= 0.01 * len(typos), wrong


def test_the_table_names_keys_that_exist_and_no_others() -> None:
    keys = {key.partition("=")[0] for several in KEYS.values() for key in several}
    assert {key for key in keys if not key.startswith("model.params.")} <= set(known_keys())
    assert not set(KEYS) & set(known_keys())
    assert all(meant_keys(name)[0] == several[0] for name, several in KEYS.items())


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("launcher.workers=2", "Did you mean launcher.workers_per_node?"),
        ("gpus=2", "Did you mean launcher.workers_per_node or launcher.gpus_per_node (launcher=slurm)?"),
        ("trainer.stage=2", "Did you mean trainer.zero_stage (trainer=deepspeed)?"),
        ("optimizer.nesterov=true", "optimizer.nesterov: no such key (all keys: ortlaunch --cfg job)"),
        ("+train.stpes=3", "train.stpes: no such key. Did you mean train.steps?"),
        ("+launcher.gpus_per_node=3", "launcher.gpus_per_node: the chosen launcher has no such key; it belongs to"),
        ("+epochs=3", "epochs: no such key. Did you mean train.epochs?"),
        ("backend=onnxruntime", "backend=onnxruntime: no such option. Did you mean backend=ort?"),
        ("backend=inductor", "Did you mean backend=compile?"),
    ],
)
def test_the_refusal_names_the_key_that_is_meant(override: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        to_config(compose([override]))
    assert said in str(caught.value)


@pytest.mark.parametrize("override", ["+model.params.width=3", "+trainer.config.anything=3", "+launcher.env.KEY=3"])
def test_what_has_keys_of_its_own_takes_any(override: str) -> None:
    options = {"+trainer": ["trainer=deepspeed"], "+launcher": ["launcher=slurm"], "+model": []}
    to_config(compose([*options[override.partition(".")[0]], override]))
