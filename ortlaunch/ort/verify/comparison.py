"""The result of a comparison of named tensors; it needs no torch, so that reports can be read without it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TensorDifference:
    """One tensor that differs."""

    name: str
    error: float | None
    """Relative error; None if it is not defined: another shape, different integers, or a value that is not finite."""
    tolerance: float


@dataclass
class TensorComparison:
    """The comparison of a group of tensors with PyTorch's."""

    count: int
    largest_error: float = 0.0
    largest: str | None = None
    """Name of the tensor with the largest error."""
    tolerance: float = 0.0
    """The tolerance of that tensor."""
    differing: list[TensorDifference] = field(default_factory=list)
    from_exact: float | None = None
    """Largest relative error of ONNX Runtime's tensors from PyTorch's in fp64; None if there are none to compare."""
    eager_from_exact: float | None = None
    """That of PyTorch's own tensors."""
    dtypes: dict[str, list[str]] = field(default_factory=dict)
    """Names whose type differs, with PyTorch's and ONNX Runtime's."""

    @property
    def ok(self) -> bool:
        """Whether all tensors agree within the tolerance, and in type."""
        return not self.differing and not self.dtypes
