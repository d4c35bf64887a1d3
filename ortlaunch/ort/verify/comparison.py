"""What a comparison of named tensors found; without torch, so that reports can be read without it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TensorDifference:
    """One tensor that is not what it should be."""

    name: str
    error: float | None
    """Relative error; None where there is no such number: another shape, integers that differ, one side not finite."""
    tolerance: float


@dataclass
class TensorComparison:
    """A group of tensors against PyTorch's."""

    count: int
    largest_error: float = 0.0
    largest: str | None = None
    """Name of the tensor with the largest error."""
    tolerance: float = 0.0
    """The one that holds for it."""
    differing: list[TensorDifference] = field(default_factory=list)
    dtypes: dict[str, list[str]] = field(default_factory=dict)
    """Names whose dtype changed, with PyTorch's and ONNX Runtime's."""

    @property
    def ok(self) -> bool:
        """Whether all are the same within tolerance, in value and dtype."""
        return not self.differing and not self.dtypes
