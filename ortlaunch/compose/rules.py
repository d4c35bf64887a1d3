"""Rules between keys: they refuse what cannot work before anything starts, and name the key and the remedy.

Hydra checks types and misspelt keys while it composes. These rules see a well-formed `Config`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.base.ownership import require_own
from ortlaunch.base.secrets import without_secrets_of
from ortlaunch.base.targets import check_target, with_arguments
from ortlaunch.compose.attached import attached
from ortlaunch.config.backends import require_ort
from ortlaunch.config.bounds import check_numbers
from ortlaunch.config.devices import resolve_device
from ortlaunch.config.hidden import leaves
from ortlaunch.config.load import to_dict
from ortlaunch.config.precisions import Cell, cell_name
from ortlaunch.config.schema import (
    Allocator,
    AutoConfig,
    Config,
    Device,
    OrtConfig,
    OrtZero3,
    RunConfig,
    ScriptRun,
    TokenDataConfig,
    TorchProfileConfig,
    TrainConfig,
)
from ortlaunch.config.scores import best_of, class_of, wanted
from ortlaunch.config.trainers import trainer_of
from ortlaunch.data.sources.factory import FactoryConfig
from ortlaunch.data.sources.images import ImagesConfig
from ortlaunch.launch.plan import LONGEST_NAME
from ortlaunch.launch.table import launcher_of
from ortlaunch.launch.work import Script
from ortlaunch.models import registry
from ortlaunch.models.params import check_task, pretrained_source
from ortlaunch.run import manifest
from ortlaunch.run.checkpoints import check_steps, steps_in
from ortlaunch.run.run import Run, named_checkpoint
from ortlaunch.tracking import trackers


def check(config: RunConfig, *, starts: bool = True) -> None:
    """Applies every rule.

    Args:
        config: the configuration.
        starts: whether a run may start from here.

    Raises:
        RequestError: the first rule that the configuration breaks.
    """
    if isinstance(config, ScriptRun):
        for of_script in SCRIPT_RULES:
            of_script(config)
    else:
        assert isinstance(config, Config)
        for of_training in RULES:
            of_training(config)
    for rule in launcher_of(config).start_rules if starts else ():
        rule(config)


def _numbers(config: RunConfig) -> None:
    check_numbers(config)


def _names(config: RunConfig) -> None:
    folder = "becomes a folder's name"
    names = [("experiment", config.experiment, folder), ("name", config.name, folder)]
    if isinstance(config, Config) and isinstance(config.backend, OrtConfig):
        names.append(("backend.debug.onnx_prefix", config.backend.debug.onnx_prefix, "begins the names of files"))
    if not config.run_root.strip():
        raise RequestError(f"run_root={config.run_root!r}: it is the folder of the runs, so it must not be empty")
    for key, value, use in names:
        if value is not None and (not value.strip() or "/" in value or value in (".", "..") or "\0" in value):
            raise RequestError(f"{key}={value!r}: {use}, so it must not be empty or contain '/'")
        if value is not None and len(os.fsencode(value)) > LONGEST_NAME:
            raise RequestError(f"{key}={value}: {use}, so it must have at most {LONGEST_NAME} bytes")


def _no_secrets(config: RunConfig) -> None:
    """Refuses secrets in values that must be written as they are: names of folders, and what a job's script holds."""
    launcher = leaves(to_dict(config.launcher), "launcher")
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
    same_environment = launcher_of(config).finds_same_packages(config)
    registry.check_source(config.model, same_environment=same_environment)
    if isinstance(config.data, FactoryConfig):
        check_target(config.data.target, "data.target", same_environment=same_environment)
    if config.model.name == "hf":
        check_task(str(config.model.params.get("task", "causal-lm")))
        pretrained_source(str(config.model.params.get("pretrained", "")))


def _targets(config: Config) -> None:
    """Looks at the code that the user names, which only the workers import."""
    same_environment = launcher_of(config).finds_same_packages(config)
    named = [("train.items", config.train.items), ("train.step", config.train.step), ("eval.step", config.eval.step)]
    named += [("train.hooks", with_arguments(hook, "train.hooks", "target")[0]) for hook in config.train.hooks]
    named += [("eval.metrics", one.target) for one in wanted(config.eval.metrics)]
    if isinstance(config.data, ImagesConfig):
        named += [(key, name if ":" in name else None) for key, name in config.data.transforms()]
    for key, target in named:
        if target is not None:
            check_target(target, key, same_environment=same_environment)
    for group, meaning in (("optimizer", "Class"), ("scheduler", "function")):
        node = getattr(config, group)
        if node.name == "factory" and node.target is None:
            raise RequestError(f"{group}=factory takes what {group}.target names: give {group}.target=module:{meaning}")
        if (target := getattr(node, "target", None)) is not None:
            check_target(target, f"{group}.target", same_environment=same_environment)
    for number, one in enumerate(config.optimizer.groups):
        if one.target is not None:
            check_target(one.target, f"optimizer.groups.{number}.target", same_environment=same_environment)
        elif one.params:
            raise RequestError(f"optimizer.groups.{number}.params are arguments of its target: give target, too")


