"""Rules between keys: they refuse what cannot work before anything starts, and name the key and the remedy.

Hydra checks types and misspelt keys while it composes. These rules see a well-formed `Config`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.base.ownership import require_own
from ortlaunch.base.secrets import without_secrets_of
from ortlaunch.config.devices import resolve_device
from ortlaunch.config.hidden import leaves
from ortlaunch.config.load import to_dict
from ortlaunch.config.precisions import Cell, cell_name
from ortlaunch.config.schema import (
    Config,
    Device,
    OrtConfig,
    OrtZero3,
    TokenDataConfig,
    TorchProfileConfig,
)
from ortlaunch.config.trainers import trainer_of
from ortlaunch.launch.table import launcher_of
from ortlaunch.models import registry
from ortlaunch.models.source import check_source
from ortlaunch.tracking import trackers


def check(config: Config) -> None:
    """Applies every rule.

    Raises:
        RequestError: the first rule that the configuration breaks.
    """
    for rule in RULES:
        rule(config)


def _least_numbers(config: Config) -> None:
    for key, (value, least) in _whole_numbers(config).items():
        if value < least:
            raise RequestError(f"{key}={value}: must be at least {least}")


def _whole_numbers(config: Config) -> dict[str, tuple[int, int]]:
    """The value and the least value of each whole number that is set."""
    numbers = {
        "train.steps": (config.train.steps, 1),
        "train.batch_size": (config.train.batch_size, 1),
        "train.grad_accumulation": (config.train.grad_accumulation, 1),
        "train.log_every": (config.train.log_every, 1),
        "train.steady_after": (config.train.steady_after, 0),
        "train.keep_checkpoints": (config.train.keep_checkpoints, 2),
        "launcher.nodes": (config.launcher.nodes, 1),
        "launcher.max_restarts": (config.launcher.max_restarts, 0),
        "launcher.timeout_seconds": (config.launcher.timeout_seconds, 1),
        "launcher.grace_seconds": (config.launcher.grace_seconds, 1),
        "data.workers": (config.data.workers, 0),
        "scheduler.warmup_steps": (config.scheduler.warmup_steps, 0),
        "trainer.timeout_seconds": (config.trainer.timeout_seconds, 1),
        "seed": (config.seed, 0),
        "train.eval_samples": (config.train.eval_samples, 1),
        "train.gc_every": (config.train.gc_every, 0),
    }
    if isinstance(config.backend, OrtConfig) and config.backend.recheck_every is not None:
        numbers["backend.recheck_every"] = (config.backend.recheck_every, 0)
    if config.train.checkpoint_every is not None:
        numbers["train.checkpoint_every"] = (config.train.checkpoint_every, 1)
    if isinstance(config.data, TokenDataConfig):
        numbers["data.seq_len"] = (config.data.seq_len, 2)
    if config.launcher.workers_per_node is not None:
        numbers["launcher.workers_per_node"] = (config.launcher.workers_per_node, 1)
    if isinstance(config.backend, OrtConfig) and config.backend.threads is not None:
        numbers["backend.threads"] = (config.backend.threads, 1)
    if config.train.eval_every is not None:
        numbers["train.eval_every"] = (config.train.eval_every, 1)
    return numbers


def _ranges(config: Config) -> None:
    if config.optimizer.lr <= 0:
        raise RequestError(f"optimizer.lr={config.optimizer.lr}: must be greater than 0")
    if not 0.0 <= config.data.eval_fraction < 1.0:
        raise RequestError(f"data.eval_fraction={config.data.eval_fraction}: must be at least 0 and less than 1")
    if config.train.clip_grad_norm is not None and config.train.clip_grad_norm <= 0:
        raise RequestError(
            f"train.clip_grad_norm={config.train.clip_grad_norm}: must be greater than 0; null switches clipping off"
        )


def _names(config: Config) -> None:
    folder = "becomes a folder's name"
    names = [("experiment", config.experiment, folder), ("name", config.name, folder)]
    if isinstance(config.backend, OrtConfig):
        names.append(("backend.debug.onnx_prefix", config.backend.debug.onnx_prefix, "begins the names of files"))
    for key, value, use in names:
        if value is not None and (not value.strip() or "/" in value or value in (".", "..") or "\0" in value):
            raise RequestError(f"{key}={value!r}: {use}, so it must not be empty or contain '/'")


def _no_secrets(config: Config) -> None:
    """Refuses secrets in values that must be written as they are: names of folders, and what a job's script holds."""
    launcher = leaves(to_dict(config)["launcher"], "launcher")
    for key, value in [
        ("name", config.name),
        ("experiment", config.experiment),
        ("run_root", config.run_root),
        *launcher,
    ]:
        if isinstance(value, str) and without_secrets_of("", value) != value:
            raise RequestError(
                f"{key}={without_secrets_of('', value)}: a secret, which the run folder would show: leave it out; "
                "workers and jobs inherit the variables of the shell that starts the run"
            )


