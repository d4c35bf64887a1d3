"""Checks random numbers under ONNX Runtime: active in training, different per step and rank, off in evaluation."""

from __future__ import annotations

import torch

from ortlaunch.check.export import Setting
from ortlaunch.check.report import Randomness
from ortlaunch.models.task import Batch
from ortlaunch.ort import session
from ortlaunch.ort.refusal import last_line
from ortlaunch.ort.verify.gap import widest
from ortlaunch.ort.verify.nested import NamedTensors, named_tensors
from ortlaunch.ort.verify.state import ModelState, same_random_numbers
from ortlaunch.trainer.seeds import seed_everything

_TRIES = 8
"""Passes over the same batch with which randomness is detected."""


def check_randomness(wrapped: torch.nn.Module, batch: Batch, setting: Setting) -> Randomness:
    """Runs an ORTModule that has exported, and the model inside it, over the same batch several times.

    Ranks are simulated by their seeds, which are set as in a worker.
    """
    plain = session.plain_model(wrapped)
    state = ModelState(plain)

    def outputs(model: torch.nn.Module) -> NamedTensors:
        state.restore()
        with setting.precision():
            return named_tensors(setting.task.outputs(model, batch))

    with same_random_numbers():
        seed_everything(setting.seed + 1)
        # One pass is not enough, because two random outcomes may be equal.
        reference, first = outputs(plain), outputs(wrapped)
        result = Randomness("ok", expected=any(_differ(reference, outputs(plain)) for _ in range(_TRIES)))
        result.active_in_train = any(_differ(first, outputs(wrapped)) for _ in range(_TRIES))
        result.differs_per_step = result.active_in_train and any(
            _differ(outputs(wrapped), outputs(wrapped)) for _ in range(_TRIES)
        )
        seed_everything(setting.seed + 1)
        rank_0 = [outputs(wrapped) for _ in range(_TRIES)]
        seed_everything(setting.seed + 2)
        result.differs_per_rank = any(_differ(one, outputs(wrapped)) for one in rank_0)
        wrapped.eval()
        try:
            with torch.no_grad():
                first, second = outputs(wrapped), outputs(wrapped)
                expected = outputs(plain)
            result.off_in_eval = not _differ(first, second)
            result.eval_equals_eager = not widest(first, expected).differs
        except Exception as error:
            result.problems.append(f"evaluation fails: {last_line(str(error))}")
        finally:
            wrapped.train()
            state.restore()
    _judge(result)
    return result


def _judge(result: Randomness) -> None:
    if result.expected and not result.active_in_train:
        result.problems.append("the model is random in training in PyTorch, and the same at every step here")
    elif result.expected and not result.differs_per_step:
        result.problems.append("two steps in a row draw the same random numbers")
    elif result.expected and not result.differs_per_rank:
        result.problems.append("all ranks would draw the same random numbers")
    if result.active_in_train and not result.expected:
        result.problems.append("the model is random in training here, and not in PyTorch")
    if not result.problems and not result.off_in_eval:
        result.problems.append("random numbers are not switched off in evaluation")
    if not result.problems and not result.eval_equals_eager:
        result.problems.append("the outputs in evaluation are not PyTorch's")
    result.status = "failed" if result.problems else "ok"


def _differ(first: NamedTensors, second: NamedTensors) -> bool:
    # Differences within rounding do not count: sums over several threads are not reproducible.
    return widest(second, first).differs
