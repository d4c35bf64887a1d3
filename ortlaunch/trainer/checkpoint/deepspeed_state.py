"""The training state of a DeepSpeed engine: DeepSpeed collects it, and we write what it collected.

DeepSpeed lets an object of the user's write its files. Ours copies what it is given to host memory and writes it later,
so the files are DeepSpeed's own: its tools read them, and another number of workers goes on from them by its universal
checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

from ortlaunch.trainer.checkpoint.host import save_file, to_host
from ortlaunch.trainer.checkpoint.torch_state import Write

_TAG = "deepspeed"
_UNIVERSAL = "universal"


class _LaterEngine(CheckpointEngine):
    """Takes what DeepSpeed would write into host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "ortlaunch"
        self.files: list[tuple[Any, str]] = []

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Folders come with the files."""

    def create(self, info: CheckpointCommitInfo) -> None:
        """Nothing to prepare."""

    def save(self, state_dict: Any, path: str) -> None:
        """Remembers one file."""
        self.files.append((to_host(state_dict), path))

    def load(self, path: str, map_location: Any = None) -> Any:
        """Reads one file; the caller has checked it against its hash."""
        return torch.load(path, map_location=map_location, weights_only=False)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """The files are written later."""
        return True

    def preserves_storage_sharing(self) -> bool:
        """Our copies hold no more than what is copied."""
        return False


def snapshot(engine: Any, folder: Path) -> Write:
    """Copies this worker's share of the state to host memory; all workers call it.

    Args:
        engine: the DeepSpeedEngine.
        folder: where it will be written; it need not be there yet.
    """
    later = _LaterEngine()
    usual, engine.checkpoint_engine = engine.checkpoint_engine, later
    # A script of DeepSpeed's that would be copied into a folder that is not there; `ortlaunch export weights` does it.
    engine._copy_recovery_script = lambda _folder: None
    try:
        with contextlib.redirect_stdout(sys.stderr):
            engine.save_checkpoint(str(folder), tag=_TAG, save_latest=False)
    finally:
        engine.checkpoint_engine = usual

    def write(_group: dist.ProcessGroup) -> None:
        for state, path in later.files:
            Path(path).parent.mkdir(exist_ok=True)
            save_file(state, Path(path))

    return write


def restore(engine: Any, folder: Path, *, saved_workers: int, scratch: Path, group: dist.ProcessGroup) -> None:
    """Loads what `snapshot` wrote; all workers call it.

    Args:
        engine: the DeepSpeedEngine, of the same ZeRO stage.
        folder: the checkpoint.
        saved_workers: how many workers wrote it; another number goes by DeepSpeed's universal checkpoint.
        scratch: folder for the universal checkpoint, which takes as much space again while it is read.
        group: all workers.
    """
    reshaped = saved_workers != dist.get_world_size() and engine.zero_optimization()
    with contextlib.redirect_stdout(sys.stderr):
        if not reshaped:
            _load(engine, folder, _TAG)
            return
        if dist.get_rank() == 0:
            _convert(folder / _TAG, scratch / _UNIVERSAL)
        dist.barrier(group)
        engine._config.load_universal_checkpoint = True
        try:
            _load(engine, scratch, _UNIVERSAL)
        finally:
            engine._config.load_universal_checkpoint = False
        if engine.zero_optimization_partition_weights():
            _mend_stage3(engine.optimizer.optimizer, scratch / _UNIVERSAL)
        dist.barrier(group)
        if dist.get_rank() == 0:
            shutil.rmtree(scratch, ignore_errors=True)


def weights(engine: Any, *, is_first: bool) -> dict[str, torch.Tensor]:
    """The whole model by its plain names in host memory, one parameter after the other; all workers call it.

    Args:
        engine: the DeepSpeedEngine.
        is_first: whether this worker wants them; the others help and get nothing.
    """
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    whole: dict[int, torch.Tensor] = {}
    state = engine.module.state_dict(keep_vars=True)
    for value in state.values():
        if id(value) in whole:
            continue  # A further name of the same weight.
        # Under bf16 and fp16 what is trained is the optimizer's copy in fp32.
        is_low = isinstance(value, torch.nn.Parameter) and value.dtype in (torch.bfloat16, torch.float16)
        full = safe_get_full_fp32_param(value) if is_low else None
        with deepspeed.zero.GatheredParameters([value], enabled=hasattr(value, "ds_id")):
            whole[id(value)] = to_host(value if full is None else full) if is_first else torch.empty(0)
    return {name: whole[id(value)] for name, value in state.items()} if is_first else {}


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The whole model in fp32 and host memory, put together from every worker's share."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    files = folder / _TAG
    # It counts aloud what it reads.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if not any(files.glob("*optim_states.pt")):
            state = torch.load(files / "mp_rank_00_model_states.pt", map_location="cpu", weights_only=False)
            return {name: value.float() for name, value in state["module"].items()}
        return dict(get_fp32_state_dict_from_zero_checkpoint(str(folder), _TAG, lazy_mode=False))


def _load(engine: Any, folder: Path, tag: str) -> None:
    path, _ = engine.load_checkpoint(str(folder), tag=tag)
    if path is None:
        raise RuntimeError(f"DeepSpeed found no checkpoint in {folder / tag}")


def _mend_stage3(optimizer: torch.optim.Optimizer, universal: Path) -> None:
    """Undoes what DeepSpeed's reading of a universal checkpoint does to stage 3 with several parameter groups: all get
    the settings of the first, weight decay too, and one step counter, which each group then counts up."""
    stored = torch.load(universal / "zero" / "optimizer_state.pt", map_location="cpu", weights_only=False)
    for group, settings in zip(optimizer.param_groups, stored["param_groups"], strict=True):
        group |= {name: value for name, value in settings.items() if name != "params"}
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()


def _convert(source: Path, target: Path) -> None:
    """DeepSpeed's own conversion."""
    from deepspeed.checkpoint import ds_to_universal

    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(source),
            output_folder=str(target),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )
