"""Opens what a user's own function returns: a data set, or several with how they are collated."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from ortlaunch.base.errors import RequestError
from ortlaunch.base.modules import add_working_folder
from ortlaunch.base.targets import check_arguments, load_target
from ortlaunch.data.batch import Batch, check, collate
from ortlaunch.data.reading import explained, seeded
from ortlaunch.data.source import Share, Source, digest

if TYPE_CHECKING:
    from ortlaunch.data.sources.factory import FactoryConfig

TRAIN, EVAL, COLLATE = "train", "eval", "collate"
_WANTED = "return a torch.utils.data.Dataset, or a mapping with 'train' and, if you like, 'eval' and 'collate'"


def open_own(cfg: FactoryConfig, share: Share) -> Source:
    """Calls the function that ``data.target`` names, on every worker with the same random numbers.

    Raises:
        RequestError: the function or an argument is unknown, or what it returns cannot be trained on.
    """
    where = f"data.target={cfg.target}"
    add_working_folder()
    build = load_target(cfg.target, where)
    check_arguments(build, cfg.params, cfg.target, "data.params")
    with explained(where), seeded(share.seed % 2**32):
        made = build(**cfg.params)
    parts = _parts(made, build, where)
    trained, is_stream = parts[TRAIN], _is_stream(parts[TRAIN], where)
    if cfg.shard and not is_stream:
        raise RequestError(f"data.shard=true: {where} returns a data set with numbers, which is shared out anyway")
    if EVAL in parts:
        _is_stream(parts[EVAL], where)
    size = None if is_stream else len(trained)
    if size == 0:
        raise RequestError(f"{where} returns an empty data set: its len() is 0")
    gather = parts.get(COLLATE) or getattr(trained, COLLATE, None) or collate
    if not callable(gather):
        raise RequestError(f"{where}: its collate is a {type(gather).__name__}, not a function from samples to a batch")
    return Source(
        trained,
        "own",
        where,
        digest(cfg.target, json.dumps(cfg.params, sort_keys=True, default=str), str(size)),
        held_out=parts.get(EVAL),
        collate=_checked(gather, where),
        is_divided=cfg.shard,
    )


def _parts(made: Any, build: Callable[..., Any], where: str) -> dict[str, Any]:
    """What was returned, by the names of `TRAIN`, `EVAL` and `COLLATE`."""
    if not isinstance(made, Mapping):
        return {TRAIN: made}
    unknown = [str(name) for name in made if name not in (TRAIN, EVAL, COLLATE)]
    if unknown or made.get(TRAIN) is None:
        raise RequestError(
            f"{where} returns a mapping with {', '.join(map(str, made)) or 'nothing'} ({_place(build)}): {_WANTED}"
        )
    return {name: value for name, value in made.items() if value is not None}


def _is_stream(data: Any, where: str) -> bool:
    """Whether a data set is read from its beginning, without numbers.

    Raises:
        RequestError: it is no data set.
    """
    kind = type(data)
    place = f" ({at})" if (at := _place(kind)) else ""
    if isinstance(data, IterableDataset):
        return True
    if isinstance(data, DataLoader):
        raise RequestError(f"{where} returns a DataLoader: return its data set, ortlaunch makes the loader")
    if isinstance(data, Iterator):
        raise RequestError(
            f"{where} returns a {kind.__name__}, which can be read once: return an object whose __iter__ begins anew, "
            "such as a torch.utils.data.IterableDataset"
        )
    has_numbers = hasattr(data, "__getitem__")
    if isinstance(data, str | bytes) or not (has_numbers or hasattr(data, "__iter__")):
        raise RequestError(f"{where} returns a {kind.__name__}{place}: {_WANTED}")
    if has_numbers and not hasattr(data, "__len__"):
        raise RequestError(
            f"{where} returns a {kind.__name__} without __len__{place}: let it say how many samples it has, or make it "
            "a torch.utils.data.IterableDataset"
        )
    return not has_numbers


def _place(made_by: Any) -> str:
    """Where a class or function stands, as ``file:line``; empty if nobody knows."""
    try:
        return f"{inspect.getsourcefile(made_by)}:{inspect.getsourcelines(made_by)[1]}"
    except (TypeError, OSError):
        return ""


def _checked(gather: Callable[[list[Any]], Batch], where: str) -> Callable[[list[Any]], Batch]:
    def gathered(samples: list[Any]) -> Batch:
        batch = gather(samples)
        check(batch, where)
        return batch

    return gathered
