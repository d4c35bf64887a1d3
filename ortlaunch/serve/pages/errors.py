"""Refusals as pages, for those who look with a browser."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

import anyio
from fastapi import Request
from fastapi.responses import HTMLResponse, Response
from sqlalchemy.exc import OperationalError

from ortlaunch.serve.access import Caller, caller_or_none
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

_IN_WORDS = {"Not Found": "the service has no page of this address: it may be misspelt"}
"""Messages of the server that say no more than the title."""


def error_page(request: Request, status: int, message: str) -> HTMLResponse:
    """Returns a refusal as a page.

    Args:
        request: what was refused.
        status: the HTTP status.
        message: why, and what to do.
    """
    title = _TITLES.get(status, "Something went wrong")
    page = render(request, "error.html", _caller(request), title=title, message=message)
    page.status_code = status
    return page


def for_browsers(answer: Callable[[Request, Exception], Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
    """Wraps the handler of an exception: its refusals become pages where a browser shows them to a person.

    Args:
        answer: the handler, which refuses by `answers.problems`.
    """

    async def either(request: Request, error: Exception) -> Response:
        response = await answer(request, error)
        if response.status_code < 400 or not _is_for_person(request):
            return response
        found = [one["message"] for one in json.loads(bytes(response.body))["problems"]]
        messages = [_IN_WORDS.get(message, message) for message in found]
        status = response.status_code
        return await anyio.to_thread.run_sync(error_page, request, status, " ".join(messages))

    return either


def _caller(request: Request) -> Caller | None:
    try:
        return caller_or_none(request)
    except OperationalError:
        # It may be the database that the page is about.
        return None


def _is_for_person(request: Request) -> bool:
    path, headers = request.url.path, request.headers
    asks = "text/html" in headers.get("accept", "") and "hx-request" not in headers
    return asks and not path.startswith(("/api/", "/static/"))
