"""Run under torchrun: each parameter's gradient after one backward under ZeRO 3, by family and by what computed it.

Writes {family: {variant: {"loss": .., "gradients": {..}, "consolidated": [..], "plain": [..]}}} for the test to read.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import Config, Device
from ortlaunch.models.registry import build_model
from ortlaunch.models.task import make_task
from ortlaunch.ort import session
from ortlaunch.trainer.seeds import seed_everything
from ortlaunch.trainer.workers import Workers, join
from ortlaunch.trainer.wrapping import wrap
from tests.support.torchrun import leave

VARIANTS = {
    "eager": ("backend=eager",),
    "recompute": ("backend=ort",),
    "hold": ("backend=ort", "backend.zero3=hold"),
}


def main() -> None:
    """Arguments: the file to write, then overrides of one family each, separated by commas."""
    workers: Workers | None = None
    results: dict[str, dict[str, Any]] = {}
    for family in sys.argv[2:]:
        results[family] = {}
        for variant, chosen in VARIANTS.items():
            config = to_config(compose([*family.split(","), *chosen]))
            workers = workers or join(config, Device.cpu)
            results[family][variant] = one_backward(config, workers)
    assert workers is not None
    if workers.is_first:
        torch.save(results, sys.argv[1])
    leave()


def one_backward(config: Config, workers: Workers) -> dict[str, Any]:
    from deepspeed.utils import safe_get_full_grad

    seed_everything(0)
    model = build_model(config.model)
    plain = list(model.state_dict())
    ids = torch.randint(0, 256, (2, 48), generator=torch.Generator().manual_seed(workers.rank))
    batch = {"input_ids": ids, "labels": ids}
    engine = wrap(model, config, workers, make_task(model, batch), Path(sys.argv[1]).parent)
    loss = engine.micro_step(batch, last=True).loss
    assert session.is_active(engine.inner) == (config.backend.name == "ort")
    consolidated = engine._engine._zero3_consolidated_16bit_state_dict()
    return {
        "loss": loss.item(),
        "gradients": {name: safe_get_full_grad(parameter) for name, parameter in model.named_parameters()},
        "consolidated": list(consolidated or ()),
        "plain": plain,
    }


main()
