"""Graphs of an ORTModule for batches of other sizes than those of its trace."""

from __future__ import annotations

from typing import Any

import torch

from ortlaunch.ort.module import steps

_MOST = 4
"""Graphs beside the first; each costs an export and a session."""

Sizes = tuple[tuple[int, ...], ...]
"""Of the tensors of a batch, in order."""


class Graphs:
    """The graph of an ORTModule, for training or for evaluation, and further ones for batches of some sizes."""

    def __init__(self, wrapped: torch.nn.Module, *, trains: bool) -> None:
        """
        Args:
            wrapped: the ORTModule; after a fallback at construction it has no graphs.
            trains: whether the graphs are those for training.
        """
        self._factory: Any = getattr(wrapped._torch_module, "_execution_manager", None)
        self._name = "_training_manager" if trains else "_inference_manager"
        self._first: Any = getattr(self._factory, self._name, None)
        self._own: dict[Sizes, Any] = {}

    def use(self, sizes: Sizes) -> None:
        """Has the ORTModule run batches of these sizes from now on."""
        if self._own:
            setattr(self._factory, self._name, self._own.get(sizes, self._first))

    def add(self, sizes: Sizes) -> bool:
        """Gives batches of these sizes a graph of their own, and uses it; the next forward exports it.

        Returns:
            Whether there are not too many.
        """
        if self._first is None or len(self._own) >= _MOST:
            return False
        self._own[sizes] = self._another()
        self.use(sizes)
        return True

    def drop(self, sizes: Sizes) -> None:
        """Takes the graph for these sizes away, and uses the first one."""
        made = self._own.pop(sizes, None)
        if made is not None:
            made._execution_agent = None
            setattr(self._factory, self._name, self._first)

    def close(self) -> None:
        """Ends the sessions of all graphs but the first, which is in use afterwards."""
        for sizes in list(self._own):
            self.drop(sizes)

    def _another(self) -> Any:
        first = self._first
        made = type(first)(first._flattened_module, first._debug_options, first._fallback_manager, first._logger)
        # Its own options would be those of the environment.
        made._runtime_options = first._runtime_options
        made._runtime_inspector.memory_ob._is_enabled = first._runtime_inspector.memory_ob._is_enabled
        made._initialize_graph_transition_manager()
        steps.enable_like(made, first)
        return made
