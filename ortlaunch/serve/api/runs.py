"""The routes that show runs: the list, one run, its curves, logs, configuration and files, and the comparison."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Annotated, Any, BinaryIO
from urllib.parse import quote

import yaml
from anyio import to_thread
from fastapi import APIRouter, Depends, HTTPException, Query
from fastapi.responses import StreamingResponse
from pydantic import Field

from ortlaunch.serve import follow
from ortlaunch.serve.access import Caller, Role, may_change, needs, still_allowed
from ortlaunch.serve.api.shapes import Configuration, Curves, Detail, Facets, LogPart, Page
from ortlaunch.serve.comparison import compared
from ortlaunch.serve.follow.beneath import open_beneath
from ortlaunch.serve.follow.curves import MOST_POINTS
from ortlaunch.serve.follow.details import may_fetch
from ortlaunch.serve.follow.logs import MOST_BYTES, PAGE_BYTES
from ortlaunch.serve.index.asked import RunQuery, Word
from ortlaunch.serve.index.finding import found_run
from ortlaunch.serve.index.listing import MOST_ROWS
from ortlaunch.serve.service import Service, service_of
from ortlaunch.serve.waiting import in_thread, reading_run

router = APIRouter()
Shared = Annotated[Service, Depends(service_of)]
Viewer = Annotated[Caller, Depends(needs(Role.viewer))]
_LARGEST_NUMBER = 2**53
_BLOCK = 256 * 1024
_ASK_SECONDS = 2.0
"""How often it is asked during a download whether the caller still may: one of a large file goes on for hours."""


class PageQuery(RunQuery):
    """A part of the list of runs with the number of its rows."""

    size: Annotated[int, Field(ge=1, le=MOST_ROWS)] = follow.PAGE_ROWS


@router.get("/api/runs")
def list_runs(service: Shared, caller: Viewer, query: Annotated[PageQuery, Query()]) -> Page:
    """A page of the list of runs, waiting ones among them. `state`, `owner` and `experiment` take several values."""
    return follow.list_runs(service, caller, query, query.size)


@router.get("/api/facets")
def facets(service: Shared, caller: Viewer) -> Facets:
    """What the list can be filtered by, and the number of runs in each state."""
    return follow.facets(service, caller)


@router.get("/api/runs/{id}")
async def run_detail(service: Shared, caller: Viewer, id: str) -> Detail:
    """One run. `id` is its key, its short id or the id of its job in the queue."""
    return await reading_run(service, caller, id, follow.run_detail, service, caller, id)


@router.get("/api/runs/{id}/metrics")
async def run_metrics(
    service: Shared,
    caller: Viewer,
    id: str,
    names: Annotated[str, Query(max_length=8192)] = "",
    points: Annotated[int, Query(ge=2, le=MOST_POINTS)] = MOST_POINTS,
) -> Curves:
    """The curves of a run, each with at most `points` points, of which the lowest and highest values are among them.

    `names` has commas between the metrics; without it the first forty come.
    """
    wanted = [name for name in names.split(",") if name]
    return await reading_run(service, caller, id, follow.run_metrics, service, caller, id, wanted, points)


@router.get("/api/runs/{id}/logs/{rank}")
async def run_log(
    service: Shared,
    caller: Viewer,
    id: str,
    rank: str,
    offset: Annotated[int | None, Query(ge=-_LARGEST_NUMBER, le=_LARGEST_NUMBER)] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_BYTES)] = PAGE_BYTES,
    search: Word = "",
) -> LogPart:
    """Whole lines of a log from a byte on; a negative `offset` counts from the end. With `search` the lines that have
    the word, from `offset` on."""
    read = partial(follow.run_log, offset=offset, limit=limit, word=search)
    return await reading_run(service, caller, id, read, service, caller, id, rank)


@router.get("/api/runs/{id}/logs/{rank}/text", response_class=StreamingResponse)
async def run_log_text(service: Shared, caller: Viewer, id: str, rank: str) -> StreamingResponse:
    """A whole log as a file, as the page shows it: without secrets and control characters."""

    async def part(offset: int) -> LogPart:
        read = partial(follow.run_log, offset=offset, limit=MOST_BYTES)
        return await reading_run(service, caller, id, read, service, caller, id, rank)

    async def text(found: LogPart) -> AsyncIterator[bytes]:
        at = -1
        while found["next"] > at:
            at = found["next"]
            yield (found["text"] if found["more"] else found["text"] + found["rest"]).encode(errors="replace")
            if not found["more"] or not await to_thread.run_sync(still_allowed, service, caller):
                return
            found = await part(at)

    name = quote(f"{id}-{rank}.log", safe="")
    headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{name}"}
    return StreamingResponse(text(await part(0)), headers=headers, media_type="text/plain; charset=utf-8")


@router.get("/api/runs/{id}/config")
async def run_config(service: Shared, caller: Viewer, id: str, against: Word = "") -> Configuration:
    """The configuration of a run, without secrets, and how that of the run `against` differs."""
    settings = await reading_run(service, caller, id, follow.run_settings, service, caller, id)
    other = (
        await reading_run(service, caller, against, follow.run_settings, service, caller, against) if against else None
    )
    return await to_thread.run_sync(follow.configuration, settings, other)


@router.get("/api/runs/{id}/files/{name:path}", response_class=StreamingResponse)
async def run_file(service: Shared, caller: Viewer, id: str, name: str) -> StreamingResponse:
    """A file of a run, to be saved: a record, a log, a failure, weights, an exported graph or a checkpoint's file.

    What workers wrote is not searched for secrets here, so it is for the owner and for administrators.
    """
    place, file, size = await reading_run(service, caller, id, _opened, service, caller, id, name)
    headers = {
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(name.rpartition('/')[2], safe='')}",
        "Content-Length": str(size),
    }
    content = _content(partial(service.readers.call, place), file, size, lambda: still_allowed(service, caller))
    kind = "image/png" if name.endswith(".png") else "application/octet-stream"
    return StreamingResponse(content, headers=headers, media_type=kind)


@router.get("/api/compare")
async def compare(service: Shared, caller: Viewer, ids: Annotated[str, Query(max_length=2048)]) -> dict[str, Any]:
    """The comparison of some runs, as `ortlaunch compare` makes it. `ids` has commas between the runs."""
    return await in_thread(caller, compared, service, caller, ids, is_long=True)


def _opened(service: Service, caller: Caller, asked: str, name: str) -> tuple[str, BinaryIO, int]:
    """Opens a file of a run; returns the run folder, the file and its size."""
    found = found_run(service, caller, asked)
    run = found.run
    raw = {one.name for one in (run.logs, run.failures, run.stacks, run.journal_file)}
    is_raw = name.partition("/")[0] in raw or (name.startswith(f"{run.logged.name}/") and not name.endswith(".png"))
    if is_raw and not may_change(caller, found.owner):
        raise HTTPException(403, "this file is for the run's owner; the page of the run shows logs without secrets")
    try:
        if not may_fetch(run, name):
            raise FileNotFoundError
        file = (
            _without_secrets(service, caller, asked, name)
            if name == run.config_file.name
            else open_beneath(run.path, name)
        )
    except OSError:
        raise HTTPException(404, "the run has no such file, or it cannot be read") from None
    return found.place, file, os.fstat(file.fileno()).st_size


def _without_secrets(service: Service, caller: Caller, asked: str, name: str) -> BinaryIO:
    """The configuration as the page shows it: a folder of an earlier version, or of another program, may have more."""
    settings = follow.run_settings(service, caller, asked)
    if not settings:
        raise FileNotFoundError
    file = os.fdopen(os.memfd_create(name), "w+b")
    file.write(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).encode())
    file.seek(0)
    return file


async def _content(
    in_thread: Callable[..., Awaitable[Any]], file: BinaryIO, size: int, may_go_on: Callable[[], bool]
) -> AsyncIterator[bytes]:
    """The bytes that a file has now; what is appended while it is sent would not fit the length that was told.

    It ends early, which the client sees by the length, when the token was revoked or the session has ended.
    """
    asked = time.monotonic()
    is_being_read = False
    try:
        while size > 0:
            is_being_read = True
            block = await in_thread(file.read, min(_BLOCK, size))
            is_being_read = False
            if not block:
                return
            if time.monotonic() - asked >= _ASK_SECONDS:
                if not await to_thread.run_sync(may_go_on):
                    return
                asked = time.monotonic()
            size -= len(block)
            yield block
    finally:
        # Closing it would wait for a read that hangs. That thread drops the file when it ends, which closes it too.
        if not is_being_read:
            file.close()
