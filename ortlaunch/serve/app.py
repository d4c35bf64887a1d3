"""Puts the service together."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles

import ortlaunch
from ortlaunch.serve import api, pages
from ortlaunch.serve.access import Caller, Role, needs, require_roles
from ortlaunch.serve.database import open_database
from ortlaunch.serve.guard import Guard
from ortlaunch.serve.service import Service
from ortlaunch.serve.settings import Settings

PARTS = {
    "actor": "ortlaunch.serve.actor:make_actor",
    "queue": "ortlaunch.serve.dispatcher:make_queue",
    "runs": "ortlaunch.serve.index:make_runs",
    "streams": "ortlaunch.serve.streams:make_streams",
}
"""The fields of `Service`, made in this order by a function that takes the service. What has `start` and `stop` is
started and stopped with the service."""
STATIC = Path(__file__).parent / "static"


def make_app(settings: Settings) -> FastAPI:
    """Returns the service as an ASGI application.

    Args:
        settings: how it was started.

    Raises:
        RequestError: its database cannot be used.
        RuntimeError: a route says of nobody that they may use it.
    """
    service = Service(settings, open_database(settings.database))
    for name, target in PARTS.items():
        make = _function(target)
        if make is not None:
            setattr(service, name, make(service))
    app = FastAPI(
        title="ortlaunch",
        version=ortlaunch.__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=_lifespan,
    )
    app.state.service = service
    # The routes are added one by one: `include_router` hides them in an object, where their roles cannot be checked.
    app.router.routes += _own_routes(app).routes
    for package in (api, pages):
        for module in _modules(package):
            if isinstance(router := getattr(module, "router", None), APIRouter):
                app.router.routes += router.routes
    if STATIC.is_dir():
        app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.add_exception_handler(HTTPException, _refused)  # type: ignore[arg-type]
    app.add_exception_handler(RequestValidationError, _malformed)  # type: ignore[arg-type]
    app.add_middleware(Guard, settings=settings)
    require_roles(app.router.routes)
    return app


def _own_routes(app: FastAPI) -> APIRouter:
    router = APIRouter()

    @router.get("/health", include_in_schema=False)
    def health() -> PlainTextResponse:
        return PlainTextResponse("ok\n")

    @router.get("/api/openapi.json", include_in_schema=False)
    def schema(_caller: Caller = Depends(needs(Role.viewer))) -> JSONResponse:  # noqa: B008
        return JSONResponse(app.openapi())

    return router


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    async with AsyncExitStack() as stack:
        stack.callback(service.engine.dispose)
        for name in PARTS:
            part = getattr(service, name)
            if hasattr(part, "start"):
                await anyio.to_thread.run_sync(part.start)
                stack.push_async_callback(anyio.to_thread.run_sync, part.stop)
        yield


async def _refused(request: Request, error: HTTPException) -> Response:
    """A refusal as JSON; somebody who asks for a page without a session is sent to the login."""
    is_page = not request.url.path.startswith("/api/") and "text/html" in request.headers.get("accept", "")
    if error.status_code == 401 and is_page:
        if request.headers.get("hx-request"):
            return Response(status_code=401, headers={"HX-Redirect": "/login"})
        return RedirectResponse("/login", 303)
    return problems([(None, str(error.detail))], error.status_code, dict(error.headers or {}))


async def _malformed(_request: Request, error: RequestValidationError) -> Response:
    found = [(".".join(str(part) for part in one["loc"][1:]) or None, str(one["msg"])) for one in error.errors()]
    return problems(found, 422)


def problems(found: list[tuple[str | None, str]], status: int, headers: dict[str, str] | None = None) -> JSONResponse:
    """Returns the answer that refuses a request.

    Args:
        found: the key that each problem is about, or None, and the message.
        status: the HTTP status.
        headers: further headers.
    """
    content = {"problems": [{"key": key, "message": message} for key, message in found]}
    return JSONResponse(content, status, headers)


def _modules(package: ModuleType) -> list[ModuleType]:
    names = sorted(one.name for one in pkgutil.iter_modules(package.__path__))
    return [importlib.import_module(f"{package.__name__}.{name}") for name in names]


def _function(target: str) -> Callable[[Service], Any] | None:
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is not None and module.startswith(error.name):
            return None
        raise
