"""The average of the weights against that of torch."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ortlaunch.trainer.average import Average


def test_it_is_the_average_of_swa_utils_to_the_bit_also_after_a_restart() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average = Average(model, 0.9)
    for step in range(6):
        if step == 3:
            stored, average = (deepcopy(average.tensors), average.steps), Average(model, 0.9)
            average.load(*stored)
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        theirs.update_parameters(model)
        average.update()
        own = deepcopy(model.state_dict())
        with average.in_place():
            ours = deepcopy(model.state_dict())
        assert all(torch.equal(value, ours[name]) for name, value in theirs.module.state_dict().items())
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in own.items())
        assert all(
            torch.equal(average.of(value), ours[name]) for name, value in model.state_dict(keep_vars=True).items()
        )


def test_an_average_that_a_checkpoint_has_not_begins_with_the_next_step() -> None:
    model = torch.nn.Linear(2, 2)
    average = Average(model, 0.9)
    torch.nn.init.ones_(model.weight)
    average.load({}, 0)
    with average.in_place():
        assert (model.weight == 1).all()
    torch.nn.init.zeros_(model.weight)
    average.update()
    assert (average.of(model.weight) == 0).all()
