"""What an optimizer takes from a checkpoint."""

from __future__ import annotations

import pytest
import torch

from ortlaunch.trainer.checkpoint.torch_state import _load_optimizer


@pytest.mark.parametrize("is_fused", [False, True], ids=["as fsdp has it", "as ddp has it"])
def test_the_kernels_of_a_step_are_those_of_this_run(is_fused: bool) -> None:
    """torch has no fused SGD for sharded parameters; without it, a step is not skipped by a flag on the device."""
    model = torch.nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, fused=is_fused)
    stored = {**optimizer.param_groups[0], "params": ["weight"], "fused": not is_fused, "momentum": 0.9}
    momentum = {"weight": {"momentum_buffer": torch.ones(2, 2)}}
    _load_optimizer(optimizer, [stored], momentum, dict(model.named_parameters()))
    (group,) = optimizer.param_groups
    assert (group["fused"], group["momentum"]) == (is_fused, 0.9)
    assert optimizer.state[model.weight]["momentum_buffer"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
