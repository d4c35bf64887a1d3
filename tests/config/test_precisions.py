"""What is typed is refused as the table of precisions says."""

from __future__ import annotations

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.compose.rules import check
from ortlaunch.config.load import to_config
from ortlaunch.config.precisions import Cell, cells
from ortlaunch.config.schema import GROUPS, Config, Device


@pytest.mark.parametrize("device", [Device.cpu, Device.cuda])
def test_the_rules_apply_to_what_is_typed(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ortlaunch.config.devices._present_gpus", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = to_config(compose([f"device={device.value}"]))
    refusals = {cell: _refusal(config, cell) for cell in cells(device)}
    assert refusals == {cell: cell.refusal for cell in refusals}
    assert any(refusals.values())
    assert not all(refusals.values())


def _refusal(config: Config, cell: Cell) -> str | None:
    trainer, _, stage = cell.trainer.partition(" ")
    config.backend = GROUPS["backend"][cell.backend]()
    config.trainer = GROUPS["trainer"][trainer](**({"zero_stage": int(stage)} if stage else {}))
    config.train.precision = cell.precision
    try:
        check(config)
    except RequestError as error:
        return str(error)
    return None
