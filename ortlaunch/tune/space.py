"""The cells around a configuration: a value for each axis, which is a key or a group of options."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ortlaunch.base.errors import RequestError
from ortlaunch.base.secrets import without_secrets_in_words
from ortlaunch.compose.hydra_tree import run_with_hydra
from ortlaunch.compose.overrides import parsed
from ortlaunch.compose.prepare import prepared
from ortlaunch.config.bounds import check_numbers
from ortlaunch.config.devices import resolve_device, usable_cores
from ortlaunch.config.effects import same_numbers, same_work
from ortlaunch.config.load import to_config
from ortlaunch.config.precisions import BACKENDS
from ortlaunch.config.schema import AutoConfig, Config, Device, LocalConfig, Precision
from ortlaunch.config.trainers import TRAINERS
from ortlaunch.launch.table import launcher_of

if TYPE_CHECKING:
    from omegaconf import DictConfig

Value = str | int

BACKEND, TRAINER = "backend", "trainer"
WORKERS, MICRO = "launcher.workers_per_node", "train.batch_size"
CHECKPOINTING = "train.activation_checkpointing"
AXES = (BACKEND, TRAINER, WORKERS, MICRO, CHECKPOINTING)
"""The axes that are searched unless they are held."""
OFF, ON = "false", "true"
_ACCUMULATION, _PRECISION = "train.grad_accumulation", "train.precision"
_OF_SPEED = ("backend.", "trainer.", "launcher.")
"""The beginnings of keys that say how a step is computed, and not what is learned."""
_NO_AXES = ("launcher", "tracking", "device", "model", "data", "train.steps", _ACCUMULATION)
"""What is trained and where is one question for all cells."""
_AUTO = AutoConfig().name
_MOST_VALUES = 64
_STEP_APART = 0.6
"""Micro-batches nearer to each other than this ratio are not both tried."""
_NUMBERS = {"single": "autocast", "ddp": "autocast", "deepspeed": "weights", "fsdp": "gathered"}
"""What has the run's precision under a trainer, where it is not fp32."""
_STAGE = "trainer.zero_stage"
"""A key whose values are part of the trainer's name on its axis."""
_TRAINERS: dict[str, tuple[str, ...]] = {
    name if variants is None else f"{name}-{variants.mark}{value}": (
        (f"trainer={name}",) if variants is None else (f"trainer={name}", f"trainer.{variants.key}={value}")
    )
    for name, variants in ((one.name, one.variants) for one in TRAINERS.values())
    for value in (("",) if variants is None else variants.values)
}
"""The values of the trainer's axis, and the words of each."""


@dataclass(frozen=True)
class Cell:
    """One combination of the space: a value on each axis."""

    values: tuple[tuple[str, Value], ...]
    """The axes and the values, in the order of the axes."""

    @classmethod
    def of(cls, values: dict[str, Value]) -> Cell:
        """A cell with these values, axis by axis."""
        return cls(tuple(values.items()))

    def __getitem__(self, axis: str) -> Value:
        return dict(self.values)[axis]

    def having(self, axis: str, value: Value) -> Cell:
        """The cell with another value on an axis."""
        return Cell(tuple((one, value if one == axis else before) for one, before in self.values))

    def __str__(self) -> str:
        return " ".join(f"{axis}={value}" for axis, value in self.values)


