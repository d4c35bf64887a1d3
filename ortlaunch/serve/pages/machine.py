"""The machine: what is busy and whose it is, now and over the last day."""

from __future__ import annotations

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
    values = {
        "now": None if found.now is None else found.now.seen_by(caller),
        "charts": _charts(found),
        "width": _WIDTH,
        "height": _HEIGHT,
    }
    return render(request, "machine_state.html" if is_part(request) else "machine.html", caller, **values)


def _charts(found: Machine) -> list[tuple[str, float, str]]:
    """What is measured: its name, its share now, and the points of its line over the last day."""
    now = found.now
    if now is None:
        return []
    parts = {name.capitalize(): (name, "") for name in ("cores", "memory", "disk")}
    parts |= {f"{gpu}, {what}": (gpu, what) for gpu in now.gpus for what in ("busy", "memory")}
    looks = [*found.day, now]
    return [
        (title, _share(now, *part), " ".join(_point(look, _share(look, *part), now.at) for look in looks))
        for title, part in parts.items()
    ]


def _share(look: Look, name: str, what: str) -> float:
    found = look.gpus.get(name, {}).get(what, 0.0) if what else getattr(look, name)
    return float(found)


def _point(look: Look, share: float, now: float) -> str:
    return f"{_WIDTH * (1 - (now - look.at) / _DAY):.1f},{_HEIGHT * (1 - min(1.0, share)):.1f}"
