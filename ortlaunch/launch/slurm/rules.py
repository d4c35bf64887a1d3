"""Rules between the keys of ``launcher=slurm``: they refuse what sbatch would refuse or misunderstand."""

from __future__ import annotations

import re

from ortlaunch.base.errors import RequestError
from ortlaunch.base.secrets import is_secret
from ortlaunch.config.schema import AutoConfig, Config, Device, RunConfig, SlurmConfig, key_facts
from ortlaunch.launch.launcher import Rule
from ortlaunch.launch.limits import LEAST_BYTES, WHOLE_NODE, parsed
from ortlaunch.launch.slurm import options
from ortlaunch.launch.work import work_of


def _options(config: RunConfig) -> None:
    cfg = config.launcher
    assert isinstance(cfg, SlurmConfig)
    for key in ("extra", "srun_extra"):
        for text in getattr(cfg, key):
            options.parse(key, text)
    for key in ("gpu_type", *(key for key, facts in key_facts(cfg).items() if facts.sbatch)):
        value = getattr(cfg, key)
        if isinstance(value, str) and (not value.strip() or not value.isprintable()):
            raise RequestError(f"launcher.{key}={value!r}: must be one line and not empty; null leaves it out")
    for name in cfg.env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise RequestError(f"launcher.env.{name}: not the name of a variable (letters, digits and _)")
        if is_secret(name):
            raise RequestError(
                f"launcher.env.{name}: the run folder, the job script and MLflow would hold it: export {name} in "
                "the shell that submits, whose environment the job inherits"
            )
    if any("\0" in text for text in (*cfg.setup, *cfg.env.values())):
        raise RequestError("launcher.setup and launcher.env cannot hold the character NUL")


def _time(config: RunConfig) -> None:
    cfg = config.launcher
    assert isinstance(cfg, SlurmConfig)
    if cfg.time is not None:
        seconds = slurm_seconds(cfg.time)
        if seconds is None:
            raise RequestError(
                f"launcher.time={cfg.time}: must be as SLURM writes it: MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS"
            )
        if seconds < 2 * cfg.grace_seconds:
            raise RequestError(
                f"launcher.time={cfg.time} is {seconds} s, and the last launcher.grace_seconds={cfg.grace_seconds} of "
                "them are kept for the checkpoint: raise launcher.time or lower launcher.grace_seconds"
            )


def _memory(config: RunConfig) -> None:
    cfg = config.launcher
    assert isinstance(cfg, SlurmConfig)
    if cfg.memory is None or cfg.memory == WHOLE_NODE:
        return
    # sbatch takes neither 80GiB nor 1.5G, and would say only that the specification is invalid.
    if not re.fullmatch(r"\d+([KMGT]B?)?", cfg.memory, re.ASCII | re.IGNORECASE):
        raise RequestError(
            f"launcher.memory={cfg.memory}: must be as SLURM writes it: 200G or 512M in whole numbers, or 0 for all of "
            "a node's memory"
        )
    size = parsed(cfg.memory, "launcher.memory")
    if size < LEAST_BYTES:
        raise RequestError(
            f"launcher.memory={cfg.memory}: importing torch takes more than {LEAST_BYTES // 2**20} MiB in each worker: "
            "give more, such as 8G"
        )


def slurm_seconds(text: str) -> int | None:
    """Returns the seconds of a time limit in SLURM's format; None if it is not one."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text, re.ASCII)
    if found is None:
        return None
    days, *rest = (int(part) if part else 0 for part in found.groups())
    first, second, third = rest
    if found[1]:
        return days * 86400 + first * 3600 + second * 60 + third
    if found[4]:
        return first * 3600 + second * 60 + third
    return first * 60 + second


def names_gpus(gres: str | None) -> bool:
    """Returns whether `launcher.gres` asks for GPUs: gpu:a100:4, or gres/gpu=4 as newer versions write it."""
    return re.search(r"(?:^|,)(?:gres[:/])?gpu\b", gres or "") is not None


def _gpus(config: RunConfig) -> None:
    cfg = config.launcher
    assert isinstance(cfg, SlurmConfig)
    if cfg.gpus_per_node and names_gpus(cfg.gres):
        raise RequestError(f"launcher.gres={cfg.gres} and launcher.gpus_per_node={cfg.gpus_per_node}: give only one")
    if config.device is not Device.cuda:
        return
    if not cfg.gpus_per_node and not names_gpus(cfg.gres):
        raise RequestError("device=cuda and the job asks for no GPU: give launcher.gpus_per_node=N")
    if cfg.workers_per_node is not None and cfg.gpus_per_node and cfg.workers_per_node > cfg.gpus_per_node:
        raise RequestError(
            f"launcher.workers_per_node={cfg.workers_per_node} is more than launcher.gpus_per_node={cfg.gpus_per_node}:"
            " each worker has a GPU of its own"
        )
    one_worker = work_of(config).one_worker
    if cfg.gpus_per_node is None and cfg.workers_per_node is None and not one_worker:
        raise RequestError(
            f"launcher.gres={cfg.gres} does not say how many workers a node has: give launcher.workers_per_node=N"
        )


def _auto(config: RunConfig) -> None:
    assert isinstance(config.launcher, SlurmConfig)
    if (
        isinstance(config, Config)
        and isinstance(config.backend, AutoConfig)
        and config.launcher.container.image is not None
    ):
        raise RequestError(
            "backend=auto does not go with launcher.container.image: its trials would run outside of the container. "
            "Name a backend"
        )


SLURM_RULES: tuple[Rule, ...] = (_options, _time, _memory, _gpus, _auto)
