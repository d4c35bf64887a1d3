"""Opens data sets of the `datasets` library: saved to disk, as data files, or on the hub."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ortlaunch.base.errors import RequestError
from ortlaunch.base.modules import is_missing
from ortlaunch.data.classes import open_labelled
from ortlaunch.data.encoding import Encoder, encode_all, load_encoder
from ortlaunch.data.files import UNSET, find_files
from ortlaunch.data.holdout import is_held_out
from ortlaunch.data.packing import PackedStream
from ortlaunch.data.source import Share, Source, array_source, digest, digest_files

if TYPE_CHECKING:
    from ortlaunch.data.sources.hf import HfDataConfig

BUILDERS = {
    ".json": "json",
    ".jsonl": "json",
    ".txt": "text",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
"""The builder of the `datasets` library for a data file's ending. The library finds the builder of a folder itself."""

ROWS_AT_ONCE = 1000


def open_hf(cfg: HfDataConfig, share: Share) -> Source:
    """Opens a split and packs the rows of its text column into samples of data.seq_len tokens.

    Without data.streaming, every rank reads and tokenizes the whole split into memory when it starts. With it, each
    rank reads its own part during training: whole shards if their number divides evenly, else every n-th row.

    Raises:
        RequestError: the library, the data set, the split or the column is missing, or there is less than one sample.
    """
    datasets = import_datasets("data=hf", quiet=share.rank > 0)
    if cfg.eval_split == cfg.split:
        raise RequestError(f"data.eval_split={cfg.eval_split}: is the same as data.split; null holds out a part of it")
    if cfg.label_column is not None:
        rows = partial(_labelled_rows, datasets, cfg, share)
        return open_labelled(cfg, rows(cfg.split), None if cfg.eval_split is None else rows(cfg.eval_split), datasets)
    encoder = load_encoder(cfg.tokenizer)
    if cfg.eval_split is None:
        return _open_split(datasets, cfg, share, encoder)
    # Each split is used whole, so no part of it is held out.
    whole = replace(cfg, eval_fraction=0.0)
    held_out = _open_split(datasets, replace(whole, split=cfg.eval_split), _everything(share), encoder).dataset
    return replace(_open_split(datasets, whole, share, encoder), held_out=held_out)


def _labelled_rows(datasets: ModuleType, cfg: HfDataConfig, share: Share, split: str) -> Any:
    with _refusing(datasets, cfg):
        data = _load(datasets, replace(cfg, split=split), share)
    if not len(data):
        raise RequestError(f"{_origin(cfg)}: split {split} has no rows")
    for key in ("column", "pair_column", "label_column"):
        name = getattr(cfg, key)
        if name is not None and name not in data.column_names:
            raise RequestError(f"data.{key}={name}: {cfg.path} has the columns {', '.join(data.column_names)}")
    return data


def _open_split(datasets: ModuleType, cfg: HfDataConfig, share: Share, encoder: Encoder) -> Source:
    with _refusing(datasets, cfg):
        data = _load(datasets, cfg, share)
        # A stream reads its files only now.
        row = next(iter(data), None)
    _check_column(row, cfg)
    if not cfg.streaming:
        tokens = encode_all(_texts(data, cfg.column), encoder)
        return array_source(tokens, cfg.seq_len, _origin(cfg), encoder.vocab_size)
    stream = partial(PackedStream, data, encoder=encoder, seq_len=cfg.seq_len, column=cfg.column)
    trained = stream(share, belongs=lambda document: not is_held_out(document, cfg.eval_fraction))
    return Source(
        trained,
        "tokens",
        _origin(cfg),
        _stream_fingerprint(cfg),
        vocab_size=encoder.vocab_size,
        max_workers=trained.shards,
        held_out=stream(_everything(share), belongs=lambda document: is_held_out(document, cfg.eval_fraction)),
        labels_vary=False,
    )


def _everything(share: Share) -> Share:
    """What each rank reads of a stream that is evaluated on: all of it, in the order of the data."""
    return Share(0, 1, share.seed, shuffles=False)


