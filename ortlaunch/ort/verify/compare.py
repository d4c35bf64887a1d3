"""Measures how much two results differ, and defines the tolerances."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ortlaunch.ort.verify.comparison import TensorComparison, TensorDifference
from ortlaunch.ort.verify.nested import NamedTensors

TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Largest relative error by type: about ten times the error of the tested model families on the CPU in fp32."""

CUDA_FP32_TOLERANCE = 1e-2
"""ONNX Runtime multiplies fp32 matrices in TF32 if the GPU supports it; PyTorch does not."""

AS_GOOD = 5.0
"""Factor of PyTorch's own error, both against fp64, up to which an error counts as rounding."""

_PART = 1 << 20
"""Number of elements that are compared at once."""

_FLOOR = 1e-3
"""If a tensor's values are this much smaller than the largest of its group, its error is relative to the group's
largest value. A gradient that is zero except for rounding (the bias of attention keys) has no meaningful error of its
own."""


class Comparing:
    """Compares tensors one after the other, so that they need not be in memory together."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Difference | None, float]] = {}
        self._scales: dict[str, float] = {}
        self._largest = 0.0

    def add(self, name: str, actual: torch.Tensor | None, expected: torch.Tensor, scale: float | None = None) -> None:
        """Compares one tensor.

        Args:
            name: of the tensor.
            actual: ONNX Runtime's; None if it is missing.
            expected: PyTorch's.
            scale: what its error is relative to at least, if it is no tensor of the group.
        """
        difference = None if actual is None else Difference.between(actual, expected)
        if scale is None:
            self._largest = max(self._largest, _scale(expected) if difference is None else difference.scale)
        else:
            self._scales[name] = scale
        self._found[name] = difference, tolerance_of(expected)

    def floor(self, name: str) -> float:
        """Returns what the error of a tensor is relative to at least."""
        return self._scales.get(name, _FLOOR * self._largest)

    def results(self) -> list[TensorDifference]:
        """Returns the error of each tensor, in order."""
        return [
            TensorDifference(name, None if one is None else one.relative(self.floor(name)), tolerance)
            for name, (one, tolerance) in self._found.items()
        ]


def compare(actual: NamedTensors, expected: NamedTensors) -> TensorComparison:
    """Compares tensors by name.

    Args:
        actual: ONNX Runtime's tensors.
        expected: PyTorch's tensors; a name that `actual` lacks counts as different.
    """
    comparing = Comparing()
    for name, tensor in expected.items():
        comparing.add(name, actual.get(name), tensor)
    result = TensorComparison(count=len(expected))
    for one in comparing.results():
        if one.error is None or one.error > one.tolerance:
            result.differing.append(one)
        if one.error is not None and (one.error > result.largest_error or result.largest is None):
            result.largest_error, result.largest, result.tolerance = one.error, one.name, one.tolerance
    for name, tensor in expected.items():
        if name in actual and actual[name].dtype != tensor.dtype:
            result.dtypes[name] = [_dtype_name(tensor), _dtype_name(actual[name])]
    result.differing = worst_first(result.differing)
    return result


def worst_first(differences: list[TensorDifference]) -> list[TensorDifference]:
    """Sorts by the error; those that are not defined come first."""
    return sorted(differences, key=lambda one: -(math.inf if one.error is None else one.error))


def compare_with_exact(actual: NamedTensors, expected: NamedTensors, exact: NamedTensors | None) -> TensorComparison:
    """Compares tensors by name; one that is as near to fp64 as PyTorch's own does not count as different.

    A model may amplify rounding errors (BatchNorm over four rows), so that both results in fp32 are far from the truth.

    Args:
        actual: ONNX Runtime's tensors.
        expected: PyTorch's tensors.
        exact: PyTorch's tensors in fp64; None if the model does not run so.
    """
    result = compare(actual, expected)
    if exact is None or any(name not in exact for name in expected):
        return result
    theirs = errors_from_exact(expected, exact)
    ours = errors_from_exact({name: tensor for name, tensor in actual.items() if name in exact}, exact)
    result.eager_from_exact = max((error for error in theirs.values() if error is not None), default=None)
    result.from_exact = max((error for error in ours.values() if error is not None), default=None)
    result.differing = [
        one for one in result.differing if not is_as_good(ours.get(one.name), theirs[one.name], one.tolerance)
    ]
    return result


def is_as_good(error: float | None, own: float | None, tolerance: float) -> bool:
    """Whether an error against fp64 is rounding, or of the size of PyTorch's own."""
    return error is not None and error <= max(tolerance, AS_GOOD * (own or 0.0))


