"""Lets a probe hold what gloo holds for an exchange between workers. In a probe, what is exchanged goes nowhere.

gloo gathers into a copy, which one of its two threads makes and frees again. The thread's part of the heap keeps the
memory, so that each thread comes to keep as much as the largest gathering takes, and more by holes.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from ortlaunch.base.attributes import replaced

_THREADS = 2
_GATHERING = ("allgather", "gather", "_allgather_base", "allgather_into_tensor_coalesced")
"""Methods of a process group whose results are gathered in a copy."""
_SCATTERING = ("_reduce_scatter_base", "reduce_scatter_tensor_coalesced")
"""Methods whose arguments are reduced in a copy, which the calling thread makes."""
_GATHERING_SINCE_2_13 = ("all_gather_single", "all_gather_single_coalesced")
_SCATTERING_SINCE_2_13 = ("reduce_scatter_single", "reduce_scatter_single_coalesced")
"""The same methods by the names of torch 2.13."""


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Within it, an exchange takes the memory that gloo takes for it, in threads like gloo's."""
    chance = random.Random(0)
    with contextlib.ExitStack() as stack:
        threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(_THREADS)]

        def gather(results: Any, _arguments: Any) -> None:
            # Whichever thread is free takes it, so that in time the largest one comes to each of them.
            chance.choice(threads).submit(_hold, _size(results)).result()

        def scatter(_results: Any, arguments: Any) -> None:
            _hold(_size(arguments))

        for names, hold in (
            (_GATHERING + _GATHERING_SINCE_2_13, gather),
            (_SCATTERING + _SCATTERING_SINCE_2_13, scatter),
        ):
            for name in names:
                if hasattr(dist.ProcessGroup, name):
                    usual = getattr(dist.ProcessGroup, name)
                    stack.enter_context(replaced(dist.ProcessGroup, name, _with(hold, usual)))
        yield


def _with(hold: Callable[[Any, Any], None], usual: Callable[..., Any]) -> Callable[..., Any]:
    """The method, after which memory is held for a while, when the results are written."""

    def called(group: Any, results: Any, arguments: Any, *others: Any, **named: Any) -> Any:
        work = usual(group, results, arguments, *others, **named)
        hold(results, arguments)
        return work

    return called


def _hold(size: int) -> None:
    """Takes so many bytes, writes to them and gives them back."""
    torch.empty(size, dtype=torch.uint8).zero_()


def _size(tree: Any) -> int:
    return sum(one.nbytes for one in tree_leaves(tree) if isinstance(one, torch.Tensor))
