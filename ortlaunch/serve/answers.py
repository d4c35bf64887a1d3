"""The form of refusals: `{"problems": [{"key": …, "message": …}]}`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from urllib.parse import urlencode

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse, Response
from sqlalchemy.exc import OperationalError
from starlette.exceptions import HTTPException as AnyHTTPException

from ortlaunch.base.text import printable, public_text
from ortlaunch.serve.actor import Refused
from ortlaunch.serve.limits import TooManyRequests
from ortlaunch.serve.unfit import Unavailable, Unfit

_LOG = logging.getLogger(__name__)
_MOST_PROBLEMS = 50


def problems(
    found: list[tuple[str | None, str]], status: int = 422, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Returns the answer that refuses a request.

    Args:
        found: the key that each problem is about, or None, and the message.
        status: the HTTP status.
        headers: further headers.
    """
    # A key may be one that was sent, with what is no text and could not be sent back.
    shown = [
        {"key": None if key is None else printable(key), "message": public_text(message)}
        for key, message in found[:_MOST_PROBLEMS]
    ]
    return JSONResponse({"problems": shown}, status, headers)


async def refused(request: Request, error: Exception) -> Response:
    """A refusal as JSON; somebody who asks for a page without a session is sent to the login."""
    assert isinstance(error, AnyHTTPException)
    is_page = not request.url.path.startswith("/api/") and "text/html" in request.headers.get("accept", "")
    if error.status_code == 401 and request.headers.get("hx-request"):
        return Response(status_code=401, headers={"HX-Redirect": "/login"})
    if error.status_code == 401 and is_page:
        wanted = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse("/login" if wanted == "/" else f"/login?{urlencode({'next': wanted})}", 303)
    return problems([(None, str(error.detail))], error.status_code, error.headers)


async def malformed(_request: Request, error: Exception) -> Response:
    """The answer to a request that is not of the form that the route declares."""
    assert isinstance(error, RequestValidationError)
    found = [(".".join(str(part) for part in one["loc"][1:]) or None, str(one["msg"])) for one in error.errors()]
    return problems(found)


async def too_many(_request: Request, error: Exception) -> Response:
    """The answer when a limit was reached."""
    assert isinstance(error, TooManyRequests)
    headers = {"Retry-After": str(error.seconds)}
    return problems([(None, f"too many requests: try again in {error.seconds} s")], 429, headers)


def not_found(what: str) -> HTTPException:
    """Returns the error of a request for something that does not exist.

    Args:
        what: what was asked for, such as ``no such run``.
    """
    return HTTPException(404, what)


async def unfit(_request: Request, error: Exception) -> Response:
    """The answer to a request that cannot be done, with everything that is wrong with it."""
    assert isinstance(error, Unfit)
    return problems([(one.key, one.message) for one in error.problems])


async def refused_by_child(_request: Request, error: Exception) -> Response:
    """The answer to what the checks refuse when it is composed, or the run's state does not allow."""
    assert isinstance(error, Refused)
    return problems([(error.key, error.message)])


async def without_database(_request: Request, error: Exception) -> Response:
    """The answer while the database cannot be used, for example because its disk is full."""
    assert isinstance(error, OperationalError)
    _LOG.error("the database cannot be used: %s", error.orig)
    return problems([(None, f"the service cannot use its database now: {error.orig}")], 503, {"Retry-After": "5"})


async def unavailable(_request: Request, error: Exception) -> Response:
    """The answer when a child gave none."""
    assert isinstance(error, Unavailable)
    return problems([(None, str(error))], 503, {"Retry-After": "5"})
