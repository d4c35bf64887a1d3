"""`ortlaunch export weights RUN [--best] [--out FOLDER]`: weights in plain names, of the newest or best checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import torch

from ortlaunch.base.arguments import Parser
from ortlaunch.base.errors import RequestError
from ortlaunch.base.modules import add_working_folder
from ortlaunch.base.ownership import require_own
from ortlaunch.config.load import load_config
from ortlaunch.config.schema import AdapterConfig, Config
from ortlaunch.config.trainers import trainer_of
from ortlaunch.config.trainers.base import loaded
from ortlaunch.export.folder import check_out
from ortlaunch.follow.find import HELP, run_or_folder
from ortlaunch.models.lora import base_digest, merged
from ortlaunch.models.registry import build_model
from ortlaunch.run import checkpoints as store
from ortlaunch.run import manifest
from ortlaunch.run.run import Run
from ortlaunch.trainer.checkpoint import resume
from ortlaunch.trainer.checkpoint.resume import Start
from ortlaunch.trainer.checkpoint.saver import ENGINE
from ortlaunch.trainer.checkpoint.torch_state import has_averages
from ortlaunch.trainer.prepare import build_seeded
from ortlaunch.trainer.weights import fill_names, load_weights, save_weights


def export_weights(arguments: list[str]) -> int:
    """Runs `ortlaunch export weights`; returns the exit code.

    Raises:
        RequestError: the folder is not a run folder, or has no complete checkpoint.
    """
    options = _parser().parse_args(arguments)
    given = run_or_folder(options.run)
    checkpoint = _best(given) if options.best else _checkpoint(given)
    # The path is resolved first: checkpoints/step-… is inside the run folder, but the link `latest` may not be.
    run_dir = checkpoint.parents[1]
    # The run's configuration names the model's code, which is imported to build it.
    Run(run_dir).require_own("export")
    require_own(checkpoint, checkpoint / manifest.NAME, use="export")
    config = load_config(Run(run_dir).config_file)
    out: Path = (options.out or Run(run_dir).weights).expanduser().absolute()
    check_out(out)
    if options.merged and config.adapter.trains_all:
        raise RequestError(f"{options.run} has no adapter to merge: leave out --merged")
    with contextlib.redirect_stdout(sys.stderr):
        _export(config, checkpoint, out, merge=options.merged)
    is_whole = config.adapter.trains_all or options.merged
    whole = "weights" if is_whole else f"weights of the {config.adapter.name} adapter"
    kind = f"the average of the {whole} (train.ema)" if has_averages(checkpoint / ENGINE) else whole
    print(f"{out}: {kind} after step {store.step_of(checkpoint)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ortlaunch export weights", description="Write a run's weights as safetensors, in the model's own names."
    )
    parser.add_argument("run", metavar="RUN", help=f"{HELP}; or a checkpoint in a run folder")
    parser.add_argument("--best", action="store_true", help="of the checkpoint with the best evaluation (train.best)")
    parser.add_argument("--merged", action="store_true", help="of an adapter: the whole model, with the adapter in it")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to (default: weights/ in the run folder)")
    return parser


def _best(given: Path) -> Path:
    link = Run(given).checkpoints / "best"
    if not link.exists():
        raise RequestError(f"{given}: no checkpoint in it has an evaluation: set train.eval_every, or leave out --best")
    return _checkpoint(link)


def _checkpoint(given: Path) -> Path:
    if (given / manifest.NAME).is_file():
        path = given.resolve()
        if wrong := manifest.problems(path):
            raise RequestError(f"{given} is damaged: {wrong[0]}")
        return path
    run = Run(given)
    run.require(run.config_file)
    found = store.newest(run.checkpoints)
    for line in found.skipped:
        print(f"warning: {line}", file=sys.stderr)
    if found.path is None:
        final = run.weights
        instead = f"; the weights at the run's end are in {final}" if final.is_dir() else ""
        raise RequestError(f"{given}: there is no complete checkpoint in it (train.checkpoint_every){instead}")
    return found.path.resolve()


def _quiet() -> None:
    """Switches off progress bars and the warnings of libraries, which do not apply to a single process."""
    warnings.simplefilter("ignore")
    if "transformers" in sys.modules:
        from transformers.utils import logging

        logging.disable_progress_bar()


def _export(config: Config, checkpoint: Path, out: Path, *, merge: bool) -> None:
    # Only files are read and written here, so DeepSpeed need not look for an accelerator.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    add_working_folder()
    if config.adapter.trains_all:
        model = build_model(config.model)
        _quiet()
        save_weights(weights_in(checkpoint, config, model), model, out)
        return
    model = build_seeded(config)
    _quiet()
    weights = weights_in(checkpoint, config, model)
    if not merge:
        save_weights(weights, model, out, adapter_only=True)
        return
    resume.check_base(Start(checkpoint, store.read_meta(checkpoint)), base_digest(model))
    plain = build_seeded(replace(config, adapter=AdapterConfig()))
    if config.model.weights is not None:
        load_weights(plain, Path(config.model.weights))
    whole = merged(weights, model, plain)
    save_weights({name: one.detach() for name, one in whole.state_dict().items()}, whole, out)


def weights_in(checkpoint: Path, config: Config, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns a checkpoint's full weights in host memory, under every name that they have in the plain `model`."""
    trainer = trainer_of(config.trainer)
    trainer.import_packages()
    weights: dict[str, torch.Tensor] = loaded(trainer.weights_reader)(checkpoint / ENGINE)
    for name, buffer in model.named_buffers():
        # DeepSpeed returns integer counters as fp32.
        if name in weights and not buffer.is_floating_point():
            weights[name] = weights[name].to(buffer.dtype)
    return fill_names(weights, model)
