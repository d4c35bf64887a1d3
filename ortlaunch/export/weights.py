"""`ortlaunch export weights --from-artifacts DIR`: converts weights trained on a device to safetensors for PyTorch."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from ortlaunch.base.arguments import Parser
from ortlaunch.config.backends import require_ort
from ortlaunch.export.folder import check_out

FLAG = "--from-artifacts"


def main(arguments: list[str]) -> int:
    """Runs the verb.

    Raises:
        RequestError: there are no artifacts, the checkpoint belongs to others, or the folder is not empty.
    """
    options = _parser().parse_args(arguments)
    folder: Path = options.from_artifacts.expanduser().absolute()
    given: Path | None = options.checkpoint.expanduser().absolute() if options.checkpoint else None
    out: Path = options.out.expanduser().absolute()
    check_out(out)
    require_ort(f"export weights {FLAG}", otherwise="")
    from ortlaunch.export.restore import checkpoint_path, load_into, open_artifacts, state_dict
    from ortlaunch.export.source import built
    from ortlaunch.ort.artifacts import Checkpoint
    from ortlaunch.trainer.weights import save_weights

    record, config = open_artifacts(folder)
    path = checkpoint_path(folder, record, given)
    with contextlib.redirect_stdout(sys.stderr):
        model = built(config)
        values = state_dict(folder, record, Checkpoint(path))
        load_into(model, values, folder)
        save_weights({name: tensor.detach() for name, tensor in model.state_dict().items()}, model, out)
    print(f"{out}: weights of {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ortlaunch export weights",
        description="Write the weights of artifacts, as exported or trained on a device, in the model's own names.",
    )
    parser.add_argument(FLAG, type=Path, required=True, metavar="DIR", help="folder written by export artifacts")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FILE", help="the device's checkpoint (default: the one in DIR)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder to write")
    return parser
