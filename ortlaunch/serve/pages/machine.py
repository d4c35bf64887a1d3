"""The machine: what is busy and whose it is, now and over the last day."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from ortlaunch.serve.access import Caller, Role, needs
from ortlaunch.serve.machine import Look, Machine
from ortlaunch.serve.pages.render import is_part, render
from ortlaunch.serve.service import service_of

router = APIRouter(include_in_schema=False)
_DAY = 86400.0
_WIDTH, _HEIGHT = 480, 48


@router.get("/machine")
def machine(request: Request, caller: Annotated[Caller, Depends(needs(Role.viewer))]) -> HTMLResponse:
    """The state of the machine."""
    found: Machine = service_of(request).machine
    values = {"now": found.now, "charts": _charts(found), "width": _WIDTH, "height": _HEIGHT}
    return render(request, "machine_state.html" if is_part(request) else "machine.html", caller, **values)


def _charts(found: Machine) -> list[tuple[str, float, str]]:
    """What is measured: its name, its share now, and the points of its line over the last day."""
    now = found.now
    if now is None:
        return []
    asked: list[tuple[str, Callable[[Look], float]]] = [
        ("Cores", lambda look: look.cores),
        ("Memory", lambda look: look.memory),
        ("Disk", lambda look: look.disk),
    ]
    for name in now.gpus:
        for what in ("busy", "memory"):
            asked.append((f"{name}, {what}", lambda look, n=name, w=what: look.gpus.get(n, {}).get(w, 0.0)))
    looks = [*found.day, now]
    return [(name, share(now), " ".join(_point(look, share(look), now.at) for look in looks)) for name, share in asked]


def _point(look: Look, share: float, now: float) -> str:
    return f"{_WIDTH * (1 - (now - look.at) / _DAY):.1f},{_HEIGHT * (1 - min(1.0, share)):.1f}"
