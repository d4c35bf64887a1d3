"""The base class of launchers whose scheduler takes a script.

A further launcher subclasses `BatchLauncher` and implements what differs between schedulers: how a script is
submitted, how jobs are queried, and how a process finds its own job. Its script runs
``python -m ortlaunch.launch.queue.job RUN_DIR`` on the job's first node, and that program does the rest.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from abc import abstractmethod
from functools import partial
from pathlib import Path
from typing import ClassVar

from ortlaunch.base.errors import RequestError
from ortlaunch.base.exit_codes import DONE
from ortlaunch.base.files import replace
from ortlaunch.base.text import counted
from ortlaunch.config.schema import RunConfig
from ortlaunch.launch.folder import journal_start, say_notes, write_run_folder, written
from ortlaunch.launch.launcher import QueueLauncher, SweepPlan
from ortlaunch.launch.plan import LaunchPlan, Start
from ortlaunch.launch.queue.own import NodePlace, OwnJob, OwnState
from ortlaunch.launch.queue.submission import Ticket, announce, check_alike, say_announced, write_job
from ortlaunch.run import claim
from ortlaunch.run.ending import end_run
from ortlaunch.run.journal import Journal
from ortlaunch.run.making import make_run_folder
from ortlaunch.run.run import Run
from ortlaunch.tracking import trackers


class BatchLauncher(QueueLauncher):
    """Submits runs as scripts, and runs them inside their jobs."""

    submit_command: ClassVar[str]
    """The scheduler's program that takes a script."""
    starter: ClassVar[str] = "torchrun"
    """Name of the program that starts the workers, for messages."""
    warning: ClassVar[signal.Signals] = signal.SIGUSR2
    """Signal that the scheduler sends before it ends the job. SIGUSR1 is not free, because NCCL uses it."""

    # These methods run in the command that submits.

    @abstractmethod
    def script(self, plan: LaunchPlan) -> str:
        """Returns the script for one run."""

    @abstractmethod
    def enqueue(self, path: Path, config: RunConfig) -> Ticket:
        """Submits a script.

        Raises:
            RequestError: the scheduler refuses it; the message gives the reason in plain words.
        """

    def ask(self, script: str, config: RunConfig) -> None:
        """Asks the scheduler whether it would take a script, before anything is written.

        Raises:
            RequestError: it would not.
        """
        return

    def request(self, config: RunConfig) -> list[tuple[str, str]]:
        """Returns what the job asks for, as labels and texts that a dry run prints."""
        return []

    def environment(self, config: RunConfig) -> dict[str, str]:
        """Returns the environment of the scheduler's program, which passes it on to the job."""
        return dict(os.environ) | trackers.environment(config)

    def submit(self, plan: LaunchPlan) -> int:
        """Submits a run, or shows its script for a dry run."""
        script, config = self.script(plan), plan.config
        if config.launcher.dry_run:
            self.show(script, plan, [("run folder", str(plan.run_dir))])
            return DONE
        self.ask(script, config)
        self.prepare(plan)
        path = self.write_script(plan.run_dir, script)
        said = announce([plan.run_dir], config, self.environment(config))
        try:
            ticket = self.enqueue(path, config)
        except RequestError:
            self.give_up([plan])
            raise
        write_job(plan.run_dir, self.name, ticket)
        say_notes(plan)
        nodes, workers = counted(plan.nodes, "node"), counted(plan.world_size, "worker")
        print(f"ortlaunch: {plan.name} is in the queue as job {ticket.job_id}: {nodes}, {workers}")
        print(f"run folder: {plan.run_dir}")
        say_announced(said, config)
        return DONE

    def submit_many(self, sweep: SweepPlan) -> int:
        """Submits each run of a sweep as a separate job."""
        check_alike([one.config for one in sweep.runs])
        first = sweep.runs[0]
        scripts = [self.script(one) for one in sweep.runs]
        if first.config.launcher.dry_run:
            named = dataclasses.replace(first, name=sweep.name)
            places = [("runs", str(len(sweep.runs))), ("sweep", str(sweep.folder))]
            self.show("\n".join(scripts), named, places)
            return DONE
        for script, one in zip(scripts, sweep.runs, strict=True):
            self.ask(script, one.config)
        made = sweep.create()
        runs = [one.run_dir for one in sweep.runs]
        for one in sweep.runs:
            self.prepare(one)
        made.write(runs, complete=True)
        said = announce([sweep.folder, *runs], first.config, self.environment(first.config))
        tickets: list[Ticket] = []
        for script, one in zip(scripts, sweep.runs, strict=True):
            try:
                tickets.append(self.enqueue(self.write_script(one.run_dir, script), one.config))
            except RequestError:
                self.give_up(sweep.runs[len(tickets) :])
                raise
            write_job(one.run_dir, self.name, tickets[-1])
        jobs = ", ".join(ticket.job_id for ticket in tickets)
        self.say_sweep(sweep, f"{made.name} is in the queue as jobs {jobs}", made.run_id, said)
        return DONE

    def show(self, script: str, plan: LaunchPlan, places: list[tuple[str, str]]) -> None:
        """Prints a script to standard output, so that it can go into a file, and what it asks for to standard error.

        Args:
            script: the script.
            plan: the plan of the run; for a sweep that of its first run, under the sweep's name.
            places: label and place of what would be made.
        """
        print(script, end="", flush=True)
        workers = f"{counted(plan.workers, 'worker')} on {plan.config.device.value}"
        lines = [
            ("job", plan.name),
            ("nodes", f"{plan.nodes}, each with {workers}"),
            *self.request(plan.config),
            *places,
            *([] if plan.backend_reason is None else [("note", plan.backend_reason)]),
            ("to submit", "the same command without launcher.dry_run=true"),
        ]
        print("ortlaunch: a dry run: nothing was written or submitted", file=sys.stderr)
        for label, text in lines:
            print(f"{label + ':':<11} {text}", file=sys.stderr)

    def prepare(self, plan: LaunchPlan) -> None:
        """Claims a run, writes its folder, and journals that it is queued.

        Raises:
            RequestError: another process has the run, or its folder cannot be made or written.
        """
        make_run_folder(plan.run_dir)
        with written(plan):
            claim.take(plan.files)
            write_run_folder(plan, Start([self.submit_command, str(self.script_file(plan.run_dir))]))
            with Journal(plan.journal) as journal:
                journal_start(journal, plan)
                journal.tags({"ortlaunch.state": "queued"})

    def script_file(self, folder: Path) -> Path:
        """Returns the path of the submitted script in a run's or a sweep's folder."""
        return Run(folder).script_file(self.name)

    def write_script(self, folder: Path, script: str) -> Path:
        """Writes the script to be submitted into a folder; returns its path."""
        path = self.script_file(folder)
        replace(path, script.encode(), 0o755)
        return path

    def give_up(self, runs: list[LaunchPlan]) -> None:
        """Journals the failure of runs whose jobs were refused; the last of them also ends their sweep."""
        over = []
        for run in (one.files for one in runs):
            with run.journal() as journal:
                ending = end_run(run, journal, "FAILED", partial(claim.release, run), is_job=True)
            over += [run.path] if ending.sweep is None else [run.path, ending.sweep]
        announce(over, runs[0].config, self.environment(runs[0].config))

    def say_sweep(self, sweep: SweepPlan, queued: str, short: str, said: str, at_once: str = "") -> None:
        """Tells the user that a sweep is in the queue.

        Args:
            sweep: the sweep.
            queued: text that names the sweep and its jobs.
            short: the id that names the sweep in a command.
            said: the text that `announce` has returned.
            at_once: text with the number of runs that may go on at once; empty without such a limit.
        """
        config = sweep.runs[0].config
        say_notes(sweep.runs[0])
        runs, nodes = counted(len(sweep.runs), "run"), counted(config.launcher.nodes, "node")
        print(f"ortlaunch: {queued}: {runs} of {nodes}{at_once}")
        print(f"sweep:      {sweep.folder}")
        print(f"runs:       ortlaunch jobs --sweep {short}")
        for command in trackers.compare_commands(config, "--sweep", str(sweep.folder)):
            print(f"compare:    {command}")
        say_announced(said, config)

    # These methods run in the job, on its nodes.

    @abstractmethod
    def own_job(self) -> OwnJob:
        """Returns the job that this process runs in."""

    def own_state(self) -> OwnState | None:
        """Returns the scheduler's state of that job; None if it does not answer or does not know the job."""
        return None

    def is_over(self, job_id: str) -> bool | None:
        """Returns whether a job is over; None if the scheduler does not answer or does not know it."""
        job = self.states(0).find(job_id)
        return None if job is None else not job.lives

    def requeue(self, job: OwnJob) -> bool:
        """Asks the scheduler to queue the job again with the same folder and id; returns False if it refuses."""
        return False

    def requeue_limit(self, config: RunConfig) -> int:
        """Returns how often in a row a run may come back from the queue without a new checkpoint."""
        return 3

    def on_each_node(self, config: RunConfig, command: list[str]) -> list[str]:
        """Returns a command that runs the given one on each of the job's nodes; by default on this node only."""
        return command

    def place(self, config: RunConfig) -> NodePlace:
        """Returns this node's place among the job's nodes; by default it is the only one.

        Raises:
            RequestError: the run has several nodes.
        """
        if config.launcher.nodes > 1:
            raise RequestError(
                f"launcher.nodes={config.launcher.nodes}: launcher={self.name} has jobs of one node only"
            )
        job = self.own_job()
        token = f"{job.job_id}-{job.restart}-{os.environ.get('ORTLAUNCH_ATTEMPT', '0')}"
        return NodePlace(rank=0, head="127.0.0.1", port=0, token=token, name="127.0.0.1")

    def variables(self, config: RunConfig) -> dict[str, str]:
        """Returns the variables that the user sets for the workers; they override those of ortlaunch."""
        return {}
