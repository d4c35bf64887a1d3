"""Errors for models that ONNX Runtime would train wrongly, and the line of an error that says what it is."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from ortlaunch.base.errors import RequestError

_NAMED = (LookupError, AttributeError, TypeError, ValueError)
_LONGEST = 500
"""Characters of a cause."""


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


def cause(error: BaseException) -> str:
    """Returns in one line what is the matter, from an error of ORTModule or of its exporter, which quote tracebacks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b(?! raised from)", line)]
    if lines:
        # An error of C++ begins with a file and a signature.
        line = (causes or lines)[-1].partition("  [Caused by the value")[0]
        line = re.sub(r"^\S*onnxruntime_src\S* .*(?:\[ONNXRuntimeError\] : \d+ : \w+ : |\) (?=\S))", "", line)
        # A KeyError, for example, says nothing but the key.
        is_plain = not causes and isinstance(error, _NAMED)
        return f"{type(error).__name__}: {line}"[:_LONGEST] if is_plain else line[:_LONGEST]
    frames = traceback.extract_tb(error.__traceback__)
    place = f" in {frames[-1].name} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return type(error).__name__ + place
