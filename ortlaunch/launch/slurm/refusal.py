"""Explains SLURM's refusals: the key that caused one, and the values that the cluster has."""

from __future__ import annotations

import re
from dataclasses import asdict

from ortlaunch.config.schema import RunConfig, SlurmConfig
from ortlaunch.launch.slurm.programs import listed

_BEFORE = r"^(?:sbatch: error: |sbatch: |allocation failure: |Batch job submission failed: )+"
_NODES = ("nodes", "cpus_per_node", "gpus_per_node", "gpu_type", "memory", "constraint")
_WORDS = (
    (
        r"configuration source|no such file or directory.*slurm\.conf",
        "SLURM is installed here, and this machine belongs to no cluster: submit from a login node; "
        "launcher.dry_run=true shows the script anywhere",
        "",
    ),
    (r"invalid partition", "launcher.partition={partition}: the cluster has no such partition", "there are %R"),
    (
        r"invalid account",
        "launcher.account={account}: you have no such account in this partition (sacctmgr show associations)",
        "",
    ),
    (r"invalid qos", "launcher.qos={qos}: not a quality of service that you may use (sacctmgr show qos)", ""),
    (r"time limit", "launcher.time={time}: more than the partition allows", "limits: %R %l"),
    (r"invalid feature", "launcher.constraint={constraint}: no node has these features", "there are %f"),
    (
        r"generic resource",
        "launcher.gpus_per_node={gpus_per_node} launcher.gpu_type={gpu_type} launcher.gres={gres}: the cluster has no "
        "such resource, or wants launcher.gpu_request=gres",
        "there are %G",
    ),
    (
        r"dependency problem|invalid --dependency",
        "launcher.dependency={dependency}: no such job, or not as SLURM writes it (afterok:1234)",
        "",
    ),
    (
        r"reservation is invalid|invalid reservation",
        "launcher.reservation={reservation}: there is no such reservation, or it is not for you",
        "",
    ),
    (
        r"node configuration is not available|node count|more processors|memory required",
        "no nodes of the cluster are like this: {wanted} (sinfo -N -o '%N %P %c %m %G %f' shows what they have)",
        "",
    ),
    (
        r"violates accounting|limit",
        "the job is over a limit of your account, partition or quality of service (sacctmgr show associations)",
        "",
    ),
    (
        r"unable to contact|socket timed out|connection refused|communication",
        "SLURM's controller does not answer: try again later; nothing was submitted",
        "",
    ),
)
"""What SLURM says, what is said instead, and what the cluster has, in sinfo's format. The first that fits counts."""


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
    assert isinstance(config.launcher, SlurmConfig)
    keys = asdict(config.launcher)
    keys["wanted"] = " ".join(f"launcher.{key}={keys[key]}" for key in _NODES if keys[key] is not None)
    bare = [re.sub(_BEFORE, "", line.strip()) for line in said.splitlines() if line.strip()]
    quoted = bare[-1] if bare else "no reason given"
    for pattern, text, shown in _WORDS:
        if re.search(pattern, said, re.IGNORECASE):
            word, sign, layout = shown.partition("%")
            found = listed(sign + layout) if sign else []
            has = f" ({word}{', '.join(found)})" if found else ""
            return f"{text.format_map(keys)}{has} (SLURM: {quoted})"
    return f"SLURM does not take the job: {'; '.join(bare) or quoted}"
