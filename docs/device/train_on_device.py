"""Trains the artifacts of `ortlaunch export artifacts` on images and labels, without torch and without ortlaunch.

    pip install onnxruntime-training-cpu==1.19.2 numpy
    python train_on_device.py ARTIFACTS --data digits.npz --out trained

ARTIFACTS is the folder of the export, DATA an .npz file with an array for each input of the training model
(pixel_values and labels for images). What is left in OUT: `checkpoint`, with which a later call goes on and which
`ortlaunch export weights --from-artifacts` takes back to PyTorch, and `inference.onnx`, which any ONNX Runtime loads.
"""

from __future__ import annotations

import argparse
import sys
import types
from pathlib import Path

import numpy as np
import onnxruntime

# The package onnxruntime.training imports torch for parts that a device does not use. This one stands in for it, so
# that onnxruntime.training.api, which needs no torch, can be imported alone.
_package = types.ModuleType("onnxruntime.training")
_package.__path__ = [str(Path(onnxruntime.__file__).parent / "training")]
sys.modules.setdefault("onnxruntime.training", _package)

from onnxruntime.training.api import CheckpointState, Module, Optimizer  # noqa: E402

NEXT = ".next"
"""Ends the names of outputs that BatchNorm's running statistics become after a step."""


class Trainer:
    """A training model with its optimizer and parameters."""

    def __init__(self, artifacts: Path, prefix: str, checkpoint: Path, rate: float) -> None:
        self.state = CheckpointState.load_checkpoint(str(checkpoint))
        training, evaluation = artifacts / f"{prefix}training_model.onnx", artifacts / f"{prefix}eval_model.onnx"
        self.module = Module(str(training), self.state, str(evaluation))
        self.optimizer = Optimizer(str(artifacts / f"{prefix}optimizer_model.onnx"), self.module)
        self.optimizer.set_learning_rate(rate)
        self.inputs = self.module.input_names()
        self.outputs = self.module.output_names()

    def step(self, batch: list[np.ndarray]) -> float:
        """Trains on one batch; the loss before it."""
        self.module.train()
        outputs = self.module(*batch)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        self.optimizer.step()
        self.module.lazy_reset_grad()
        for position, name in enumerate(self.outputs):
            if name.endswith(NEXT):
                self.state.parameters[name[: -len(NEXT)]] = outputs[position]
        return float(outputs[0])

    def evaluate(self, batch: list[np.ndarray]) -> float:
        """The loss on a batch, without dropout and with BatchNorm's running statistics."""
        self.module.eval()
        return float(self.module(*batch))

    def save(self, out: Path) -> None:
        """Leaves the checkpoint, with the optimizer's state, and the model for inference."""
        out.mkdir(parents=True, exist_ok=True)
        CheckpointState.save_checkpoint(self.state, str(out / "checkpoint"), include_optimizer_state=True)
        self.module.export_model_for_inferencing(str(out / "inference.onnx"), ["logits"])


def batches(data: dict[str, np.ndarray], names: list[str], size: int, seed: int) -> list[list[np.ndarray]]:
    """One pass over the data in random order; a rest that fills no batch is left out."""
    count = len(data[names[0]])
    order = np.random.default_rng(seed).permutation(count)
    picks = [order[start : start + size] for start in range(0, count - size + 1, size)]
    return [[data[name][pick] for name in names] for pick in picks]


def accuracy(model: Path, inputs: np.ndarray, labels: np.ndarray) -> float:
    """Share of the samples for which the inference model's largest output is the label."""
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {session.get_inputs()[0].name: inputs})
    return float((logits.argmax(-1) == labels).mean())


def main() -> None:
    """Trains, evaluates on a part of the data that was held out, and saves."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("artifacts", type=Path)
    parser.add_argument("--data", type=Path, required=True, help=".npz with an array for each input")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, help="to go on from (default: the exported one)")
    parser.add_argument("--prefix", default="", help="of the artifacts' names")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    arguments = parser.parse_args()

    checkpoint = arguments.checkpoint or arguments.artifacts / f"{arguments.prefix}checkpoint"
    trainer = Trainer(arguments.artifacts, arguments.prefix, checkpoint, arguments.lr)
    with np.load(arguments.data) as file:
        data = {name: file[name] for name in trainer.inputs}
    kept = len(data[trainer.inputs[0]]) // 5
    held_out = [data[name][:kept] for name in trainer.inputs]
    rest = {name: data[name][kept:] for name in trainer.inputs}
    print(f"before    held-out loss {trainer.evaluate(held_out):.4f}")
    for epoch in range(arguments.epochs):
        losses = [trainer.step(batch) for batch in batches(rest, trainer.inputs, arguments.batch_size, epoch)]
        held = trainer.evaluate(held_out)
        print(f"epoch {epoch + 1}   {len(losses)} steps, loss {np.mean(losses):.4f}, held-out loss {held:.4f}")
    trainer.save(arguments.out)
    share = accuracy(arguments.out / "inference.onnx", held_out[0], held_out[-1])
    print(f"after     {share:.1%} of {kept} held-out samples right; torch loaded: {'torch' in sys.modules}")


if __name__ == "__main__":
    main()