class Space:
    """All cells around the configuration that some words ask for."""

    def __init__(self, words: Sequence[str], free: Sequence[str] = (), hold: Sequence[str] = ()) -> None:
        """
        Args:
            words: the command line without the verb's own options.
            free: keys whose values may change what is learned.
            hold: axes that keep the value as asked.

        Raises:
            RequestError: the words do not compose, an axis is none, or the rules allow no cell.
        """
        self.free = tuple(free)
        self._kept, self._given = _taken_apart(words)
        """The words that say nothing about an axis, and the values of those that do."""
        self._composed: dict[tuple[str, ...], Config | RequestError] = {}
        _check_names(free, hold, self._given)
        self._as_given = self._with()
        """The configuration of the first given values, which need not be allowed."""
        for key, values in self._given.items():
            _check_list(key, values, free)
        _check(self._as_given)
        train, self._workers = self._as_given.train, _workers(self._as_given)
        self.batch = train.batch_size * train.grad_accumulation * self._workers
        """Samples of an optimizer step as asked."""
        self.cells: list[Cell] = []
        """The cells that the rules allow; the first one is the configuration as asked."""
        self.refused: dict[Cell, str] = {}
        """Why the others are not tried."""
        axes = self._axes(hold)
        for values in itertools.product(*axes.values()):
            others = dict(zip(axes, values, strict=True))
            micro_batches = self._micro_batches(int(others[WORKERS]), is_held=MICRO in hold)
            for micro in micro_batches or [train.batch_size]:
                cell = Cell.of({axis: micro if axis == MICRO else others[axis] for axis in (*AXES, *self._listed)})
                reason = self._refusal(cell) if micro_batches else self._undivided(cell, is_held=MICRO in hold)
                if reason is None:
                    self.cells.append(cell)
                else:
                    self.refused[cell] = reason
        if not self.cells:
            raise RequestError(next(iter(self.refused.values())))
        self.asked = self.configured(self.cell)
        """The configuration as asked, prepared to be launched."""

    @property
    def cell(self) -> Cell:
        """The configuration as asked: the first combination of the given values that the rules allow."""
        return self.cells[0]

    @property
    def _listed(self) -> list[str]:
        """The axes beside the usual ones."""
        return [key for key in self._given if key not in (*AXES, _ACCUMULATION, _STAGE)]

    def accumulation(self, cell: Cell) -> int:
        """Micro-batches of an optimizer step."""
        if MICRO in self.free:
            return self._as_given.train.grad_accumulation
        return self.batch // (int(cell[WORKERS]) * int(cell[MICRO]))

    def global_batch(self, cell: Cell) -> int:
        """Samples of an optimizer step over all workers."""
        return int(cell[WORKERS]) * int(cell[MICRO]) * self.accumulation(cell)

    def configured(self, cell: Cell) -> Config:
        """The run of a cell, prepared to be launched.

        Raises:
            RequestError: a rule refuses it.
        """
        config = self._of(self._options(cell))
        train = replace(
            config.train,
            batch_size=int(cell[MICRO]),
            grad_accumulation=self.accumulation(cell),
            activation_checkpointing=cell[CHECKPOINTING] == ON,
        )
        launcher = replace(config.launcher, workers_per_node=int(cell[WORKERS]))
        return prepared(replace(config, train=train, launcher=launcher))

    def overrides(self, cell: Cell) -> list[str]:
        """The keys of a cell, as they are typed."""
        numbers = [(WORKERS, cell[WORKERS]), (MICRO, cell[MICRO]), (_ACCUMULATION, self.accumulation(cell))]
        return [
            *self._options(cell),
            *(f"{key}={value}" for key, value in [*numbers, (CHECKPOINTING, cell[CHECKPOINTING])]),
        ]

    def command(self, cell: Cell) -> str:
        """The command that runs a cell."""
        return shlex.join(["ortlaunch", *without_secrets_in_words(self._kept), *self.overrides(cell)])

    def _options(self, cell: Cell) -> tuple[str, ...]:
        """The words of a cell that are composed: options of groups, and values of the keys that were listed."""
        listed = [f"{axis}={cell[axis]}" for axis in self._listed]
        return (f"{BACKEND}={cell[BACKEND]}", *_TRAINERS[str(cell[TRAINER])], *listed)

    def _of(self, words: tuple[str, ...]) -> Config:
        """The configuration of these words beside those that say nothing about an axis.

        Raises:
            RequestError: they do not compose.
        """
        if words not in self._composed:
            trees: list[DictConfig] = []
            try:
                run_with_hydra([*self._kept, *words], trees.append)
                self._composed[words] = to_config(trees[0])
            except RequestError as error:
                self._composed[words] = error
        found = self._composed[words]
        if isinstance(found, RequestError):
            raise found
        return found

    def _with(self, key: str = "", value: str = "") -> Config:
        """The configuration of the first given values, with another value of one key."""
        first = {one: values[0] for one, values in self._given.items() if one != _STAGE} | ({key: value} if key else {})
        return self._of(tuple(f"{one}={text}" for one, text in first.items()))

    def _axes(self, hold: Sequence[str]) -> dict[str, list[Value]]:
        """The values of each axis, the one as asked first; without the micro-batch where it depends on the workers.

        Raises:
            RequestError: a value is none of its key.
        """
        asked, given = self._as_given, self._given
        # A value that somebody has typed is not left out without a word.
        found = {key: [self._with(key, value) for value in values] for key, values in given.items() if key != _STAGE}
        for config in itertools.chain(*found.values()):
            check_numbers(config)
        if _AUTO in (one.backend.name for one in found.get(BACKEND, [asked])):
            raise RequestError(
                f"backend={_AUTO}: tune measures the backends itself: name those to search, such as "
                f"backend={','.join(BACKENDS)}"
            )
        label, checkpointing = self._label(), _text(asked.train.activation_checkpointing)
        workers = [_workers(one) for one in found.get(WORKERS, [])]
        axes: dict[str, list[Value]] = {
            # It changes last: the global batch is that of the first number of workers.
            WORKERS: [*(workers or [self._workers, *self._counts()])],
            BACKEND: [one.backend.name for one in found.get(BACKEND, [])] or [asked.backend.name, *BACKENDS],
            TRAINER: [label, *self._labels()],
            CHECKPOINTING: [_text(one.train.activation_checkpointing) for one in found.get(CHECKPOINTING, [])]
            or [checkpointing, OFF, ON],
            **{key: [*given[key]] for key in self._listed},
        }
        return {axis: [*dict.fromkeys(values[:1] if axis in hold else values)] for axis, values in axes.items()}

    def _labels(self) -> list[str]:
        """The values of the trainer's axis.

        Raises:
            RequestError: a stage is none.
        """
        names, stages = self._given.get(TRAINER), self._given.get(_STAGE)
        of_stages = {label: words[1].partition("=")[2] for label, words in _TRAINERS.items() if words[1:]}
        if wrong := [one for one in stages or [] if one not in of_stages.values()]:
            raise RequestError(f"{_STAGE}={wrong[0]}: must be one of {', '.join(of_stages.values())}")
        return [
            label
            for label, words in _TRAINERS.items()
            if (names is None or words[0].partition("=")[2] in names)
            # Without a trainer, a stage says which one is meant.
            and (stages is None or of_stages.get(label) in ([None, *stages] if names else stages))
        ]

    def _label(self) -> str:
        """The trainer as asked."""
        trainer = self._as_given.trainer
        stage = self._given.get(_STAGE, [getattr(trainer, _STAGE.partition(".")[2], None)])[0]
        words = {(f"{TRAINER}={trainer.name}",), (f"{TRAINER}={trainer.name}", f"{_STAGE}={stage}")}
        return next((one for one in self._labels() if _TRAINERS[one] in words), self._labels()[0])

    def _counts(self) -> list[int]:
        """Numbers of workers: on GPUs as asked, one for each."""
        if resolve_device(self._as_given.device) is Device.cuda:
            return []
        cores = usable_cores()
        return [*(2**power for power in range(cores.bit_length()) if 2**power <= cores), cores]

    def _micro_batches(self, workers: int, *, is_held: bool) -> list[int]:
        """Samples of a micro-batch that keep the global batch: divisors of a worker's share, not too close."""
        asked = self._as_given.train.batch_size
        if MICRO in self.free:
            return [self._with(MICRO, value).train.batch_size for value in self._given[MICRO]]
        if is_held:
            return [asked] if self.batch % (workers * asked) == 0 else []
        if self.batch % workers:
            return []
        found: list[int] = []
        for one in _divisors(self.batch // workers):
            if one == asked or not found or one <= _STEP_APART * found[-1]:
                found.append(one)
        return sorted(found, key=lambda one: one != asked)

    def _undivided(self, cell: Cell, *, is_held: bool) -> str:
        """Why the workers of a cell cannot share the global batch as it is."""
        micro = f" in micro-batches of {cell[MICRO]}" if is_held else ""
        return f"a global batch of {self.batch} cannot be divided among {cell[WORKERS]} workers{micro}"

    def _refusal(self, cell: Cell) -> str | None:
        """Why a cell is not tried; None if it may be."""
        # What is asked for is measured in any case: the others are compared with it.
        is_asked = not self.cells and not self.refused
        if not is_asked and (reason := _pointless(cell) or self._other_numbers(cell)):
            return reason
        try:
            self.configured(cell)
        except RequestError as error:
            return str(error)
        return None

    def _other_numbers(self, cell: Cell) -> str | None:
        """Why a trainer's bf16 or fp16 is other learning than that of the trainer as asked (docs/precision.md)."""
        precision, asked = self._as_given.train.precision, self._as_given.trainer.name
        if precision is Precision.fp32 or _PRECISION in self.free or TRAINER in self._given:
            return None
        if _NUMBERS.get(asked) == _NUMBERS.get(_name(cell)):
            return None
        return (
            f"{precision.name} in other tensors than under trainer={asked}: another learning; "
            f"name the trainers to search, or add --free={_PRECISION}"
        )


def _taken_apart(words: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The words that say nothing about an axis, and the values of the others by their keys.

    Raises:
        RequestError: a list does not name its values.
    """
    from hydra.core.override_parser.types import Glob

    kept: list[str] = []
    given: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("-") or "=" not in word:
            kept.append(word)
            continue
        override = parsed(word)
        key, values = override.key_or_group, [word.partition("=")[2]]
        if override.is_sweep_override():
            if not override.is_discrete_sweep() or isinstance(override.value(), Glob):
                raise RequestError(f"{word}: give the values one by one, with commas between them")
            values = [str(one) for one in itertools.islice(override.sweep_string_iterator(), _MOST_VALUES + 1)]
            if len(values) > _MOST_VALUES:
                raise RequestError(f"{word[:60]}: more than {_MOST_VALUES} values")
        if len(values) > 1 or key in (*AXES, _ACCUMULATION, _STAGE):
            given[key] = [value.strip("'\" ") for value in values]
        else:
            kept.append(word)
    return kept, given


def _check_list(key: str, values: list[str], free: Sequence[str]) -> None:
    """Refuses several values of a key that has no axis, or that is not freed and changes what is learned."""
    if len(values) < 2:
        return
    word = f"{key}={','.join(values)}"
    if key in _NO_AXES or (same_work(key) and not key.startswith(_OF_SPEED)):
        raise RequestError(f"{word}: tune searches no values of {key}: give one (ortlaunch bench runs any grid)")
    if key in (*free, BACKEND, TRAINER, WORKERS, CHECKPOINTING) or key.startswith(_OF_SPEED) or same_numbers(key):
        return
    what = "the global batch, of which the micro-batch is searched" if key == MICRO else "what is learned"
    raise RequestError(f"{word}: other values change {what}: give one, or add --free={key}")


def _check_names(free: Sequence[str], hold: Sequence[str], given: dict[str, list[str]]) -> None:
    """Refuses options that name no axis, or one that they cannot mean."""
    if wrong := [key for key in free if len(given.get(key, [])) < 2]:
        raise RequestError(f"--free={wrong[0]}: give the values that are searched, such as {wrong[0]}=A,B")
    axes = [*AXES, *(key for key in given if key not in (*AXES, _ACCUMULATION, _STAGE))]
    if wrong := [axis for axis in hold if axis not in axes]:
        raise RequestError(f"--hold={wrong[0]}: there is no such axis (there are {', '.join(axes)})")
    for axis in hold:
        values = given.get(_STAGE, []) if axis == TRAINER and _STAGE in given else given.get(axis, [])
        if len(values) > 1:
            raise RequestError(
                f"--hold={axis} keeps one value, and {', '.join(values)} are given to search: leave one of both out"
            )


def _check(config: Config) -> None:
    """Refuses what cannot be tuned.

    Raises:
        RequestError: the message names the key and the remedy.
    """
    launcher = config.launcher
    if not isinstance(launcher, LocalConfig) or launcher.nodes > 1:
        given = f"launcher.nodes={launcher.nodes}" if launcher.nodes > 1 else f"launcher={launcher.name}"
        raise RequestError(
            f"{given}: tune measures on this machine alone: run it on one of the nodes with launcher=local, and give "
            "what it finds to the run on the cluster"
        )
    if config.train.resume not in ("auto", "never"):
        raise RequestError(f"train.resume={config.train.resume}: trials begin anew: leave it out")


def _pointless(cell: Cell) -> str | None:
    """Why a cell cannot be faster than another one, whatever the machine."""
    name, stage = _name(cell), _TRAINERS[str(cell[TRAINER])][1:]
    if int(cell[WORKERS]) > 1 or name == "single":
        return None
    if not stage:
        return "one worker exchanges nothing: trainer=single does the same with less work"
    return None if stage == (f"{_STAGE}=0",) else f"one worker shards nothing: {_STAGE}=0 does the same with less work"


def _name(cell: Cell) -> str:
    """The trainer's name."""
    return _TRAINERS[str(cell[TRAINER])][0].partition("=")[2]


def _workers(config: Config) -> int:
    """The workers that are asked for, also where a rule refuses them."""
    return config.launcher.workers_per_node or launcher_of(config).workers_per_node(config)


def _divisors(number: int) -> list[int]:
    """The divisors of a number, the largest first."""
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)}, reverse=True)


def _text(value: bool) -> str:
    return ON if value else OFF
