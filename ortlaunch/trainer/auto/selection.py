"""The backend of a run with ``backend=auto``: chosen by the first worker, known to all, kept in the run folder.

A backend that cannot start is given up: the workers begin again without it. What has been chosen once a step is done
stays when the run is resumed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortlaunch.base.errors import RequestError, WrongGradientsError
from ortlaunch.base.files import replace_text
from ortlaunch.base.reading import read_json
from ortlaunch.config import candidates
from ortlaunch.config.backends import require_ort
from ortlaunch.config.schema import AutoConfig, Config
from ortlaunch.run.journal import Journal
from ortlaunch.run.run import Run
from ortlaunch.trainer.auto import kind
from ortlaunch.trainer.auto.decision import BACKENDS, Choice, Rate, begin
from ortlaunch.trainer.auto.lives import begin_again, life
from ortlaunch.trainer.auto.rates import Rates
from ortlaunch.trainer.checkpoint.resume import steps_at
from ortlaunch.trainer.workers import store_of_attempt

_LOOK_SECONDS = 0.5
"""How often a worker looks whether another one has given the backend up."""
_PART = "/backend"


@dataclass(frozen=True)
class _Failed:
    """A backend that could not start in an earlier life of the workers."""

    backend: str
    reason: str
    is_refusal: bool
    """Whether the backend refused the model. Otherwise something went wrong, which may not happen again."""


class Selection:
    """The choice of one run, on one worker."""

    def __init__(self, config: Config, run_dir: Path, environment: Mapping[str, str]) -> None:
        """Chooses the backend to begin with; all workers call it, before they join each other.

        Args:
            config: the run's configuration, with an `AutoConfig` as its backend.
            run_dir: the run folder.
            environment: the variables that this process was started with.

        Raises:
            RequestError: the run has chosen a backend before that cannot run here.
        """
        self._config = config
        self._run = Run(run_dir)
        self.environment = environment
        self.rank = int(os.environ["RANK"])
        self.store = store_of_attempt(_PART, config.trainer.timeout_seconds)
        self.rates = Rates(
            kind.facts(config, world_size=int(os.environ["WORLD_SIZE"]), threads=int(os.environ["OMP_NUM_THREADS"]))
        )
        self._failed = self._failed_before()
        self.refused = candidates.refused(config) | {one.backend: f"it failed: {one.reason}" for one in self._failed}
        self._is_kept = False
        """Whether an earlier start of the run has chosen."""
        self.choice = self._from_first(lambda: self._first_choice(config))
        self._started = threading.Event()

    @property
    def backend(self) -> str:
        """The backend of this life."""
        return self.choice.backend

    @property
    def is_decided(self) -> bool:
        """Whether no other backend will be tried."""
        return self.choice.is_final

    def known(self) -> dict[str, Rate]:
        """What earlier runs on this machine have measured, by backend."""
        return self.rates.read()

    def told(self, name: str, value: Callable[[], Any]) -> Any:
        """A plain value that the first worker makes, on all workers; all of them call it.

        Args:
            name: is used once in a life.
            value: makes the value; called on the first worker.
        """
        key = f"{name}/{life()}"
        if self.rank == 0:
            self.store.set(key, json.dumps(value()))
        return json.loads(self.store.get(key))

    # At the start.

    def watch_start(self) -> None:
        """Begins again when another worker gives the backend up, also while this one waits in a collective."""
        if self._may_give_up:
            threading.Thread(target=self._look_for_failure, name="backend", daemon=True).start()

    def give_up(self, error: Exception) -> None:
        """Begins again without this backend, if no step is done yet and there is another one; else returns.

        A refusal after the first step is kept for later runs.

        Args:
            error: why this worker cannot go on.
        """
        if self._started.is_set():
            if self.backend != "eager" and isinstance(error, RequestError | WrongGradientsError):
                # This run has begun with it. The next one goes on without it.
                self.rates.note(self.backend, Rate(unfit=in_one_line(error)))
            return
        if not self._may_give_up:
            return
        key = self._key_of_failure(life())
        # The worker that fails first has the reason. Its end closes connections, and the others fail at that.
        if not self.store.check([key]):
            reason = in_one_line(error)
            print(f"backend=auto goes on without {self.backend}: {reason}", flush=True)
            failed = _Failed(self.backend, reason, isinstance(error, RequestError))
            self.store.set(key, json.dumps(dataclasses.asdict(failed)))
        begin_again(self.environment)

    def first_step_done(self, journal: Journal | None) -> None:
        """The backend has started on all workers: from now on its failures are the run's; all workers call it."""
        if self._may_give_up:
            # Another worker may fail at the end of this step. Those that have gone on would not hear of it, and would
            # fail at its end. While they wait, `watch_start` begins again.
            self.store.set(f"started-{self.rank}/{life()}", "1")
            for rank in range(int(os.environ["WORLD_SIZE"])):
                self.store.get(f"started-{rank}/{life()}")
        self._started.set()
        for one in self._failed:
            if one.is_refusal and self.rank == 0:
                self.rates.note(one.backend, Rate(unfit=one.reason))
        if self.is_decided:
            self.settle(self.choice, journal)

    # When it is decided.

    def settle(self, choice: Choice, journal: Journal | None) -> None:
        """Records the choice: in the run folder, at the terminal and in the journal, which holds events back no more.

        Args:
            choice: the final choice.
            journal: the run's journal on the first worker, None on the others.
        """
        is_new = not self.choice.is_final
        self.choice = choice
        if self.rank == 0:
            self.record(choice)
            if is_new:
                print(f"backend=auto stays with {choice.backend}: {choice.reason}", flush=True)
        if journal is not None:
            journal.release()
            reason = f"backend=auto: {choice.reason}"
            journal.tags({"ortlaunch.backend": choice.backend, "ortlaunch.backend_reason": reason})

    def record(self, choice: Choice) -> None:
        """Writes the choice to the run folder, where the next start of the run finds it."""
        replace_text(self._run.backend_file, json.dumps(dataclasses.asdict(choice)) + "\n")

    def change(self, choice: Choice) -> None:
        """Begins again with another backend; all workers call it, and it does not return."""
        if self.rank == 0:
            self.record(choice)
            print(f"backend=auto begins again with {choice.backend}: {choice.reason}", flush=True)
            self.store.set(f"recorded/{life()}", "1")
        self.store.get(f"recorded/{life()}")
        begin_again(self.environment)

    # How the first worker chooses.

    @property
    def _may_give_up(self) -> bool:
        # A run that was resumed keeps what it is made of.
        return self.backend != "eager" and not self._is_kept

    def _first_choice(self, config: Config) -> Choice:
        choice = self._recorded()
        if choice is None:
            # Without a checkpoint of its own, the run goes on from that of another one, or begins.
            left = config.train.steps - steps_at(config.train.resume)
            choice = begin(self.known(), self.refused, left, self.rates.near())
            verb = "takes" if choice.is_final else "begins with"
            print(f"backend=auto {verb} {choice.backend}: {choice.reason}", flush=True)
        return choice

    def _recorded(self) -> Choice | None:
        """The choice of an earlier life or of an earlier start; None if there is none that still holds."""
        choice = _parsed(read_json(self._run.backend_file))
        if choice is None or any(one.backend == choice.backend for one in self._failed):
            return None
        if choice.is_final and life() > 0:
            return choice
        self._is_kept = choice.is_final or bool(self._run.newest_checkpoint())
        if not self._is_kept:
            return None
        if choice.backend == "ort":
            require_ort("backend=ort, which this run has chosen (backend=auto) and keeps,", otherwise="")
        # It may be resumed with another precision or on another device.
        if (why := self.refused.get(choice.backend)) is not None:
            raise RequestError(
                f"{why}, and this run has chosen backend={choice.backend} (backend=auto) and keeps it: resume it with "
                "the train.precision and the device that it had"
            )
        print(f"backend=auto keeps {choice.backend}, which this run has begun with", flush=True)
        return dataclasses.replace(choice, is_final=True)

    def _from_first(self, choose: Callable[[], Choice]) -> Choice:
        def chosen() -> dict[str, Any]:
            return {**dataclasses.asdict(choose()), "is_kept": self._is_kept}

        values = self.told("choice", chosen)
        self._is_kept = values.pop("is_kept")
        choice = Choice(**values)
        if self.rank == 0 and not choice.is_final:
            # Where checkpoints are written before it is decided, a resumed run goes on with this one.
            self.record(choice)
        return choice

    def _failed_before(self) -> list[_Failed]:
        keys = [self._key_of_failure(number) for number in range(life())]
        return [_Failed(**json.loads(self.store.get(key))) for key in keys if self.store.check([key])]

    def _key_of_failure(self, number: int) -> str:
        return f"failed/{number}"

    def _look_for_failure(self) -> None:
        # A connection of its own: the main thread may wait for a value in the other one.
        store = store_of_attempt(_PART, self._config.trainer.timeout_seconds)
        while not self._started.wait(_LOOK_SECONDS):
            if store.check([self._key_of_failure(life())]):
                begin_again(self.environment)


def with_backend(config: Config, name: str) -> Config:
    """The configuration with a backend and its default keys in place of ``auto``."""
    assert isinstance(config.backend, AutoConfig)
    return dataclasses.replace(config, backend=candidates.plain_backend(name))


def _parsed(content: Mapping[str, Any] | None) -> Choice | None:
    if content is None or content.get("backend") not in BACKENDS:
        return None
    reason, is_final = content.get("reason"), content.get("is_final")
    if not isinstance(reason, str) or not isinstance(is_final, bool):
        return None
    return Choice(str(content["backend"]), reason, is_final)


def in_one_line(error: Exception) -> str:
    """The first sentence of an error's first line; what to do about it is done already."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].partition(". ")[0] if lines else type(error).__name__
