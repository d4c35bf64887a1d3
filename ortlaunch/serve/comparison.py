"""The comparison of some runs, for the API and for the page."""

from __future__ import annotations

from typing import Any

from ortlaunch.serve.access import Caller
from ortlaunch.serve.actor import own_user
from ortlaunch.serve.index.finding import found_run
from ortlaunch.serve.limits import MOST_COMPARED
from ortlaunch.serve.service import Service
from ortlaunch.serve.unfit import unfit


def runs_of(ids: str) -> list[str]:
    """Returns the ids of the runs to compare, each once.

    Args:
        ids: the ids with commas between them.

    Raises:
        Unfit: these are too few or too many.
    """
    asked = list(dict.fromkeys(one for one in ids.split(",") if one))
    if not 2 <= len(asked) <= MOST_COMPARED:
        raise unfit(f"choose 2 to {MOST_COMPARED} runs to compare", "ids")
    return asked


def compared(service: Service, caller: Caller, ids: str) -> dict[str, Any]:
    """Returns the comparison of some runs. It waits for a child.

    The child is a process of the caller's Unix user and reads what that user may read; that of somebody without one
    belongs to the service.

    Args:
        service: the service.
        caller: who asks.
        ids: the ids with commas between them.

    Raises:
        Unfit: these are too few or too many runs.
        HTTPException: there is no such run.
        Refused: the runs cannot be compared.
        Unavailable: there is no answer.
    """
    found = [found_run(service, caller, one) for one in runs_of(ids)]
    reader = caller.unix_user
    if reader is None or not service.actor.may_act_for(reader):
        reader = own_user()
    answer: dict[str, Any] = service.actor.call(reader, "compare", {"run_dirs": [one.place for one in found]})
    return answer
