"""Explains SLURM's refusals: the key that caused one, and the values that the cluster has."""

from __future__ import annotations

import re
from collections.abc import Callable

from ortlaunch.config.schema import RunConfig, SlurmConfig
from ortlaunch.launch.slurm.programs import listed

_BEFORE = r"^(?:sbatch: error: |sbatch: |allocation failure: |Batch job submission failed: )+"


def is_final(said: str) -> bool:
    """Returns whether sbatch itself would refuse what ``sbatch --test-only`` has refused.

    ``--test-only`` also refuses a job that only has to wait for nodes that are down or drained. Its message is then
    the same as for nodes that do not exist. So while some nodes are out of service, only sbatch itself can tell.
    """
    return "Requested node configuration is not available" not in said or not listed("%D", "down,drain,fail,maint")


def in_plain_words(said: str, config: RunConfig) -> str:
    """Returns one message that explains what sbatch has printed.

    Args:
        said: sbatch's standard error.
        config: the configuration that asked for it.
    """
    cfg = config.launcher
    assert isinstance(cfg, SlurmConfig)
    lines = [line.strip() for line in said.strip().splitlines() if line.strip()]
    bare = [re.sub(_BEFORE, "", line) for line in lines]
    quoted = bare[-1] if bare else "no reason given"
    for pattern, explain in _WORDS:
        if re.search(pattern, said, re.IGNORECASE):
            return f"{explain(cfg)} (SLURM: {quoted})"
    return f"SLURM does not take the job: {'; '.join(bare) or quoted}"


def _partition(cfg: SlurmConfig) -> str:
    return f"launcher.partition={cfg.partition}: the cluster has no such partition{_available('%R')}"


def _account(cfg: SlurmConfig) -> str:
    return f"launcher.account={cfg.account}: you have no such account in this partition (sacctmgr show associations)"


def _qos(cfg: SlurmConfig) -> str:
    return f"launcher.qos={cfg.qos}: not a quality of service that you may use (sacctmgr show qos)"


def _nodes(cfg: SlurmConfig) -> str:
    asked = {
        "launcher.nodes": cfg.nodes,
        "launcher.cpus_per_node": cfg.cpus_per_node,
        "launcher.gpus_per_node": cfg.gpus_per_node,
        "launcher.gpu_type": cfg.gpu_type,
        "launcher.memory": cfg.memory,
        "launcher.constraint": cfg.constraint,
    }
    wanted = " ".join(f"{key}={value}" for key, value in asked.items() if value is not None)
    return f"no nodes of the cluster are like this: {wanted} (sinfo -N -o '%N %P %c %m %G %f' shows what they have)"


def _time(cfg: SlurmConfig) -> str:
    return f"launcher.time={cfg.time}: more than the partition allows{_available('%R %l', 'limits: ')}"


def _feature(cfg: SlurmConfig) -> str:
    return f"launcher.constraint={cfg.constraint}: no node has these features{_available('%f')}"


def _gres(cfg: SlurmConfig) -> str:
    text = f"launcher.gpus_per_node={cfg.gpus_per_node} launcher.gpu_type={cfg.gpu_type} launcher.gres={cfg.gres}"
    return f"{text}: the cluster has no such resource{_available('%G')}; or it wants launcher.gpu_request=gres"


def _dependency(cfg: SlurmConfig) -> str:
    return f"launcher.dependency={cfg.dependency}: no such job, or not as SLURM writes it (afterok:1234)"


def _reservation(cfg: SlurmConfig) -> str:
    return f"launcher.reservation={cfg.reservation}: there is no such reservation, or it is not for you"


def _limits(cfg: SlurmConfig) -> str:
    return "the job is over a limit of your account, partition or quality of service (sacctmgr show associations)"


def _controller(cfg: SlurmConfig) -> str:
    return "SLURM's controller does not answer: try again later; nothing was submitted"


def _no_cluster(cfg: SlurmConfig) -> str:
    return (
        "SLURM is installed here, and this machine belongs to no cluster: submit from a login node; "
        "launcher.dry_run=true shows the script anywhere"
    )


_WORDS: tuple[tuple[str, Callable[[SlurmConfig], str]], ...] = (
    (r"configuration source|no such file or directory.*slurm\.conf", _no_cluster),
    (r"invalid partition", _partition),
    (r"invalid account", _account),
    (r"invalid qos", _qos),
    (r"time limit", _time),
    (r"invalid feature", _feature),
    (r"generic resource", _gres),
    (r"dependency problem|invalid --dependency", _dependency),
    (r"reservation is invalid|invalid reservation", _reservation),
    (r"node configuration is not available|node count|more processors|memory required", _nodes),
    (r"violates accounting|limit", _limits),
    (r"unable to contact|socket timed out|connection refused|communication", _controller),
)


def _available(format: str, word: str = "there are ") -> str:
    found = listed(format)
    return f" ({word}{', '.join(found)})" if found else ""
