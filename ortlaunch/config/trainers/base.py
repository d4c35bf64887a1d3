"""What a trainer tells the rest of the program about itself. Light: the launcher imports it, so torch is not here."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from omegaconf import MISSING

if TYPE_CHECKING:
    from ortlaunch.config.schema import Config, Device, OptimizerConfig, Precision


@dataclass
class TrainerConfig:
    """How workers share the training."""

    name: str = MISSING
    timeout_seconds: int = 1800
    """Longest wait in a collective before the run fails."""


C = TypeVar("C", bound=TrainerConfig)


@dataclass(frozen=True)
class Variants:
    """The key of a trainer whose value makes trainers of their own: names, tables and comparisons show it."""

    key: str
    """The key, without the group."""
    mark: str
    """Stands before the value in names: z1."""
    values: tuple[int, ...]


class Trainer(Generic[C]):
    """The facts of one trainer. The defaults are those of a trainer whose workers hold the whole model."""

    schema: type[C]
    """Its keys; the default of `name` is what it is called."""
    engine: str
    """``module:name`` of what makes its `Engine`, called with the wrapped model, the configuration, the workers and the
    task."""
    weights_reader: str = "ortlaunch.trainer.checkpoint.torch_state:read_weights"
    """``module:name`` of what reads the whole weights of its checkpoint: called with the checkpoint's engine folder,
    returns tensors in host memory by their plain names."""
    packages: tuple[str, ...] = ()
    """What a worker imports before it meets the others, so that the import is timed as such."""
    variants: Variants | None = None
    has_one_worker: bool = False
    """Whether a run of it has one worker, whatever the machine has."""
    places_model: bool = False
    """Whether its engine brings the model to the device, so that the device need never hold the whole of it."""

    @property
    def name(self) -> str:
        """What stands behind ``trainer=``."""
        return str(self.schema.name)

    def zero_stage(self, cfg: C) -> int:
        """What is sharded over the workers: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too."""
        return 0

    def check(self, config: Config, device: Device) -> None:
        """The rules between its keys and others.

        Args:
            config: the whole configuration; `config.trainer` is an instance of `schema`.
            device: what the workers compute on.

        Raises:
            RequestError: with the key and the way out.
        """

    def refusal(self, backend: str, precision: Precision, variant: int | None) -> str | None:
        """Why it does not go with a backend or a precision and what does; None where it goes.

        Args:
            backend: the backend's name.
            precision: the precision.
            variant: the value of the key that `variants` names; None without one.
        """
        return None

    def checkpoint_kind(self, cfg: C) -> str:
        """How the training state is laid out: a run goes on only from a checkpoint of the same kind."""
        # What the first version wrote; also that of trainers that came later and write the same.
        return "trainer=ddp or trainer=single"

    def same_workers_reason(self, cfg: C, optimizer: OptimizerConfig) -> str | None:
        """Why another number of workers cannot go on from a checkpoint with this optimizer; None where it can."""
        return None

    def variant(self, cfg: C) -> int | None:
        """The value of the key that `variants` names; None without one."""
        return None if self.variants is None else int(getattr(cfg, self.variants.key))

    def run_suffix(self, cfg: C) -> str:
        """The trainer's part of a run's default name: ddp, deepspeed-z1."""
        return self.name if self.variants is None else f"{self.name}-{self.variants.mark}{self.variant(cfg)}"


def loaded(target: str) -> Any:
    """What ``module:name`` names; its module is imported only now."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
