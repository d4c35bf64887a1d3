"""Renders the templates. Whatever they show is escaped, without secrets, and cannot change a page's look."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ortlaunch.base.text import public_text
from ortlaunch.compare import page as comparison
from ortlaunch.serve.access import Caller, Role
from ortlaunch.serve.guard import csrf_token
from ortlaunch.serve.service import service_of

TEMPLATES = Path(__file__).parents[1] / "templates"
_UNITS = ("B", "kB", "MB", "GB", "TB")
_LATE_SECONDS = 60.0
"""A look at the run folders that takes longer than this is told on every page: a file server may hang."""
_LARGE = 1000
_SMALL = 0.001


def render(request: Request, template: str, caller: Caller | None, **values: Any) -> HTMLResponse:
    """Returns a page.

    Args:
        request: the request that it answers.
        template: the template's file name.
        caller: who asks; None if nobody is logged in.
        values: what the template shows.
    """
    service = service_of(request)
    known = {
        "caller": caller,
        "is_admin": caller is not None and caller.role is Role.admin,
        "is_runner": caller is not None and caller.role >= Role.runner,
        # Also for a session that is over: its cookie is still sent, with the login too.
        "csrf": csrf_token(request.headers),
        "shared_account": service.settings.shared_account,
        "late_roots": service.runs.late(_LATE_SECONDS),
    }
    return HTMLResponse(_environment().get_template(template).render({**known, **values}))


def is_part(request: Request) -> bool:
    """Whether htmx asks for a part of a page that it has, rather than for the page."""
    return "hx-request" in request.headers and "hx-history-restore-request" not in request.headers


@lru_cache(maxsize=1)
def _environment() -> Environment:
    # Everything is escaped, whatever a template is called.
    environment = Environment(
        loader=FileSystemLoader([TEMPLATES, comparison.TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "plain": plain,
        "number": number,
        "count": count,
        "duration": duration,
        "facts": facts,
        "meaning": meaning,
        "moment": moment,
        "size": size,
        "state_class": state_class,
    }
    # Names, reasons and values of any origin pass this one place, so that no template can forget it.
    environment.finalize = lambda value: public_text(value) if type(value) is str else value
    return environment


def plain(text: object) -> Markup:
    """A text of several lines, each as `public_text`, escaped."""
    return Markup("\n").join(public_text(line) for line in str(text).split("\n"))


def meaning(text: str) -> Markup:
    """What a key means, with what stands between backquotes as code."""
    parts = enumerate(str(text).split("`"))
    return Markup("").join(Markup("<code>{}</code>").format(part) if at % 2 else part for at, part in parts)


def number(value: float | None) -> str:
    """A number with four digits, as `format.js` writes it."""
    if value is None:
        return "\N{EN DASH}"
    if not math.isfinite(value):
        return str(value)
    size_ = abs(value)
    if value == 0 or _SMALL <= size_ < _LARGE:
        return f"{float(f'{value:.4g}'):g}"
    if _LARGE <= size_ < 1e9:
        return f"{round(value):,}"
    return f"{value:.2e}".replace("e-0", "e-").replace("e+0", "e+")


def count(value: int | None) -> str:
    """A number of things with all its digits, as `format.js` writes it."""
    return "\N{EN DASH}" if value is None else f"{value:,}"


def duration(seconds: float | None) -> str:
    """A time span in its two largest units, as `format.js` writes it; from ten minutes on without seconds."""
    if seconds is None:
        return "\N{EN DASH}"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def facts(text: str) -> str:
    """What the audit has beside an action, as words and values; as it is where it is no whole JSON, because it was cut.

    The values are looked at one by one: as one text, ``"keys": {…}`` would count as a secret whole.
    """
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return ", ".join(_facts(found)) if isinstance(found, dict) else text


def _facts(found: dict[str, Any]) -> Iterator[str]:
    for name, value in found.items():
        if isinstance(value, dict):
            yield from _facts(value)
        elif value is not None:
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield f"{name} {shown}"


def moment(seconds: float | None) -> Markup:
    """A time as a `time` element; the page writes it in the reader's own zone."""
    if not seconds:
        return Markup("\N{EN DASH}")
    try:
        at = datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        # A clock that was wrong, or a run folder that somebody has named so.
        return Markup("\N{EN DASH}")
    return Markup('<time datetime="{}">{} UTC</time>').format(
        at.strftime("%Y-%m-%dT%H:%M:%SZ"), at.strftime("%Y-%m-%d %H:%M")
    )


def size(count: float) -> str:
    """A number of bytes, as `format.js` writes it."""
    unit = 0
    while count >= _LARGE and unit < len(_UNITS) - 1:
        count, unit = count / _LARGE, unit + 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


def state_class(state: str) -> str:
    """The classes of a state's badge."""
    return "state state-" + "".join(char for char in state if "a" <= char <= "z")
