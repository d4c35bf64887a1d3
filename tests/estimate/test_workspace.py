"""What operations hold beside their arguments and results: kernels in the caller's thread, exchanges in gloo's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from ortlaunch.estimate import workspace
from ortlaunch.estimate.ledger import Ledger
from ortlaunch.estimate.pretend import join_nobody

MIB = 2**20
QUARTER = MIB // 4
"""Numbers in a MiB of fp32."""


def peak_over_end(make: object) -> float:
    """MiB by which the peak of tensors while `make` runs is above what is there after it."""
    assert callable(make)
    with FakeTensorMode(), Ledger() as ledger:
        kept = make()
        peak, now = ledger.take_peak().tensors, ledger.now
        del kept
    return (peak - now) / MIB


@pytest.fixture
def two_workers() -> object:
    join_nobody(2)
    yield
    dist.destroy_process_group()


def test_a_convolution_holds_its_result_and_its_weight_in_another_order() -> None:
    # 2 MiB of input, 4 MiB of result, 9 / 32 MiB of weight.
    def convolved() -> torch.Tensor:
        return torch.conv2d(torch.zeros(128, 64, 8, 8), torch.zeros(128, 64, 3, 3), padding=1)

    # After it, its arguments are gone.
    assert peak_over_end(convolved) == pytest.approx(2 + 9 / 32 + 4 + 9 / 32)


def test_without_instructions_a_convolution_in_bf16_holds_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "has_low_precision", lambda _dtype: False)

    def convolved(kernel: int) -> torch.Tensor:
        # Of these nothing was written.
        image = torch.empty((64, 256, 8, 8), dtype=torch.bfloat16)
        weight = torch.empty((256, 256, kernel, kernel), dtype=torch.bfloat16)
        return torch.conv2d(image, weight, padding=kernel // 2)

    assert peak_over_end(lambda: convolved(3)) == pytest.approx(2 * 9)
    assert peak_over_end(lambda: convolved(1)) == 0


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="measured on torch 2.13; in 2.6 oneDNN takes 28 to 45 % more")
@pytest.mark.parametrize(
    ("steps", "batch", "width", "hidden"), [(64, 8, 64, 128), (64, 8, 256, 128), (32, 16, 192, 192)]
)
def test_an_lstm_keeps_gates_and_states_of_all_steps(steps: int, batch: int, width: int, hidden: int) -> None:
    def kept(*, train: bool) -> int:
        gates = [torch.zeros(4 * hidden, size) for size in (width, hidden)] + [torch.zeros(4 * hidden)] * 2
        state = torch.zeros(1, batch, hidden)
        numbers = [2, hidden, 1, True, False, False, train]
        layer = torch.ops.aten.mkldnn_rnn_layer
        return layer(torch.zeros(steps, batch, width), *gates, state, state, False, [], *numbers)[3].nbytes

    real = kept(train=True)
    with FakeTensorMode(), Ledger():
        assert kept(train=True) == pytest.approx(workspace._LSTM_KEPT * real, rel=0.1)
        assert kept(train=False) == 0


@pytest.mark.parametrize(
    ("steps", "batch", "width", "hidden", "layers", "measured"),
    [(64, 32, 256, 512, 1, 92), (64, 32, 256, 512, 2, 132), (128, 32, 256, 256, 3, 131), (32, 8, 1024, 1024, 1, 148)],
)
def test_an_lstm_takes_what_was_measured(
    steps: int, batch: int, width: int, hidden: int, layers: int, measured: int
) -> None:
    """MiB of a process with a pinned threshold, beyond what it had before."""
    with FakeTensorMode(), Ledger() as ledger:
        model = torch.nn.LSTM(width, hidden, layers)
        model(torch.zeros(steps, batch, width))[0].sum().backward()
        peak = ledger.take_peak().tensors / MIB
    assert peak == pytest.approx(measured, rel=0.1)


@pytest.mark.usefixtures("two_workers")
def test_gathered_tensors_are_there_twice_and_reduced_ones_too() -> None:
    def gathered() -> object:
        out, own = torch.zeros(8 * QUARTER), torch.zeros(4 * QUARTER)
        dist.all_gather_into_tensor(out, own)
        return out, own

    def scattered() -> object:
        out, whole = torch.zeros(4 * QUARTER), torch.zeros(8 * QUARTER)
        dist.reduce_scatter_tensor(out, whole)
        return out, whole

    def reduced() -> object:
        whole = torch.zeros(8 * QUARTER)
        dist.all_reduce(whole)
        return whole

    assert [peak_over_end(one) for one in (gathered, scattered, reduced)] == [8, 8, 0]
