"""Raises errors for models that ONNX Runtime would train wrongly."""

from __future__ import annotations

from ortlaunch.base.errors import RequestError


def refusal(message: str) -> Exception:
    """Returns the error to raise while ORTModule exports: the user's, or if fallback is allowed, ORTModule's own."""
    from onnxruntime.training import ortmodule
    from onnxruntime.training.ortmodule._fallback import _FallbackPolicy
    from onnxruntime.training.ortmodule._fallback_exceptions import ORTModuleONNXModelException

    if ortmodule.ORTMODULE_FALLBACK_POLICY.is_set(_FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL):
        reason: Exception = ORTModuleONNXModelException(message)
        return reason
    return RequestError(message)
