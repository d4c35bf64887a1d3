"""torchrun: how many workers a machine has, the command that starts them, and the variables that they get."""

from __future__ import annotations

import os

from ortlaunch.base.programs import module_command
from ortlaunch.config.devices import resolve_device
from ortlaunch.config.schema import Device, RunConfig
from ortlaunch.launch.allocator import allocator_variables
from ortlaunch.launch.plan import LaunchPlan
from ortlaunch.launch.work import work_of

CPU_WORKERS = 2
"""Default number of workers on a machine without GPU: the smallest that makes a run distributed."""


def workers_per_node(config: RunConfig, device: Device, gpus: int, cores: int) -> int:
    """Returns the number of workers on each machine: the requested one, else one per GPU, or two without a GPU.

    Args:
        config: the configuration.
        device: what the workers compute on.
        gpus: GPUs of each machine.
        cores: CPU cores of each machine.
    """
    if work_of(config).one_worker:
        return 1
    if config.launcher.workers_per_node is not None:
        return config.launcher.workers_per_node
    return gpus if device is Device.cuda else min(CPU_WORKERS, cores)


def threads_per_worker(config: RunConfig, workers: int, cores: int) -> int:
    """Returns the number of CPU threads of each worker: the requested one, else its share of the machine's cores.

    Args:
        config: the configuration.
        workers: workers on the machine.
        cores: CPU cores of the machine.
    """
    return config.launcher.threads or max(1, cores // workers)


def torchrun(plan: LaunchPlan, options: list[str]) -> list[str]:
    """Returns the command that starts one machine's workers.

    Args:
        plan: the run.
        options: further options of torchrun, such as those for the rendezvous and for restarts.
    """
    work = plan.work
    return [
        *module_command("ortlaunch.launch.agent"),
        *work.agent_options(plan.files),
        "torch.distributed.run",
        f"--nnodes={plan.nodes}",
        f"--nproc-per-node={plan.workers}",
        "--rdzv-backend=c10d",
        # The workers write their logs themselves. By default torchrun would leave an empty folder in /tmp for each run.
        f"--log-dir={os.devnull}",
        *options,
        # torchrun itself would start Python without -P.
        "--no-python",
        *module_command("ortlaunch.worker"),
        str(plan.run_dir),
        *work.command(),
    ]


def worker_environment(plan: LaunchPlan, threads: int, interface: str | None) -> dict[str, str]:
    """Returns the variables that every worker gets in addition to those it inherits.

    Args:
        plan: the run.
        threads: threads of each worker.
        interface: the network interface between the workers; None lets gloo choose.
    """
    variables = {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        **plan.work.environment(plan.files, plan.config.experiment),
    }
    if interface is not None:
        # By default gloo finds its network card by the host's name, which often does not resolve.
        variables["GLOO_SOCKET_IFNAME"] = interface
    if resolve_device(plan.config.device) is Device.cpu:
        # Without DS_ACCELERATOR, DeepSpeed chooses an accelerator by itself.
        variables |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", **allocator_variables(plan.config)}
    else:
        # NCCL's flight recorder keeps the last collectives of each worker and writes them to a file at a time-out.
        # Each variable is also set under the name that older versions of torch use.
        trace = str(plan.files.stacks / "nccl-rank-")
        variables |= {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}
        variables |= {"TORCH_FR_DUMP_TEMP_FILE": trace, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": trace}
        variables["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
    return variables
