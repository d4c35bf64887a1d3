"""Reads the files of a checkpoint so that they cannot run code. All that reads a checkpoint uses this module.

A checkpoint may come from another user, and pickles can call any function. torch's files are read with
``weights_only=True``. Of DeepSpeed's own classes only those are known that its checkpoints have. The ``.metadata`` of
torch.distributed.checkpoint is a pickle that torch itself reads without restriction; here its few classes are known.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pathlib
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader

from ortlaunch.base import unpickling
from ortlaunch.base.errors import RequestError
from ortlaunch.base.reading import in_words, is_inside, open_plain, read_bytes

_METADATA = ".metadata"
_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata"),
        *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
}
_PATHS = ("pathlib", "pathlib._local")
_DEEPSPEED_CLASSES = (
    "deepspeed.utils.tensor_fragment:fragment_address",
    "deepspeed.runtime.zero.config:ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler:LossScaler",
    "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler",
)
_FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""torch's variable that makes every ``torch.load`` as strict as ``weights_only=True``, whatever its caller asks for."""


def load(path: Path, map_location: Any = None) -> Any:
    """Reads a file that ``torch.save`` wrote.

    Raises:
        RequestError: the file is damaged, or has a class that no checkpoint has.
    """
    with _refusing(path), open_plain(path) as file:
        return torch.load(file, map_location=map_location, weights_only=True)


def load_deepspeed(path: Path, map_location: Any = None) -> Any:
    """Reads a file of DeepSpeed's.

    Raises:
        RequestError: as `load`.
    """
    with deepspeed_classes(path):
        return load(path, map_location)


@contextlib.contextmanager
def deepspeed_classes(path: Path) -> Iterator[None]:
    """Makes DeepSpeed's own code read its files as strictly as `load`, though it asks torch for everything.

    Args:
        path: what is read, for the message.

    Raises:
        RequestError: a file has a class that no checkpoint of DeepSpeed has.
    """
    before = os.environ.get(_FORCED)
    os.environ[_FORCED] = "1"
    try:
        with _refusing(path), torch.serialization.safe_globals(_known_of_deepspeed()):
            yield
    finally:
        if before is None:
            os.environ.pop(_FORCED, None)
        else:
            os.environ[_FORCED] = before


class Reader(FileSystemReader):
    """torch's reader of a folder of tensors, with a metadata file that is not believed.

    It refuses names of files outside the folder and tensors that are larger than all of its files.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._folder = path
        self._read: dcp.Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """Returns the folder's metadata. The file is read once, so that what was checked is what is used.

        Raises:
            RequestError: it is damaged, or describes something else than tensors in this folder.
        """
        if self._read is None:
            self._read = _read_metadata(self._folder)
        meta = self._read
        meta.storage_meta = meta.storage_meta or dcp.StorageMeta()
        meta.storage_meta.load_id = self.load_id
        return meta


def _read_metadata(folder: Path) -> dcp.Metadata:
    path = folder / _METADATA
    with _refusing(path):
        meta = unpickling.loads(read_bytes(path), _known_of_metadata)
        if not isinstance(meta, dcp.Metadata):
            raise pickle.UnpicklingError("it holds no metadata")
        _check_places(meta, folder)
    return meta


def _check_places(meta: dcp.Metadata, folder: Path) -> None:
    """Checks that every tensor lies in a plain file of the folder, and that none is larger than the files."""
    stored = dict(meta.storage_data or {}).values()
    names = {info.relative_path for info in stored}
    if outside := sorted(str(name) for name in names if not isinstance(name, str) or not is_inside(name)):
        raise pickle.UnpicklingError(f"it names {outside[0]!r}, which is outside the folder")
    if any(getattr(info, "transform_descriptors", None) for info in stored):
        raise pickle.UnpicklingError("its tensors are stored in a form that ortlaunch does not write")
    total = 0
    for name in names:
        with open_plain(folder / name) as file:
            total += os.fstat(file.fileno()).st_size
    for key, entry in meta.state_dict_metadata.items():
        if isinstance(entry, dcp.TensorStorageMetadata):
            size = entry.properties.dtype.itemsize
            for length in entry.size:
                size *= length
            if size > total:
                raise pickle.UnpicklingError(f"{key} would have {size:,} bytes, and its files have {total:,}")


def _known_of_metadata(module: str, name: str) -> Any:
    """What a name in the metadata stands for; None for a name that it never has."""
    if module in _PATHS:
        return pathlib.PurePosixPath if name in ("PosixPath", "PurePosixPath") else None
    if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
        return found
    if name in _METADATA_CLASSES.get(module, ()):
        return getattr(importlib.import_module(module), name)
    return None


@functools.cache
def _known_of_deepspeed() -> list[Any]:
    found = []
    for target in _DEEPSPEED_CLASSES:
        module, _, name = target.partition(":")
        found.append(getattr(importlib.import_module(module), name))
    return found


@contextlib.contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Turns the errors of a reader into one line.

    Raises:
        RequestError: the message names the file and what is wrong with it.
    """
    try:
        yield
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        why = f"it names {named[1]}, which no checkpoint has" if named else in_words(error)
        raise RequestError(f"{path} is not read, because it is no checkpoint of ortlaunch: {why}") from error
    except (OSError, EOFError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
        raise RequestError(f"{path} cannot be read: {in_words(error)}") from error