def _duration(config: Config) -> None:
    """Refuses a run whose length is given twice, and texts other than ``epoch`` where steps are meant."""
    train = config.train
    given = {"train.epochs": train.epochs, "train.tokens": train.tokens}
    given |= {"train.steps": train.steps if train.steps != TrainConfig().steps else None}
    named = [f"{key}={value:g}" for key, value in given.items() if value is not None]
    if len(named) > 1:
        raise RequestError(f"{' and '.join(named)} both say how long the run is: give one of them")
    for key in ("log_every", "eval_every", "checkpoint_every"):
        value = getattr(train, key)
        if isinstance(value, str) and value != "epoch":
            raise RequestError(f"train.{key}={value}: give a number of steps, or epoch")


def _evaluations(config: Config) -> None:
    """Refuses keys that say what evaluations are for where there are none."""
    best_of(config.train.best)
    asked = {
        "train.best": config.train.best,
        "train.patience": config.train.patience,
        "eval.step": config.eval.step,
        "eval.metrics": config.eval.metrics or None,
    }
    unused = [key for key, value in asked.items() if value is not None]
    if unused and config.train.eval_every is None:
        raise RequestError(f"{unused[0]} is for evaluations, and there are none: set train.eval_every")


def _model_fits_data(config: Config) -> None:
    entry = registry.find(config.model.name)
    if entry is None or entry.inputs == "any" or isinstance(config.data, FactoryConfig):
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


def _packages(config: Config) -> None:
    """Names the extra of what the workers would not find."""
    if not launcher_of(config).finds_same_packages(config):
        return
    needed = [(f"trainer={config.trainer.name}", name, name) for name in trainer_of(config.trainer).packages]
    if config.data.name == "hf":
        needed.append(("data=hf", "datasets", "hf"))
    if config.adapter.name == "lora":
        needed.append(("adapter=lora", "peft", "lora"))
    needed += [(str(one), "torchmetrics", "metrics") for one in wanted(config.eval.metrics) if one.target is None]
    for what, package, extra in needed:
        if find_spec(package) is None:
            raise RequestError(f"{what} needs {package}, which is not installed: pip install 'ortlaunch[{extra}]'")
    for one in wanted(config.eval.metrics):
        if one.target is None:
            class_of(str(one.arguments["name"]))


def _backend(config: Config) -> None:
    if runs_ort_here(config):
        require_ort("backend=ort")


def runs_ort_here(config: Config) -> bool:
    """Returns whether the workers need ONNX Runtime among the packages that this Python finds."""
    return isinstance(config.backend, OrtConfig) and launcher_of(config).finds_same_packages(config)


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
    # What runs in eager has at least that choice.
    backend = "eager" if isinstance(config.backend, AutoConfig) else config.backend.name
    cell = Cell(backend, trainer, config.train.precision, resolve_device(config.device))
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


def _allocator(config: RunConfig) -> None:
    if config.launcher.allocator is Allocator.system:
        return
    key = f"launcher.allocator={config.launcher.allocator.value}"
    if resolve_device(config.device) is not Device.cpu:
        raise RequestError(
            f"{key} is for workers on the CPU: leave it out, or use device=cpu (the variable of torch's "
            "allocator for GPUs is PYTORCH_CUDA_ALLOC_CONF)"
        )
    if platform.libc_ver()[0] != "glibc":
        raise RequestError(f"{key} sets glibc's allocator, and this Python uses another C library: leave it out")


def _launcher(config: RunConfig) -> None:
    for rule in launcher_of(config).rules:
        rule(config)


def _data(config: Config) -> None:
    config.data.check()


def _profile(config: Config) -> None:
    profile = config.profile
    if profile is None:
        return
    if profile.start + profile.steps > config.train.steps:
        raise RequestError(
            f"profile.start={profile.start} profile.steps={profile.steps}: the run ends at train.steps="
            f"{config.train.steps} before that: lower profile.start"
        )
    if isinstance(profile, TorchProfileConfig):
        _profiled_workers(profile, launcher_of(config).workers_per_node(config) * config.launcher.nodes)
    elif resolve_device(config.device) is not Device.cuda:
        raise RequestError(f"+profile={profile.name} looks at the GPU: use device=cuda, or +profile=torch")


