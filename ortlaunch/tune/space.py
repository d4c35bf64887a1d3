"""The cells of a configuration: the values of each axis, the configuration of a cell, and its keys."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.prepare import prepared
from ortlaunch.config.bounds import MOST_PROCESSES
from ortlaunch.config.devices import resolve_device, usable_cores
from ortlaunch.config.precisions import BACKENDS
from ortlaunch.config.schema import GROUPS, Allocator, AutoConfig, Config, Device, OptimizerConfig, Precision
from ortlaunch.config.trainers import TRAINERS
from ortlaunch.launch.table import launcher_of
from ortlaunch.launch.torchrun import threads_per_worker
from ortlaunch.tune.cell import Cell, Value
from ortlaunch.tune.pruning import CHECKPOINTING, MICRO, OFF, OFFLOAD, ON
from ortlaunch.tune.words import (
    ALLOCATOR,
    BACKEND,
    OF_EVERY_TRAINER,
    OPTIMIZER,
    PRECISION,
    THREADS,
    TRAINER,
    WORKERS,
    Words,
    trainers_named,
)

AXES = (BACKEND, TRAINER, WORKERS, THREADS, MICRO, CHECKPOINTING, ALLOCATOR)
"""The axes that are searched unless they are held."""
_OF_WORKERS = (THREADS, MICRO)
"""The axes whose values depend on the number of workers."""
FREE = ("batch", PRECISION, OPTIMIZER)
"""What is the same learning unless it is freed."""
_AUTO = AutoConfig().name
_BUCKETS, _KEEP = "ddp-buckets", "fsdp-keep"
_LARGER = 4
"""How much larger the other bucket size of ddp is."""
_BATCH_DOUBLINGS = 6
_STEP_APART = 0.6
"""Micro-batches nearer to each other than this ratio are not both tried."""
_CHECKPOINTING = {"true": ON, "false": OFF}
_STAGES = ("0", "1", "2", "3")
_NUMBERS = {"single": "autocast", "ddp": "autocast", "deepspeed": "weights", "fsdp": "gathered"}
"""What has the run's precision under a trainer, where it is not fp32."""


