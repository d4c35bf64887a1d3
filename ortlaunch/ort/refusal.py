"""Errors for models that ONNX Runtime would train wrongly, and the line of an error that says what it is."""

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


def last_line(text: str) -> str:
    """Returns the last line that is not empty; of a traceback, that is the exception."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
