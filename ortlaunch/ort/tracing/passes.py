"""A pass of our own over each graph that torch's exporter makes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ortlaunch.ort.refusal import refusal


class CannotExportError(Exception):
    """A graph cannot be exported rightly; the text is the user's message."""


@contextlib.contextmanager
def over_graphs(process: Callable[[Any], None]) -> Iterator[None]:
    """Runs `process` on each graph that is exported meanwhile.

    Args:
        process: changes a graph in place, or raises CannotExportError.

    Raises:
        RequestError: `process` has raised CannotExportError; ORTModule's own error if fallback is allowed.
    """
    # Of the exporter's passes this is the first one after it has taken up the forwards of autograd's Functions.
    original = torch._C._jit_pass_lower_all_tuples
    said: list[str] = []

    def run(graph: Any) -> None:
        original(graph)
        try:
            process(graph)
        except CannotExportError as error:
            said.append(str(error))
            raise

    torch._C._jit_pass_lower_all_tuples = run
    try:
        yield
    except Exception as error:
        # ORTModule quotes it in an error of its own.
        if said:
            raise refusal(said[0]) from error
        raise
    finally:
        torch._C._jit_pass_lower_all_tuples = original
