"""Saves and restores the training state of a DeepSpeed engine, in DeepSpeed's own file format.

DeepSpeed writes its files through a replaceable object. The one here copies the state to host memory, so that it can be
written later. DeepSpeed's tools can read the files, and another number of workers can resume from them through its
universal checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

from ortlaunch.run.checkpoints import CONVERTED, remove_converted
from ortlaunch.trainer.checkpoint import reading
from ortlaunch.trainer.checkpoint.host import HostMemory, save_file, to_host
from ortlaunch.trainer.checkpoint.torch_state import Write, state_of

_TAG = "deepspeed"


class _LaterEngine(CheckpointEngine):
    """A checkpoint engine that copies what DeepSpeed would write to host memory."""

    def __init__(self, shared: bool, memory: HostMemory) -> None:
        super().__init__()
        self.name = "ortlaunch"
        self._shared = shared
        self._memory = memory
        self.files: list[tuple[Any, str]] = []

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Does nothing: folders are created when the files are written."""

    def create(self, info: CheckpointCommitInfo) -> None:
        """Does nothing: there is nothing to prepare."""

    def save(self, state_dict: Any, path: str) -> None:
        """Copies the content of one file."""
        self.files.append((to_host(state_dict, shared=self._shared, memory=self._memory), path))

    def load(self, path: str, map_location: Any = None) -> Any:
        """Reads one file. The caller has already checked its hash."""
        return reading.load_deepspeed(Path(path), map_location)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Reports success: the files are written later."""
        return True

    def preserves_storage_sharing(self) -> bool:
        """Returns False: the copy of a view holds only its elements, so DeepSpeed need not clone views."""
        return False


def snapshot(engine: Any, folder: Path, *, trained_only: bool, shared: bool, memory: HostMemory) -> Write:
    """Copies this worker's share of the state to host memory. All workers must call it.

    Args:
        engine: the DeepSpeedEngine.
        folder: the folder that the state will be written to. It need not exist yet.
        trained_only: leave out the parameters that need no gradient.
        shared: whether the state stays as it is until it is written, so that what is in host memory is not copied.
        memory: what the tensors are copied into.
    """
    later = _LaterEngine(shared, memory)
    usual, engine.checkpoint_engine = engine.checkpoint_engine, later
    # DeepSpeed would copy its recovery script into the folder, which does not exist yet. The script is not needed,
    # because `ortlaunch export weights` does the same.
    engine._copy_recovery_script = lambda _folder: None
    try:
        with contextlib.redirect_stdout(sys.stderr), _left_gathered(engine):
            engine.save_checkpoint(str(folder), tag=_TAG, save_latest=False, exclude_frozen_parameters=trained_only)
    finally:
        engine.checkpoint_engine = usual

    def write(_group: dist.ProcessGroup) -> None:
        # The copies are let go here and not with this function, which is kept until the slowest worker has written.
        while later.files:
            state, path = later.files.pop(0)
            Path(path).parent.mkdir(exist_ok=True)
            save_file(state, Path(path))

    return write


@contextlib.contextmanager
def _left_gathered(engine: Any) -> Iterator[None]:
    """Within it, DeepSpeed saves under ZeRO 3 without releasing the parameters that every worker keeps whole.

    It would gather them again afterwards, a collective for each, although a save changes none of them. It releases
    them for the sake of the model's state, in which a sharded parameter is an empty tensor. This puts it there.
    """
    if not engine.zero_optimization_partition_weights():
        yield
        return
    usual = engine.module_state_dict

    def with_empty_shards(*arguments: Any, **named: Any) -> dict[str, Any]:
        state = usual(*arguments, **{**named, "keep_vars": True})
        return type(state)((name, _without_shard(value)) for name, value in state.items())

    changed = {
        "module_state_dict": with_empty_shards,
        "_optimizer_has_ckpt_event_prologue": lambda: False,
        "_optimizer_has_ckpt_event_epilogue": lambda: False,
    }
    vars(engine).update(changed)
    try:
        yield
    finally:
        for name in changed:
            delattr(engine, name)


def _without_shard(value: Any) -> Any:
    return torch.empty(0, dtype=value.dtype, device=value.device) if hasattr(value, "ds_id") else value


def restore(
    engine: Any, folder: Path, *, saved_workers: int, scratch: Path, group: dist.ProcessGroup, trained_only: bool
) -> None:
    """Loads a written snapshot. All workers must call it.

    Args:
        engine: the DeepSpeedEngine, with the same ZeRO stage.
        folder: the folder of the snapshot.
        saved_workers: the number of workers that wrote it. If the number differs, DeepSpeed's universal checkpoint is
            used.
        scratch: a folder for the universal checkpoint. It takes as much space as the snapshot and is removed.
        group: a process group of all workers.
        trained_only: as it was for the snapshot.
    """
    with contextlib.redirect_stdout(sys.stderr):
        if saved_workers == dist.get_world_size() or not engine.zero_optimization():
            _load(engine, folder, _TAG, trained_only=trained_only)
        else:
            _restore_reshaped(engine, folder, scratch, group, trained_only=trained_only)


def weights(engine: Any, *, is_first: bool, trained_only: bool) -> dict[str, torch.Tensor]:
    """The whole model in host memory, by plain names. It is gathered parameter by parameter. All workers must call it.

    Args:
        engine: the DeepSpeedEngine.
        is_first: whether this worker gets the weights. The others take part in the gathering and get nothing.
        trained_only: as in `snapshot`.
    """
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    whole: dict[int, torch.Tensor] = {}
    state = state_of(engine.module, trained_only=trained_only)
    for value in state.values():
        if id(value) in whole:
            continue  # This is another name of the same weight.
        # In bf16 and fp16, the optimizer updates its own copy of the weight in fp32.
        is_low = isinstance(value, torch.nn.Parameter) and value.dtype in (torch.bfloat16, torch.float16)
        full = safe_get_full_fp32_param(value) if is_low else None
        with deepspeed.zero.GatheredParameters([value], enabled=hasattr(value, "ds_id")):
            whole[id(value)] = to_host(value if full is None else full) if is_first else torch.empty(0)
    return {name: whole[id(value)] for name, value in state.items()} if is_first else {}


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The whole model in fp32 in host memory, assembled from all workers' shares."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    files = folder / _TAG
    if not any(files.glob("*optim_states.pt")):
        state = reading.load_deepspeed(files / "mp_rank_00_model_states.pt", "cpu")
        return {name: value.float() for name, value in state["module"].items()}
    # DeepSpeed prints its progress here.
    silent = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with reading.deepspeed_classes(files), silent[0], silent[1]:
        return dict(get_fp32_state_dict_from_zero_checkpoint(str(folder), _TAG, lazy_mode=False))


def _load(engine: Any, folder: Path, tag: str, *, trained_only: bool) -> None:
    with reading.deepspeed_classes(folder / tag):
        path, _ = engine.load_checkpoint(str(folder), tag=tag, load_module_strict=not trained_only)
    if path is None:
        raise RuntimeError(f"DeepSpeed found no checkpoint in {folder / tag}")


def _restore_reshaped(
    engine: Any, folder: Path, scratch: Path, group: dist.ProcessGroup, *, trained_only: bool
) -> None:
    """Loads a snapshot that another number of workers wrote, through a universal checkpoint in `scratch`."""
    universal = scratch / CONVERTED
    try:
        if dist.get_rank() == 0:
            _convert(folder / _TAG, universal)
        dist.barrier(group)
        engine._config.load_universal_checkpoint = True
        try:
            _load(engine, scratch, CONVERTED, trained_only=trained_only)
        finally:
            engine._config.load_universal_checkpoint = False
        if engine.zero_optimization_partition_weights():
            _restore_group_settings(engine.optimizer.optimizer, universal)
            _separate_step_counters(engine.optimizer.optimizer)
        dist.barrier(group)
    finally:
        # If another worker fails, this one waits until it is ended, and the launcher removes the folder.
        if dist.get_rank() == 0:
            remove_converted(scratch)


def _restore_group_settings(optimizer: torch.optim.Optimizer, universal: Path) -> None:
    """Gives each parameter group its own settings again.

    From a universal checkpoint at stage 3, DeepSpeed gives all groups the settings of the first one, weight decay
    included.
    """
    stored = reading.load_deepspeed(universal / "zero" / "optimizer_state.pt", "cpu")
    for group, settings in zip(optimizer.param_groups, stored["param_groups"], strict=True):
        group |= {name: value for name, value in settings.items() if name != "params"}


def _separate_step_counters(optimizer: torch.optim.Optimizer) -> None:
    """Gives each parameter a step counter of its own.

    From a universal checkpoint at stage 3, DeepSpeed gives all groups one shared counter, which each group would then
    increment.
    """
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()


def _convert(source: Path, target: Path) -> None:
    """Converts a checkpoint to a universal checkpoint with DeepSpeed's own program."""
    from deepspeed.checkpoint import ds_to_universal

    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    options = argparse.Namespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with reading.deepspeed_classes(source):
        ds_to_universal.main(options)
