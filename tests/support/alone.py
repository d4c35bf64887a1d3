"""A real process group of one worker in the test's own process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist


@contextmanager
def alone() -> Iterator[None]:
    """Makes the group, in which DDP and DeepSpeed can be built, and destroys it in the end."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {"GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}.items():
            environment.setenv(name, value)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield
        finally:
            _forget_in_deepspeed()
            dist.destroy_process_group()


def _forget_in_deepspeed() -> None:
    """DeepSpeed keeps the first groups that it meets for the whole process; a later test has others."""
    if "deepspeed" not in sys.modules:
        return
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    comm.cdb = None
    for name, value in vars(groups).items():
        if isinstance(value, dist.ProcessGroup):
            setattr(groups, name, None)
