"""Refusals as pages, for those who look with a browser."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import HTMLResponse

from ortlaunch.serve.access import caller_or_none
from ortlaunch.serve.pages.render import render

_TITLES = {
    400: "This request cannot be understood",
    403: "You may not see this",
    404: "There is nothing here",
    409: "This cannot be done now",
    422: "This request cannot be done",
    429: "Too many requests",
    503: "The service cannot do this now",
}


def error_page(request: Request, status: int, message: str) -> HTMLResponse:
    """Returns a refusal as a page.

    Args:
        request: what was refused.
        status: the HTTP status.
        message: why, and what to do.
    """
    title = _TITLES.get(status, "Something went wrong")
    page = render(request, "error.html", caller_or_none(request), title=title, message=message)
    page.status_code = status
    return page
