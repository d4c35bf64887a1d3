"""A launcher for a scheduler that is given a script: all of it but what only the scheduler knows.

A further launcher subclasses `BatchLauncher` and says how its scheduler takes a script, what it knows of jobs, and how
a job knows itself. Its script runs ``python -m ortlaunch.launch.queue.job RUN_DIR`` on the job's first node, which
does the rest (`ortlaunch.launch.queue.job`).
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

from ortlaunch.base.errors import RequestError
from ortlaunch.base.exit_codes import DONE
from ortlaunch.config.schema import Config
from ortlaunch.launch.folder import journal_start, write_run_folder
from ortlaunch.launch.launcher import PlannedRun, QueueLauncher, SweepPlan
from ortlaunch.launch.plan import LaunchPlan, Start
from ortlaunch.launch.queue.own import NodePlace, OwnJob, OwnState
from ortlaunch.launch.queue.submission import Ticket, announce, check_alike, say_announced, write_job
from ortlaunch.run.journal import Journal
from ortlaunch.run.run import Run
from ortlaunch.run.sweep import note_end
from ortlaunch.tracking import trackers


class BatchLauncher(QueueLauncher):
    """Submits scripts, and runs what they start."""

    submit_command: ClassVar[str]
    """The scheduler's program that takes a script."""
    starter: ClassVar[str] = "torchrun"
    """What starts the workers, as messages call it."""
    warning: ClassVar[signal.Signals] = signal.SIGUSR2
    """What the scheduler sends to the job before it ends it; not SIGUSR1, which NCCL takes for itself."""

    # What the command does that submits.

    @abstractmethod
    def script(self, plan: LaunchPlan, config: Config) -> str:
        """The text that the scheduler gets for one run."""

    @abstractmethod
    def enqueue(self, path: Path, config: Config) -> Ticket:
        """Puts a script into the queue.

        Raises:
            RequestError: the scheduler does not take it; with its reason in plain words.
        """

    def ask(self, script: str, config: Config) -> None:
        """Asks the scheduler whether it would take a script, before anything is written.

        Raises:
            RequestError: it would not.
        """
        return

    def request(self, config: Config) -> list[tuple[str, str]]:
        """What a dry run says below the script that the job asks for: labels and texts."""
        return []

    def environment(self, config: Config) -> dict[str, str]:
        """The environment that is given to the scheduler's program, and by it to the job."""
        return dict(os.environ) | trackers.environment(config)

    def submit(self, plan: LaunchPlan, config: Config, arguments: list[str]) -> int:
        """Puts a run into the queue, or shows its script."""
        script = self.script(plan, config)
        if config.launcher.dry_run:
            self.show(script, plan, config, [("run folder", str(plan.run_dir))])
            return DONE
        self.ask(script, config)
        self.prepare(PlannedRun(plan, config, arguments))
        path = self.write_script(plan.run_dir, script)
        said = announce([plan.run_dir], config, self.environment(config))
        try:
            ticket = self.enqueue(path, config)
        except RequestError:
            self.give_up([plan.run_dir], config)
            raise
        write_job(plan.run_dir, self.name, ticket)
        nodes = config.launcher.nodes
        print(
            f"ortlaunch: {plan.name} is in the queue as job {ticket.job_id}: {nodes} node(s), {plan.world_size} workers"
        )
        print(f"run folder: {plan.run_dir}")
        say_announced(said, config)
        return DONE

    def submit_many(self, sweep: SweepPlan) -> int:
        """Puts each run of a sweep into the queue as a job of its own."""
        check_alike([one.config for one in sweep.runs])
        first = sweep.runs[0]
        scripts = [self.script(one.plan, one.config) for one in sweep.runs]
        if first.config.launcher.dry_run:
            named = dataclasses.replace(first.plan, name=sweep.name)
            places = [("runs", str(len(sweep.runs))), ("sweep", str(sweep.folder))]
            self.show("\n".join(scripts), named, first.config, places)
            return DONE
        for script, one in zip(scripts, sweep.runs, strict=True):
            self.ask(script, one.config)
        made = sweep.create()
        runs = [one.plan.run_dir for one in sweep.runs]
        for one in sweep.runs:
            self.prepare(one)
        made.write(runs, complete=True)
        said = announce([sweep.folder, *runs], first.config, self.environment(first.config))
        tickets: list[Ticket] = []
        for script, one in zip(scripts, sweep.runs, strict=True):
            try:
                tickets.append(self.enqueue(self.write_script(one.plan.run_dir, script), one.config))
            except RequestError:
                self.give_up(runs[len(tickets) :], one.config)
                raise
            write_job(one.plan.run_dir, self.name, tickets[-1])
        jobs = ", ".join(ticket.job_id for ticket in tickets)
        self.say_sweep(sweep, f"{made.name} is in the queue as jobs {jobs}", made.run_id, said)
        return DONE

    def show(self, script: str, plan: LaunchPlan, config: Config, places: list[tuple[str, str]]) -> None:
        """Prints a script to standard output, so that it can go into a file, and what it asks for to standard error.

        Args:
            script: the script.
            plan: what it runs; of a sweep its first run under the sweep's name.
            config: its configuration.
            places: label and place of what would be made.
        """
        print(script, end="", flush=True)
        workers = f"{plan.workers} worker{'s' if plan.workers > 1 else ''} on {config.device.value}"
        lines = [
            ("job", plan.name),
            ("nodes", f"{config.launcher.nodes}, each with {workers}"),
            *self.request(config),
            *places,
            ("to submit", "the same command without launcher.dry_run=true"),
        ]
        print("ortlaunch: a dry run: nothing was written or submitted", file=sys.stderr)
        for label, text in lines:
            print(f"{label + ':':<11} {text}", file=sys.stderr)

    def prepare(self, run: PlannedRun) -> None:
        """Writes a run's folder, and journals that it waits."""
        script = str(self.script_file(run.plan.run_dir))
        write_run_folder(run.plan, run.config, run.overrides, Start([self.submit_command, script]))
        journal = Journal(run.plan.journal)
        journal_start(journal, run.plan, run.config)
        journal.tags({"ortlaunch.state": "queued"})
        journal.close()

    def script_file(self, folder: Path) -> Path:
        """What was submitted, in a run's or a sweep's folder."""
        return Run(folder).script_file(self.name)

    def write_script(self, folder: Path, script: str) -> Path:
        """Leaves the script in a folder as what was submitted."""
        path = self.script_file(folder)
        path.write_text(script, encoding="utf-8")
        path.chmod(0o755)
        return path

    def give_up(self, runs: list[Path], config: Config) -> None:
        """Journals that runs have failed whose jobs were not taken, and their sweep with the last of them."""
        over = []
        for run_dir in runs:
            journal = Run(run_dir).journal()
            journal.tags({"ortlaunch.state": "failed"})
            journal.end("FAILED")
            journal.close()
            sweep = note_end(run_dir, "FAILED")
            over += [run_dir] if sweep is None else [run_dir, sweep]
        announce(over, config, self.environment(config))

    def say_sweep(self, sweep: SweepPlan, queued: str, short: str, said: str, at_once: str = "") -> None:
        """Tells the user that a sweep is in the queue.

        Args:
            sweep: the sweep.
            queued: as which job.
            short: what names it in a command.
            said: what `announce` has returned.
            at_once: how many of its runs may go on at once, where that is limited.
        """
        config = sweep.runs[0].config
        print(f"ortlaunch: {queued}: {len(sweep.runs)} runs of {config.launcher.nodes} node(s){at_once}")
        print(f"sweep:      {sweep.folder}")
        print(f"runs:       ortlaunch jobs --sweep {short}")
        for command in trackers.compare_commands(config, "--sweep", str(sweep.folder)):
            print(f"compare:    {command}")
        say_announced(said, config)

    # What the job does on its nodes.

    @abstractmethod
    def own_job(self) -> OwnJob:
        """The job that this process runs in."""

    def own_state(self) -> OwnState | None:
        """What the scheduler says of that job; None if it does not answer or does not know it."""
        return None

    def is_over(self, job_id: str) -> bool | None:
        """Whether a job is over; None if the scheduler does not answer or does not know it."""
        job = self.states(0).find(job_id)
        return None if job is None else not job.lives

    def requeue(self, job: OwnJob) -> bool:
        """Asks the scheduler to queue the job again, with its folder and under its id; False if it does not."""
        return False

    def requeue_limit(self, config: Config) -> int:
        """How often in a row a run may come back from the queue without a new checkpoint."""
        return 3

    def on_each_node(self, config: Config, command: list[str]) -> list[str]:
        """The command that runs another one once on each of the job's nodes; the job's own node alone by default."""
        return command

    def place(self, config: Config) -> NodePlace:
        """Where this node stands among the job's; by default it is the only one.

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

    def variables(self, config: Config) -> dict[str, str]:
        """Variables that the user sets for the workers; they come before ours."""
        return {}
