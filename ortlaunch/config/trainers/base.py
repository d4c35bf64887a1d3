"""The facts of a trainer that the rest of the program needs. The launcher imports them, so torch is not imported."""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from omegaconf import MISSING

from ortlaunch.base.limits import MOST_SECONDS
from ortlaunch.base.modules import hidden
from ortlaunch.config.bounds import number
from ortlaunch.config.nodes import Node

if TYPE_CHECKING:
    from ortlaunch.config.schema import Config, Device, OptimizerConfig, Precision


@dataclass(eq=False, repr=False)
class TrainerConfig(Node):
    """How workers share the training."""

    name: str = MISSING
    timeout_seconds: int = number(1800, least=1, most=MOST_SECONDS)
    """Longest time without progress of a worker, and longest wait in a collective, before the run fails. It counts
    until the first step is done; after that `launcher.timeout_seconds` counts."""


C = TypeVar("C", bound=TrainerConfig)


@dataclass(frozen=True, eq=False, repr=False)
class Weights(Node):
    """A model as it was built, and what its optimizer holds for the whole of it, in bytes."""

    buffers: int
    parameters: int
    trained: int
    """The parameters that are trained, which are in fp32."""
    optimizer: int
    low_share: float
    """The size of a number in ``train.precision`` over one in fp32."""

    @property
    def built(self) -> int:
        """The plain model."""
        return self.parameters + self.buffers


@dataclass(frozen=True, eq=False, repr=False)
class Variants(Node):
    """A key of a trainer whose values count as trainers of their own in names, tables and comparisons."""

    key: str
    """The key, without the group."""
    mark: str
    """The letters before the value in names: the z of z1."""
    values: tuple[int, ...]


class Trainer(Generic[C]):
    """The facts of one trainer. The defaults suit a trainer whose workers hold the whole model."""

    schema: type[C]
    """The dataclass of the trainer's keys. The default of `name` is the trainer's name."""
    engine: str
    """``module:name`` of the callable that makes the trainer's `Engine`. Its arguments are the wrapped model, the
    configuration, the workers and the task."""
    weights_reader: str = "ortlaunch.trainer.checkpoint.torch_state:read_weights"
    """``module:name`` of the function that reads the whole weights from the trainer's checkpoint. It gets the
    checkpoint's engine folder and returns tensors in host memory by their plain names."""
    packages: tuple[str, ...] = ()
    """The packages that a worker imports before it connects to the others, so that their import is timed apart."""
    unneeded: tuple[str, ...] = ()
    """Optional packages that `packages` would import, which takes time, and of which a worker uses nothing."""
    variants: Variants | None = None
    keeps_precision: bool = False
    """Whether the training state has another layout, or another meaning, in each precision."""
    has_one_worker: bool = False
    """Whether a run with this trainer always has one worker."""
    places_model: bool = False
    """Whether the engine moves the model to the device, so that the device need never hold the whole model."""

    @property
    def name(self) -> str:
        """The trainer's name, as ``trainer=NAME`` takes it."""
        return str(self.schema.name)

    def import_packages(self) -> None:
        """Imports `packages`, without the packages in `unneeded` that this process has not imported already."""
        with ExitStack() as stack:
            for package in self.unneeded:
                stack.enter_context(hidden(package))
            for package in self.packages:
                importlib.import_module(package)

    def zero_stage(self, cfg: C) -> int:
        """What is sharded over the workers: 0 nothing, 1 the optimizer state, 2 also gradients, 3 also parameters."""
        return 0

    def check(self, config: Config, device: Device) -> None:
        """Checks the trainer's keys, alone and together with other keys.

        Args:
            config: the whole configuration; `config.trainer` is an instance of `schema`.
            device: the device that the workers compute on.

        Raises:
            RequestError: keys do not fit together. The message names the key and the remedy.
        """

    def refusal(self, backend: str, precision: Precision, variant: int | None) -> str | None:
        """Why the trainer does not work with a backend or a precision, and what to use; None if it works.

        Args:
            backend: the backend's name.
            precision: the precision.
            variant: the value of the key that `variants` names; None for a trainer without variants.
        """
        return None

    def checkpoint_kind(self, cfg: C) -> str:
        """The layout of the training state. A run resumes only from a checkpoint of the same kind."""
        # The first version wrote this text. Later trainers with the same layout use it too.
        return "trainer=ddp or trainer=single"

    def without_offload(self, cfg: C) -> C:
        """The keys of the same training whose optimizer's state stays on the GPU."""
        return cfg

    def state_bytes(self, cfg: C, weights: Weights, workers: int) -> int:
        """The least that a worker's device holds of weights, gradients and optimizer state when a step is taken.

        Args:
            cfg: the trainer's keys.
            weights: the model, which is the same on every worker.
            workers: all workers of the run.
        """
        return weights.built + weights.trained + weights.optimizer

    def same_workers_reason(self, cfg: C, optimizer: OptimizerConfig) -> str | None:
        """Why another number of workers cannot resume from a checkpoint with this optimizer; None if it can."""
        return None

    def variant(self, cfg: C) -> int | None:
        """The value of the key that `variants` names; None for a trainer without variants."""
        return None if self.variants is None else int(getattr(cfg, self.variants.key))

    def run_suffix(self, cfg: C) -> str:
        """The trainer's part of a run's default name: ddp, deepspeed-z1."""
        return self.name if self.variants is None else f"{self.name}-{self.variants.mark}{self.variant(cfg)}"


def loaded(target: str) -> Any:
    """Imports the module of ``module:name`` and returns the object of that name."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