@dataclass
class Space:
    """All cells around a configuration."""

    asked: Config
    """The configuration as asked, prepared to be launched."""
    words: Words
    free: tuple[str, ...] = ()
    hold: tuple[str, ...] = ()
    cells: list[Cell] = field(default_factory=list)
    """The cells that the rules allow."""
    refused: dict[Cell, str] = field(default_factory=dict)
    """Why the others are not tried."""

    def __post_init__(self) -> None:
        config = self.asked
        if _AUTO in (config.backend.name, *self.words.given.get(BACKEND, [])):
            raise RequestError(
                f"backend={_AUTO}: tune measures the backends itself: name those to search, such as "
                f"backend={','.join(BACKENDS)}"
            )
        self.workers = launcher_of(config).workers_per_node(config)
        self.batch = config.train.batch_size * config.train.grad_accumulation * self.workers
        """Samples of an optimizer step as asked."""
        self.cell = self._cell_of(config)
        """The configuration as asked."""
        self._refusals: dict[Cell, str | None] = {}
        axes = self._axes()
        pairs = [[(axis, value) for value in values] for axis, values in axes.items() if axis not in _OF_WORKERS]
        for values in itertools.product(*pairs):
            workers = int(dict(values)[WORKERS])
            micros = self._micro_batches(workers)
            for micro, threads in itertools.product(micros or [config.train.batch_size], self._threads(workers)):
                found = {**dict(values), MICRO: micro, THREADS: threads}
                cell = Cell(tuple((axis, found[axis]) for axis in axes))
                if micros:
                    self._take(cell)
                else:
                    self.refused[cell] = self._undivided(cell)
        if self.cell not in self.cells:
            # The words hold an axis to other values than the first: what is asked for is the first that works.
            if not self.cells:
                raise RequestError(next(iter(self.refused.values()), "no configuration is left to try"))
            self.cell = self.cells[0]

    def accumulation(self, cell: Cell) -> int:
        """Micro-batches of an optimizer step."""
        if "batch" in self.free:
            return self.asked.train.grad_accumulation
        return self.batch // (int(cell[WORKERS]) * int(cell[MICRO]))

    def global_batch(self, cell: Cell) -> int:
        """Samples of an optimizer step over all workers."""
        return int(cell[WORKERS]) * int(cell[MICRO]) * self.accumulation(cell)

    def configured(self, cell: Cell) -> Config:
        """The run of a cell, prepared to be launched.

        Raises:
            RequestError: a rule refuses it.
        """
        config, axes = self.asked, dict(cell.values)
        train = replace(
            config.train,
            batch_size=int(cell[MICRO]),
            grad_accumulation=self.accumulation(cell),
            activation_checkpointing=cell[CHECKPOINTING] == ON,
            precision=Precision[str(axes.get(PRECISION, config.train.precision.name))],
        )
        return prepared(
            replace(
                config,
                train=train,
                backend=self._backend(str(cell[BACKEND])),
                trainer=self._trainer(str(cell[TRAINER])),
                optimizer=self._optimizer(str(axes.get(OPTIMIZER, config.optimizer.name))),
                launcher=self._launcher(cell),
            )
        )

    def overrides(self, cell: Cell) -> list[str]:
        """The keys of a cell, as they are typed."""
        trainer = self._trainer(str(cell[TRAINER]))
        typed = {key for keys in self.words.given.values() for key in keys}
        found = [f"backend={cell[BACKEND]}", f"trainer={trainer.name}"]
        for key in ("zero_stage", "offload_optimizer", "bucket_cap_mb", "reshard_after_forward"):
            value = getattr(trainer, key, None)
            default = getattr(TRAINERS[trainer.name].schema(), key, None)
            if value is not None and f"trainer.{key}" not in typed and (key == "zero_stage" or value != default):
                found.append(f"trainer.{key}={_text(value)}")
        found += [
            f"launcher.workers_per_node={cell[WORKERS]}",
            f"train.batch_size={cell[MICRO]}",
            f"train.grad_accumulation={self.accumulation(cell)}",
            f"train.activation_checkpointing={_text(cell[CHECKPOINTING] == ON)}",
        ]
        axes, launcher = dict(cell.values), self._launcher(cell)
        if THREADS in axes or THREADS in self.words.given:
            found.append(f"launcher.threads={'null' if launcher.threads is None else launcher.threads}")
        if ALLOCATOR in axes or ALLOCATOR in self.words.given:
            found.append(f"launcher.allocator={launcher.allocator.name}")
        if PRECISION in axes:
            found.append(f"train.precision={axes[PRECISION]}")
        if OPTIMIZER in axes:
            found.append(f"optimizer={axes[OPTIMIZER]}")
            if axes[OPTIMIZER] != self.asked.optimizer.name:
                optimizer = self._optimizer(str(axes[OPTIMIZER]))
                keys = [one.name for one in dataclasses.fields(OptimizerConfig) if one.name not in ("name", "groups")]
                found += [f"optimizer.{key}={_text(getattr(optimizer, key))}" for key in keys]
        return found

    def _undivided(self, cell: Cell) -> str:
        """Why the workers of a cell cannot share the global batch as it is."""
        micro = f" in micro-batches of {cell[MICRO]}" if MICRO in self.hold else ""
        return f"a global batch of {self.batch} cannot be divided among {cell[WORKERS]} workers{micro}"

    def _take(self, cell: Cell) -> None:
        # What is asked for is measured in any case: the others are compared with it.
        reason = None if cell == self.cell else _pointless(cell) or self._other_numbers(cell)
        if reason is None:
            reason = self._refusal(cell)
        if reason is None:
            self.cells.append(cell)
        else:
            self.refused[cell] = reason

    def _other_numbers(self, cell: Cell) -> str | None:
        """Why a trainer's bf16 or fp16 is other learning than that of the trainer as asked (docs/precision.md)."""
        precision, given = self.asked.train.precision, self.words.given
        if precision is Precision.fp32 or PRECISION in self.free or TRAINER in given:
            return None
        asked, other = (_NUMBERS.get(self._trainer(str(one[TRAINER])).name) for one in (self.cell, cell))
        if asked == other:
            return None
        return (
            f"{precision.name} in other tensors than under trainer={self.asked.trainer.name}: another learning; "
            "name the trainers to search, or add --free=precision"
        )

    def _refusal(self, cell: Cell) -> str | None:
        """Why a rule refuses a cell.

        Of micro-batches, rules look only at whether a step has several, and none looks at threads, so that one answer
        holds for many cells.
        """
        alike = cell.having(**{MICRO: min(2, self.accumulation(cell)), THREADS: 1})
        if alike not in self._refusals:
            try:
                self.configured(cell)
            except RequestError as error:
                self._refusals[alike] = str(error)
            else:
                self._refusals[alike] = None
        return self._refusals[alike]

    def _cell_of(self, config: Config) -> Cell:
        values: dict[str, Value] = {
            BACKEND: config.backend.name,
            TRAINER: _label(config),
            WORKERS: self.workers,
            THREADS: threads_per_worker(config, self.workers, usable_cores()),
            MICRO: config.train.batch_size,
            CHECKPOINTING: ON if config.train.activation_checkpointing else OFF,
            ALLOCATOR: config.launcher.allocator.name,
        }
        for axis in (THREADS, ALLOCATOR):
            if not self._is_searched(axis):
                del values[axis]
        if PRECISION in self.free:
            values[PRECISION] = config.train.precision.name
        if OPTIMIZER in self.free:
            values[OPTIMIZER] = config.optimizer.name
        return Cell(tuple(values.items()))

    def _axes(self) -> dict[str, list[Value]]:
        """The values of each axis; those of the micro-batch depend on the workers."""
        config, given, asked = self.asked, self.words.given, dict(self.cell.values)
        for axis, values in given.items():
            held = TRAINER if axis == "zero_stage" else axis
            if held in self.hold and len(values) > 1:
                raise RequestError(
                    f"--hold={held} keeps one value, and {', '.join(values)} are given to search: leave one of both out"
                )
        for axis, option in ((BACKEND, config.backend.name), (TRAINER, config.trainer.name)):
            keys, values = given.get(f"{axis}.key", []), given.get(axis, [])
            if keys and len(values) > 1:
                raise RequestError(
                    f"{keys[0]} is a key of {axis}={option}, and {', '.join(values)} are given to search: leave one of "
                    "both out"
                )
        everything: dict[str, list[Value]] = {
            BACKEND: [*BACKENDS],
            TRAINER: [label for name in TRAINERS for label in self._labels(name)],
            WORKERS: [*self._worker_counts()],
            THREADS: [],
            MICRO: [],
            CHECKPOINTING: [OFF, ON],
            ALLOCATOR: [one.name for one in Allocator],
        }
        for axis in (THREADS, ALLOCATOR):
            if not self._is_searched(axis):
                del everything[axis]
        if PRECISION in self.free:
            on_cuda = resolve_device(config.device) is Device.cuda
            everything[PRECISION] = ["fp32", "bf16", *(["fp16"] if on_cuda else [])]
        if OPTIMIZER in self.free:
            # A class that nobody has named cannot be tried.
            everything[OPTIMIZER] = sorted({*GROUPS["optimizer"]} - {"factory"} | {config.optimizer.name})
        for axis in everything:
            if axis in self.hold or f"{axis}.key" in given:
                everything[axis] = [asked[axis]]
        if f"{TRAINER}.key" in given:
            everything[TRAINER] = [*self._labels(config.trainer.name)] if "zero_stage" in given else [asked[TRAINER]]
        self._restrict(everything)
        # What is asked comes first: the first of the list stands for it if it is not allowed itself.
        return {axis: sorted(values, key=lambda one: one != asked[axis]) for axis, values in everything.items()}

    def _restrict(self, axes: dict[str, list[Value]]) -> None:
        """Keeps the values that the command line gives.

        Raises:
            RequestError: a value is none of the axis.
        """
        given = self.words.given
        if TRAINER in given:
            allowed = [label for name in trainers_named(given[TRAINER]) for label in self._labels(name)]
            axes[TRAINER] = [label for label in axes[TRAINER] if label in allowed]
        if stages := given.get("zero_stage"):
            allowed = [f"zero{stage}" for stage in stages]
            if wrong := [stage for stage in stages if stage not in _STAGES]:
                raise RequestError(f"trainer.zero_stage={wrong[0]}: must be one of 0, 1, 2 and 3")
            axes[TRAINER] = [
                one
                for one in axes[TRAINER]
                if str(one).removesuffix(OFFLOAD) in allowed or not str(one).startswith("zero")
            ]
        for axis, key in (
            *((BACKEND, "backend"), (PRECISION, "train.precision"), (OPTIMIZER, "optimizer")),
            (ALLOCATOR, "launcher.allocator"),
        ):
            if axis in axes and axis in given:
                known = [*BACKENDS, "default"] if axis == BACKEND else axes[axis]
                if wrong := [one for one in given[axis] if one not in known]:
                    raise RequestError(f"{key}={wrong[0]}: must be one of {', '.join(map(str, known))}")
                names = [self.asked.backend.name if one == "default" else one for one in given[axis]]
                axes[axis] = [one for one in axes[axis] if one in names]
        if WORKERS in given:
            counts = _numbers("launcher.workers_per_node", given[WORKERS], self.workers)
            axes[WORKERS] = list(dict.fromkeys(counts))
        if CHECKPOINTING in given:
            key = "train.activation_checkpointing"
            if wrong := [one for one in given[CHECKPOINTING] if one.lower() not in _CHECKPOINTING]:
                raise RequestError(f"{key}={wrong[0]}: must be true or false")
            axes[CHECKPOINTING] = list(dict.fromkeys(_CHECKPOINTING[one.lower()] for one in given[CHECKPOINTING]))

    def _is_searched(self, axis: str) -> bool:
        """Whether an axis that is only of workers on the CPU, unless it is given, has a place in the cells."""
        on_cpu = resolve_device(self.asked.device) is Device.cpu
        return axis not in self.hold and (on_cpu or axis in self.words.given)

    def _labels(self, trainer: str) -> list[Value]:
        """A trainer's values on its axis."""
        variants = TRAINERS[trainer].variants
        if variants is not None:
            is_offloaded = getattr(self.asked.trainer, "offload_optimizer", False)
            plain: list[Value] = [f"zero{value}" for value in variants.values]
            offloaded: list[Value] = [f"{label}{OFFLOAD}" for label in plain[1:]]
            if "trainer.offload_optimizer" in self.words.given.get(f"{TRAINER}.key", []):
                return offloaded if is_offloaded else plain
            # On the CPU the optimizer's state is in the host's memory already.
            return plain + (offloaded if resolve_device(self.asked.device) is Device.cuda else [])
        others = {"ddp": [_BUCKETS], "fsdp": [_KEEP]}.get(trainer, [])
        # With a key of the trainer on the command line, its values are those that are wanted.
        return [trainer, *([] if f"{TRAINER}.key" in self.words.given else others)]

    def _worker_counts(self) -> list[int]:
        if resolve_device(self.asked.device) is Device.cuda:
            return [self.workers]
        cores = usable_cores()
        powers = [2**power for power in range(cores.bit_length()) if 2**power <= cores]
        return sorted({*powers, cores, self.workers})

    def _threads(self, workers: int) -> list[int]:
        """Threads of each of so many workers: all cores, half of them (many cores are two threads of one), and one."""
        share = _share(workers)
        given = self.words.given.get(THREADS)
        counts = [share, -(-share // 2), 1] if given is None else _numbers("launcher.threads", given, share)
        return list(dict.fromkeys(counts)) if self._is_searched(THREADS) else [share]

    def _launcher(self, cell: Cell) -> Any:
        """The launcher's keys of a cell."""
        axes, workers = dict(cell.values), int(cell[WORKERS])
        launcher = replace(self.asked.launcher, workers_per_node=workers)
        if THREADS in axes:
            threads = int(axes[THREADS])
            # Null is the share of the cores where it was asked for so.
            is_null = launcher.threads is None and threads == _share(workers)
            launcher = replace(launcher, threads=None if is_null else threads)
        if ALLOCATOR in axes:
            launcher = replace(launcher, allocator=Allocator[str(axes[ALLOCATOR])])
        return launcher

    def _micro_batches(self, workers: int) -> list[int]:
        """Samples of a micro-batch that keep the global batch: divisors of a worker's share, not too close."""
        asked = self.asked.train.batch_size
        if MICRO in self.hold:
            return [asked] if "batch" in self.free or self.batch % (workers * asked) == 0 else []
        if "batch" in self.free:
            doubled = [asked * 2**power for power in range(_BATCH_DOUBLINGS + 1)]
            halved = [asked // 2**power for power in range(1, asked.bit_length()) if asked % 2**power == 0]
            return doubled + halved
        if self.batch % workers:
            return []
        found: list[int] = []
        for one in _divisors(self.batch // workers):
            if one == asked or not found or one <= _STEP_APART * found[-1]:
                found.append(one)
        return found

    def _backend(self, name: str) -> Any:
        return self.asked.backend if name == self.asked.backend.name else GROUPS["backend"][name]()

    def _trainer(self, label: str) -> Any:
        name = "deepspeed" if label.startswith("zero") else label.partition("-")[0]
        trainer: Any = self.asked.trainer
        if trainer.name != name:
            trainer = TRAINERS[name].schema(**{key: getattr(trainer, key) for key in OF_EVERY_TRAINER})
        if label.startswith("zero"):
            stage, offloaded = label.removeprefix("zero").removesuffix(OFFLOAD), label.endswith(OFFLOAD)
            return replace(trainer, zero_stage=int(stage), offload_optimizer=offloaded)
        if label == _BUCKETS:
            return replace(trainer, bucket_cap_mb=_LARGER * trainer.bucket_cap_mb)
        if label == _KEEP:
            return replace(trainer, reshard_after_forward=False)
        return trainer

    def _optimizer(self, name: str) -> Any:
        asked = self.asked.optimizer
        if name == asked.name:
            return asked
        shared = {one.name: getattr(asked, one.name) for one in dataclasses.fields(OptimizerConfig)}
        return GROUPS["optimizer"][name](**(shared | {"name": name}))


def _share(workers: int) -> int:
    """The cores of each of so many workers."""
    return max(1, usable_cores() // workers)


def _label(config: Config) -> str:
    stage = getattr(config.trainer, "zero_stage", None)
    offloaded = OFFLOAD if getattr(config.trainer, "offload_optimizer", False) else ""
    return config.trainer.name if stage is None else f"zero{stage}{offloaded}"


def _pointless(cell: Cell) -> str | None:
    """Why a cell cannot be faster than another one, whatever the machine."""
    trainer, workers = str(cell[TRAINER]), int(cell[WORKERS])
    if trainer == "single":
        return "trainer=single has one worker" if workers > 1 else None
    if workers > 1:
        return None
    if trainer.startswith(("ddp", "fsdp")):
        return "one worker exchanges nothing: trainer=single does the same with less work"
    if trainer in ("zero1", "zero2", "zero3"):
        return "one worker shards nothing: zero_stage=0 does the same with less work"
    return None


def _divisors(number: int) -> list[int]:
    """The divisors of a number, the largest first."""
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)}, reverse=True)


def _numbers(key: str, texts: Sequence[str], default: int) -> list[int]:
    found = []
    for text in texts:
        if text == "null":
            found.append(default)
        elif not text.isdecimal() or not 1 <= int(text[:9]) <= MOST_PROCESSES:
            raise RequestError(f"{key}={text}: must be a number, at least 1 and at most {MOST_PROCESSES}")
        else:
            found.append(int(text[:9]))
    return found


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