def import_datasets(asked: str, *, quiet: bool = False) -> ModuleType:
    """Imports the library.

    Args:
        asked: what needs it, for a message.
        quiet: show no progress.

    Raises:
        RequestError: it is not installed.
    """
    try:
        import datasets
    except ImportError as error:
        if not is_missing("datasets", error):
            raise
        raise RequestError(f"{asked} needs the datasets library: pip install 'ortlaunch[hf]'") from error
    if quiet:
        datasets.disable_progress_bars()
    return datasets


def _load(datasets: ModuleType, cfg: HfDataConfig, share: Share) -> Any:
    if cfg.path.strip() in UNSET:
        raise RequestError("data.path is not set: give a folder, a data file or an id on the hub")
    path = Path(cfg.path).expanduser()
    if is_saved(path):
        data = load_saved(datasets, path, cfg.split)
        if not cfg.streaming:
            return data
        shards = share.world_size * max(1, cfg.workers)
        return data.to_iterable_dataset(num_shards=max(1, min(shards, len(data))))
    return _load_files_or_hub(datasets, path, cfg)


@contextlib.contextmanager
def _refusing(datasets: ModuleType, cfg: HfDataConfig) -> Iterator[None]:
    """Turns the errors of the library into one message."""
    try:
        yield
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise RequestError(f"data.path={cfg.path}: cannot be loaded: {_reason(error)}") from error


def is_saved(path: Path) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def load_saved(datasets: ModuleType, path: Path, split: str) -> Any:
    """Loads a split of a folder that `save_to_disk` wrote.

    Raises:
        RequestError: the folder has no such split.
    """
    data = datasets.load_from_disk(str(path))
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise RequestError(f"data.split={split}: {path} has the splits {', '.join(data)}")
        data = data[split]
    elif data.split is not None and str(data.split) != split:
        raise RequestError(f"data.split={split}: {path} is the split {data.split}; set data.split={data.split}")
    return data


def _load_files_or_hub(datasets: ModuleType, path: Path, cfg: HfDataConfig) -> Any:
    options: dict[str, Any] = {"name": cfg.config, "split": cfg.split, "streaming": cfg.streaming}
    if path.is_dir():
        return datasets.load_dataset(str(path), **options)
    if path.is_file():
        if path.suffix not in BUILDERS:
            raise RequestError(f"data.path={cfg.path}: not a data file; known are {', '.join(BUILDERS)}")
        return datasets.load_dataset(BUILDERS[path.suffix], data_files=str(path), **options)
    if _looks_local(cfg.path):
        raise RequestError(f"data.path={cfg.path}: no such file or folder")
    return datasets.load_dataset(cfg.path, **options)


def _looks_local(value: str) -> bool:
    """Whether a name must be a local path, because an id on the hub is `name` or `owner/name`."""
    return value.startswith(("/", ".", "~")) or value.count("/") > 1 or Path(value).suffix in BUILDERS


def _check_column(row: Any, cfg: HfDataConfig) -> None:
    if row is None:
        raise RequestError(f"{_origin(cfg)}: split {cfg.split} has no rows")
    if cfg.column not in row:
        raise RequestError(f"data.column={cfg.column}: {cfg.path} has the columns {', '.join(row)}")
    if not isinstance(row[cfg.column], str | None):
        kind = type(row[cfg.column]).__name__
        raise RequestError(f"data.column={cfg.column}: holds {kind}, not text; {cfg.path} has {', '.join(row)}")


def _texts(data: Any, column: str) -> Iterator[str]:
    for rows in data.select_columns([column]).iter(batch_size=ROWS_AT_ONCE):
        yield from (text for text in rows[column] if text is not None)


def _stream_fingerprint(cfg: HfDataConfig) -> str:
    parts = ["stream", cfg.config or "", cfg.split, cfg.column]
    if cfg.tokenizer is not None:
        parts.append(digest_files(find_files(cfg.tokenizer, key="data.tokenizer")))
    if Path(cfg.path).expanduser().exists():
        return digest_files(find_files(cfg.path), *parts)
    return digest(cfg.path, *parts)


def _origin(cfg: HfDataConfig) -> str:
    return f"data.path={cfg.path}"


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause. The library wraps it in errors that do not say what went wrong."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().partition("\n")[0] or type(error).__name__