def _known_model(config: Config) -> None:
    registry.check_request(config.model)
    check_source(config.model, same_environment=launcher_of(config).finds_same_packages(config))


def _model_fits_data(config: Config) -> None:
    entry = registry.find(config.model.name)
    if entry is None or entry.inputs == "any":
        return
    gives = "tokens" if isinstance(config.data, TokenDataConfig) else "images"
    if entry.inputs != gives:
        advice = "data=digits" if entry.inputs == "images" else "data=pysource (or synthetic, text, tokens, hf)"
        raise RequestError(
            f"model={config.model.name} takes {entry.inputs} and data={config.data.name} gives {gives}: choose {advice}"
        )
    longest = config.model.params.get("n_positions", config.model.params.get("max_position_embeddings"))
    if isinstance(config.data, TokenDataConfig) and isinstance(longest, int) and config.data.seq_len > longest:
        raise RequestError(
            f"data.seq_len={config.data.seq_len} is more than the {longest} positions of model={config.model.name}: "
            "lower data.seq_len or raise the model's positions"
        )


def _trainer(config: Config) -> None:
    trainer_of(config.trainer).check(config, resolve_device(config.device))


def _ort_blocks(config: Config) -> None:
    if not isinstance(config.backend, OrtConfig) or trainer_of(config.trainer).zero_stage(config.trainer) == 3:
        return
    idle = "has an effect only with trainer=deepspeed trainer.zero_stage=3: leave it out"
    if config.backend.blocks is not None:
        raise RequestError(f"backend.blocks={config.backend.blocks} {idle}")
    if config.backend.zero3 is not OrtZero3.recompute:
        raise RequestError(f"backend.zero3={config.backend.zero3.value} {idle}")


def _precision(config: Config) -> None:
    trainer = cell_name(config.trainer)
    cell = Cell(config.backend.name, trainer, config.train.precision, resolve_device(config.device))
    if cell.refusal is not None:
        raise RequestError(cell.refusal)


def _activation_checkpointing(config: Config) -> None:
    is_held = isinstance(config.backend, OrtConfig) and config.backend.zero3 is OrtZero3.hold
    if config.train.activation_checkpointing and is_held:
        raise RequestError(
            "train.activation_checkpointing=true does not go with backend.zero3=hold, which keeps what the forward "
            "made: use backend.zero3=recompute, which recomputes each block by itself"
        )


def _tf32(config: Config) -> None:
    if config.train.tf32 and resolve_device(config.device) is not Device.cuda:
        raise RequestError("train.tf32=true is a format of NVIDIA GPUs: leave it out, or use device=cuda")


def _launcher(config: Config) -> None:
    for rule in launcher_of(config).rules:
        rule(config)


def _data(config: Config) -> None:
    config.data.check()


def _profile(config: Config) -> None:
    profile = config.profile
    if profile is None:
        return
    if profile.start < 0 or profile.steps < 1:
        raise RequestError("profile.start must be at least 0 and profile.steps at least 1")
    if profile.start + profile.steps > config.train.steps:
        raise RequestError(
            f"profile.start={profile.start} profile.steps={profile.steps}: the run ends at train.steps="
            f"{config.train.steps} before that: lower profile.start"
        )
    if not isinstance(profile, TorchProfileConfig) and resolve_device(config.device) is not Device.cuda:
        raise RequestError(f"+profile={profile.name} looks at the GPU: use device=cuda, or +profile=torch")


def _checkpoint_paths(config: Config) -> None:
    resume = config.train.resume
    if resume not in ("auto", "never") and not Path(resume).expanduser().is_dir():
        raise RequestError(f"train.resume={resume}: no such folder; it takes auto, never, a checkpoint or a run folder")
    if resume not in ("auto", "never"):
        require_own(Path(resume).expanduser(), use=f"train.resume={resume}")
    if config.model.weights is not None and not Path(config.model.weights).expanduser().exists():
        raise RequestError(f"model.weights={config.model.weights}: no such file or folder")


def _compile_mode(config: Config) -> None:
    mode = getattr(config.backend, "mode", "default")
    modes = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
    if mode not in modes:
        raise RequestError(f"backend.mode={mode}: must be one of {', '.join(modes)}")


RULES: tuple[Callable[[Config], None], ...] = (
    _least_numbers,
    _ranges,
    _names,
    _no_secrets,
    _known_model,
    _model_fits_data,
    _trainer,
    _ort_blocks,
    _precision,
    _activation_checkpointing,
    _tf32,
    _launcher,
    _data,
    _checkpoint_paths,
    _profile,
    _compile_mode,
    trackers.check,
)