def errors_from_exact(tensors: NamedTensors, exact: NamedTensors) -> dict[str, float | None]:
    """Returns the relative error of each tensor against PyTorch's in fp64; see `relative_error`."""
    floor = _FLOOR * max((_scale(tensor) for tensor in exact.values()), default=0.0)
    return {name: relative_error(tensor, exact[name], floor) for name, tensor in tensors.items()}


def relative_error(actual: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> float | None:
    """Returns the largest difference over the largest expected value; None if it is not defined."""
    measured = Difference.between(actual, expected)
    return None if measured is None else measured.relative(floor)


@dataclass(frozen=True)
class Difference:
    """How far a tensor is from what is expected; it stands for both where they need not be kept."""

    largest: float
    """The largest absolute difference."""
    scale: float
    """The largest expected magnitude."""
    wide: torch.dtype
    """The type in which they were compared."""

    @classmethod
    def between(cls, actual: torch.Tensor, expected: torch.Tensor) -> Difference | None:
        """Returns the difference of two tensors; None if it is not defined, for example for another shape."""
        if actual.shape != expected.shape:
            return None
        if not expected.is_floating_point():
            return cls(0.0, 0.0, torch.float32) if torch.equal(actual.to(expected.dtype), expected) else None
        wide = torch.float64 if expected.dtype == torch.float64 else torch.float32
        if expected.numel() == 0:
            return cls(0.0, 0.0, wide)
        difference, scale = _difference_and_scale(actual, expected, wide)
        if not math.isfinite(difference + scale):
            a, e = actual.detach().to(wide), expected.detach().to(wide)
            finite = torch.isfinite(e)
            # Infinities must be equal, and a NaN of PyTorch must be a NaN here too.
            if not torch.equal(torch.nan_to_num(a)[~finite], torch.nan_to_num(e)[~finite]) or not bool(
                torch.isfinite(a)[finite].all()
            ):
                return None
            if not bool(finite.any()):
                return cls(0.0, 0.0, wide)
            difference, scale = float((a - e).abs()[finite].max()), float(e.abs()[finite].max())
        return cls(difference, scale, wide)

    def relative(self, floor: float) -> float:
        """Returns the difference relative to the scale, or to `floor` where that is larger."""
        return 0.0 if self.largest == 0.0 else self.largest / max(self.scale, floor, torch.finfo(self.wide).tiny)


def tolerance_of(expected: torch.Tensor) -> float:
    """Returns the largest allowed relative error of a tensor of this type on its device."""
    if expected.dtype == torch.float32 and expected.device.type == "cuda":
        return CUDA_FP32_TOLERANCE
    return TOLERANCE.get(expected.dtype, 0.0)


def _scale(tensor: torch.Tensor) -> float:
    """Returns the largest finite magnitude; 0 of integers."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return 0.0
    return max(float(part.abs().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).max()) for part in _parts(tensor))


def _difference_and_scale(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Returns the largest difference and the largest magnitude of what is expected; NaN where there is one."""
    pairs = [
        (float((a.to(dtype) - e.to(dtype)).abs().max()), float(e.to(dtype).abs().max()))
        for a, e in zip(_parts(actual), _parts(expected), strict=True)
    ]
    if any(math.isnan(value) for pair in pairs for value in pair):
        return math.nan, math.nan
    return max(difference for difference, _ in pairs), max(scale for _, scale in pairs)


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns a tensor in parts, so that a comparison takes little memory beside a large model's gradients."""
    return tensor.detach().flatten().split(_PART)


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