def _profiled_workers(profile: TorchProfileConfig, workers: int) -> None:
    """Refuses ranks that the run does not have; nothing would be profiled."""
    if not profile.ranks:
        raise RequestError("profile.ranks=[]: no worker is profiled: name one, or leave +profile out")
    if absent := [rank for rank in profile.ranks if rank >= workers]:
        has = f"ranks 0 to {workers - 1}" if workers > 1 else "rank 0 alone"
        raise RequestError(f"profile.ranks={profile.ranks}: the run has {has}, and no rank {absent[0]}")


def _may_hold_checkpoints(folder: Path) -> bool:
    """Whether a folder is a run's, a checkpoint or one of checkpoints.

    A run that is in the queue has none yet, and another one may wait for its end to go on from there.
    """
    run, above = Run(folder), Run(folder.absolute().parent)
    signs = (run.config_file, run.checkpoints, above.config_file, folder / manifest.NAME)
    return any(sign.exists() for sign in signs) or bool(steps_in(folder))


def _checkpoint_paths(config: Config) -> None:
    resume = config.train.resume
    if resume not in ("auto", "never") and not Path(resume).expanduser().is_dir():
        raise RequestError(f"train.resume={resume}: no such folder; it takes auto, never, a checkpoint or a run folder")
    if resume not in ("auto", "never"):
        require_own(Path(resume).expanduser(), use=f"train.resume={resume}")
        if not _may_hold_checkpoints(Path(resume).expanduser()):
            raise RequestError(f"train.resume={resume}: it is no run folder, no checkpoint, and there are none in it")
        if config.train.counts_steps and (named := named_checkpoint(Path(resume).expanduser())) is not None:
            check_steps(named, config.train.steps)
    if config.model.weights is not None and not Path(config.model.weights).expanduser().exists():
        raise RequestError(f"model.weights={config.model.weights}: no such file or folder")


def _compile_mode(config: Config) -> None:
    mode = getattr(config.backend, "mode", "default")
    modes = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
    if mode not in modes:
        raise RequestError(f"backend.mode={mode}: must be one of {', '.join(modes)}")


def _script(config: ScriptRun) -> None:
    Script(config).check(same_system=launcher_of(config).finds_same_packages(config))


def _attach(config: ScriptRun) -> None:
    """Checks what `ortlaunch.attach()` will get, which the script itself may change."""
    if config.script.attach:
        check_attached(attached((), config.script.attach, config, workers=2))


def check_attached(config: Config) -> None:
    """Applies every rule between the keys of `ortlaunch.attach()`.

    Raises:
        RequestError: the first rule that they break.
    """
    for rule in ATTACHED_RULES:
        rule(config)


def _attached_backend(config: Config) -> None:
    if isinstance(config.backend, AutoConfig):
        raise RequestError("backend=auto: ortlaunch cannot try a script's model: name the backend")
    if isinstance(config.backend, OrtConfig) and trainer_of(config.trainer).zero_stage(config.trainer) == 3:
        raise RequestError(
            "backend=ort trainer.zero_stage=3: ONNX Runtime gets a script's model as a whole, and ZeRO 3 never has it "
            "whole: use trainer.zero_stage=2, or backend=eager"
        )


ATTACHED_RULES: tuple[Callable[[Config], None], ...] = (
    _numbers,
    _attached_backend,
    _backend,
    _ort_blocks,
    _trainer,
    _precision,
    _activation_checkpointing,
    _tf32,
    _checkpoint_paths,
    _compile_mode,
)
SCRIPT_RULES: tuple[Callable[[ScriptRun], None], ...] = (
    _numbers,
    _names,
    _no_secrets,
    _script,
    _attach,
    _allocator,
    _launcher,
    trackers.check,
)
RULES: tuple[Callable[[Config], None], ...] = (
    _numbers,
    _names,
    _no_secrets,
    _backend,
    _known_model,
    _model_fits_data,
    _targets,
    _duration,
    _evaluations,
    _trainer,
    _packages,
    _ort_blocks,
    _precision,
    _activation_checkpointing,
    _tf32,
    _allocator,
    _launcher,
    _data,
    _checkpoint_paths,
    _profile,
    _compile_mode,
    trackers.check,
)
