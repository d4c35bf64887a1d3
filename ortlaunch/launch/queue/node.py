"""The program for each node of a job: ``python -m ortlaunch.launch.queue.node RUN_DIR`` becomes torchrun."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

from ortlaunch.base import last_resort, output
from ortlaunch.base.errors import RequestError
from ortlaunch.config.devices import usable_cores
from ortlaunch.launch.plan import LaunchPlan
from ortlaunch.launch.queue import history
from ortlaunch.launch.queue.launcher import BatchLauncher
from ortlaunch.launch.queue.own import NodePlace
from ortlaunch.launch.torchrun import threads_per_worker, torchrun, worker_environment
from ortlaunch.run.attempt import header
from ortlaunch.run.run import Run

_LEFT_TO_WORKERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def train(launcher: BatchLauncher, plan: LaunchPlan) -> None:
    """Replaces this process by torchrun; does not return.

    Args:
        launcher: the launcher of the job.
        plan: the run.

    Raises:
        RequestError: the launcher cannot tell this node's place.
    """
    place = launcher.place(plan.config)
    output.append_to(plan.files.torchrun_log(place.rank))
    print(header(), flush=True)
    variables = environment_of(launcher, plan)
    # A job that resumes the run is a launch of its own, whose first attempt follows train.resume.
    restarts = history.load(plan.run_dir).restarts(launcher.own_job().job_id)
    variables |= {"ORTLAUNCH_RESTARTS": str(restarts), "ORTLAUNCH_STARTED": repr(time.time())}
    command = command_of(plan, place)
    if "--signals-to-handle" in torchrun_source():
        # A signal to the job reaches every process on the node. The workers take it as a request to stop and write
        # their checkpoint; torchrun would end them after 30 seconds, whatever they are doing.
        for number in _LEFT_TO_WORKERS:
            signal.signal(number, signal.SIG_IGN)
    os.execvpe(command[0], command, {**os.environ, **variables})


def command_of(plan: LaunchPlan, place: NodePlace) -> list[str]:
    """Returns the command for one node's workers."""
    source = torchrun_source()
    signal_options = ["--signals-to-handle=SIGINT,SIGHUP,SIGQUIT"] if "--signals-to-handle" in source else []
    if "--shutdown-timeout" in source:
        signal_options.append(f"--shutdown-timeout={plan.config.launcher.grace_seconds}")
    options = [
        f"--rdzv-endpoint={place.head}:{place.port}",
        f"--rdzv-id={place.token}",
        # Without is_host, torchrun would compare host names, which have many forms.
        f"--rdzv-conf=is_host={'true' if place.rank == 0 else 'false'}",
        *_own_address(place.name),
        "--max-restarts=0",
        *signal_options,
    ]
    return torchrun(plan, options)


def environment_of(launcher: BatchLauncher, plan: LaunchPlan) -> dict[str, str]:
    """Returns the variables of the node's workers. Those that the user sets take precedence."""
    threads = threads_per_worker(plan.config, plan.workers, usable_cores())
    defaults = worker_environment(plan, threads, "lo" if plan.nodes == 1 else None)
    return defaults | launcher.variables(plan.config)


def torchrun_source() -> str:
    """Returns torchrun's source, which shows its options. ``torchrun --help`` would import torch for seconds."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return ""
    try:
        return (Path(found.origin).parent / "distributed" / "run.py").read_text(encoding="utf-8")
    except OSError:
        return ""


def _own_address(name: str) -> list[str]:
    """Returns the option with the scheduler's name for this node, if it resolves. Other nodes connect to this name."""
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return []
    return [f"--local-addr={name}"] if re.fullmatch(r"[\w.-]+", name) else []


def main() -> None:
    """Runs the command line."""
    from ortlaunch.launch.queue.job import launcher_and_plan

    run_dir = Path(sys.argv[1])
    try:
        train(*launcher_and_plan(run_dir))
    except RequestError as error:
        sys.exit(f"ortlaunch: {error}")
    except Exception as error:
        sys.exit(last_resort.told(error, Run(run_dir).launcher_error))


if __name__ == "__main__":
    main()
