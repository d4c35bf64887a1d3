"""Puts the service together."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
from fastapi import APIRouter, Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from sqlalchemy.exc import OperationalError
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

import ortlaunch
from ortlaunch.serve import answers, api, pages
from ortlaunch.serve.access import Caller, Role, needs, require_roles
from ortlaunch.serve.actor import Refused
from ortlaunch.serve.answers import malformed, refused, too_many, unfit
from ortlaunch.serve.database import open_database
from ortlaunch.serve.guard import Guard
from ortlaunch.serve.leaving import Leaving
from ortlaunch.serve.limits import TooManyRequests
from ortlaunch.serve.metrics import CountRequests
from ortlaunch.serve.noted import Noted
from ortlaunch.serve.oidc import Provider
from ortlaunch.serve.openapi import described
from ortlaunch.serve.pages.errors import for_browsers
from ortlaunch.serve.secret import new_secret
from ortlaunch.serve.service import Service
from ortlaunch.serve.settings import OIDC_SECRET, Settings
from ortlaunch.serve.unfit import Unavailable, Unfit

PARTS = {
    "actor": "ortlaunch.serve.actor:make_actor",
    "queue": "ortlaunch.serve.dispatcher:make_queue",
    "machine": "ortlaunch.serve.machine:make_machine",
    "runs": "ortlaunch.serve.index.indexer:make_runs",
    "streams": "ortlaunch.serve.streams:make_streams",
    "on_end": "ortlaunch.serve.on_end:make_on_end",
}
"""The fields of `Service`, made in this order by a function that takes the service. What has `start` and `stop` is
started and stopped with the service; both return soon."""
STATIC = Path(__file__).parent / "static"
OF_COMPARE = ("page/uplot", "page/shared")
"""Folders of `ortlaunch.compare` whose files are served too: what the page of `compare` contains."""
_OIDC_COOKIE = "__Host-ortlaunch-oidc"
_ANSWERS = {
    HTTPException: refused,
    RequestValidationError: malformed,
    Unfit: unfit,
    TooManyRequests: too_many,
    Refused: answers.refused_by_child,
    Unavailable: answers.unavailable,
    OperationalError: answers.without_database,
}


def make_app(settings: Settings) -> FastAPI:
    """Returns the service as an ASGI application.

    Args:
        settings: how it was started.

    Raises:
        RequestError: its database cannot be used.
        RuntimeError: a route says of nobody that they may use it.
    """
    service = Service(settings, open_database(settings.database), provider=_provider(settings))
    for name, target in PARTS.items():
        setattr(service, name, _function(target)(service))
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
        files = StaticFiles(directory=STATIC, packages=[("ortlaunch.compare", folder) for folder in OF_COMPARE])
        app.mount("/static", files, name="static")
    for kind, answer in _ANSWERS.items():
        app.add_exception_handler(kind, for_browsers(answer))
    if service.provider is not None:
        from starlette.middleware.sessions import SessionMiddleware

        # What Authlib remembers of a login that has begun. Lax: the browser comes back from another site.
        app.add_middleware(
            SessionMiddleware,
            secret_key=new_secret(),
            session_cookie=_OIDC_COOKIE,
            max_age=600,
            same_site="lax",
            https_only=True,
        )
    app.add_middleware(Noted, service=service)
    app.add_middleware(Leaving)
    app.add_middleware(Guard, settings=settings)
    # What is added last is the outermost: refusals of the guard are counted too.
    app.add_middleware(CountRequests)
    require_roles(app.router.routes)
    return app


def _provider(settings: Settings) -> Provider | None:
    if settings.oidc_issuer is None or settings.oidc_client is None:
        return None
    return Provider(settings.oidc_issuer, settings.oidc_client, os.environ.get(OIDC_SECRET, ""), settings.oidc_claim)


def _own_routes(app: FastAPI) -> APIRouter:
    router = APIRouter()

    @router.get("/health", include_in_schema=False)
    def health() -> PlainTextResponse:
        return PlainTextResponse("ok\n")

    @router.get("/api/openapi.json", include_in_schema=False)
    def schema(_caller: Caller = Depends(needs(Role.viewer))) -> JSONResponse:  # noqa: B008
        return JSONResponse(described(app))

    return router


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    async with AsyncExitStack() as stack:
        stack.callback(service.engine.dispose)
        for name in PARTS:
            part = getattr(service, name)
            if hasattr(part, "start"):
                await _call(part.start)
                stack.push_async_callback(_call, part.stop)
        yield


async def _call(function: Callable[[], Any]) -> None:
    """Calls a function of a part; one that may block is called in a thread."""
    if inspect.iscoroutinefunction(function):
        await function()
    else:
        await anyio.to_thread.run_sync(function)


def _modules(package: ModuleType) -> list[ModuleType]:
    names = sorted(one.name for one in pkgutil.iter_modules(package.__path__))
    return [importlib.import_module(f"{package.__name__}.{name}") for name in names]


def _function(target: str) -> Callable[[Service], Any]:
    module, _, name = target.partition(":")
    found: Callable[[Service], Any] = getattr(importlib.import_module(module), name)
    return found
