"""Keeps ORTModule from counting ignored labels and padding while it traces a model.

Before each export ORTModule hooks every ``CrossEntropyLoss`` of a model, and on a GPU every ``Embedding`` with padding.
Its hooks read a count from the traced batch in Python. That would be a frozen value: a later batch that ignores another
number of labels would stop the run, or cost a comparison, and no export would be kept. The hooks also fail where the
loss is called by keywords. What they are for, a graph without the padding, needs nodes of custom Functions, which
ORTModule has on torch 2.6 at the latest.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Leaves out the hooks in all exports from now on; repeated calls do nothing."""
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager

    for name in ("_add_check_embedding_sparsity_hook", "_add_check_label_sparsity_hook"):
        setattr(GraphTransitionManager, name, staticmethod(_no_hooks))


def _no_hooks(*_arguments: Any) -> list[Any]:
    return []
