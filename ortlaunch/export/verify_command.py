"""`ortlaunch export verify DIR`: command line and report."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ortlaunch.base import exit_codes
from ortlaunch.base.arguments import Parser
from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import replace_text
from ortlaunch.config.backends import require_ort

if TYPE_CHECKING:
    from ortlaunch.export.verify import Verification

REPORT = "verify.json"


def main(arguments: list[str]) -> int:
    """Runs the verb.

    Returns:
        0 where artifacts and PyTorch agree, 1 where they do not.

    Raises:
        RequestError: there are no artifacts, or the data cannot be loaded.
    """
    options = _parser().parse_args(arguments)
    for name in ("steps", "batch_size"):
        if getattr(options, name) < 2:
            raise RequestError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least 2")
    require_ort("export verify", otherwise="")
    folder: Path = options.dir.expanduser().absolute()
    from ortlaunch.export.verify import to_json, verify

    with contextlib.redirect_stdout(sys.stderr):
        verdict = verify(folder, steps=options.steps, batch_size=options.batch_size)
    report = to_json(verdict)
    replace_text(folder / REPORT, json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2) if options.format == "json" else page(folder, verdict))
    _log(folder)
    return exit_codes.DONE if verdict.ok else exit_codes.FAILED


def _log(folder: Path) -> None:
    from ortlaunch.export.record import load_record
    from ortlaunch.export.tracking import log_to_run

    record = load_record(folder, "artifacts")
    if record.run_dir is not None and (
        note := log_to_run(Path(record.run_dir), folder / REPORT, f"export/{folder.name}")
    ):
        print(note, file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ortlaunch export verify",
        description="Train artifacts with ONNX Runtime and the same model with PyTorch, on the same batches of the "
        "run's data, and compare losses, weights and what the trained model computes. Dropout is off in both. Leaves "
        f"{REPORT} in DIR. Exit codes: 0 they agree, 1 they do not, 2 the request is wrong.",
    )
    parser.add_argument("dir", type=Path, metavar="DIR", help="folder written by export artifacts")
    parser.add_argument("--steps", type=int, default=20, help="training steps (default: 20)")
    parser.add_argument("--batch-size", type=int, default=32, help="samples in each step (default: 32)")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    return parser


def page(folder: Path, found: Verification) -> str:
    """Renders the report as text."""
    first, last = found.losses[0], found.losses[-1]
    lines = [
        f"{folder}: {found.steps} steps of {found.batch_size} samples of {found.data}, loss {found.loss}",
        f"  loss       {first[0]:.6f} to {last[0]:.6f}, PyTorch {first[1]:.6f} to {last[1]:.6f}: "
        f"a step differs by {found.loss_difference:.1e} at most",
        f"  weights    differ by {found.weight_difference:.1e} at most after it ({found.weight})",
        f"  frozen     {'unchanged' if found.frozen_unchanged else 'CHANGED'}",
        f"  eval loss  on a fresh batch, the checkpoint in PyTorch, differs by {found.eval_loss_difference:.1e}",
        f"  inference  outputs of the model that the device exports differ by {found.inference_error:.1e} (relative)",
    ]
    if found.left_to_chance:
        count = sum(found.left_to_chance.values())
        lines.append(
            f"  chance     {count} weights have a rounding error for their first gradient, and are not compared"
        )
    if found.dropout_active is not None:
        lines.append(f"  dropout    {'active' if found.dropout_active else 'DOES NOTHING'} in the files as they are")
    lines.append(
        f"  step       {1000 * found.step_seconds:.2f} ms, PyTorch {1000 * found.pytorch_step_seconds:.2f} ms "
        f"(medians, {found.threads} threads)"
    )
    lines += [f"  {name:<28} {size:>12,} bytes" for name, size in found.files.items()]
    outcome = "agree" if found.ok else f"DIFFER: {'; '.join(found.problems)}"
    return "\n".join([*lines, f"ONNX Runtime's training and PyTorch's {outcome}"])
