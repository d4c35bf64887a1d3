"""`/oidc`: log in by an OpenID Connect provider, where the service was started with one."""

from __future__ import annotations

import re
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse

from ortlaunch.serve import accounts
from ortlaunch.serve.answers import not_found
from ortlaunch.serve.api.session import address_of, set_cookie
from ortlaunch.serve.limits import network_of
from ortlaunch.serve.oidc import CALLBACK, Provider
from ortlaunch.serve.service import service_of
from ortlaunch.serve.unfit import unfit

router = APIRouter(include_in_schema=False)
_WORD = re.compile(r"[a-z_]{1,40}")
_Text = Annotated[str, Query(max_length=4096)]


@router.get("/oidc")
async def begin(request: Request) -> RedirectResponse:
    """Sends the browser to the provider."""
    service_of(request).limits.address.take(f"oidc {network_of(address_of(request))}")
    return await _provider(request).begin(request, _callback(request))


@router.get(CALLBACK)
async def finish(request: Request, error: _Text = "") -> RedirectResponse:
    """Takes the browser back, and logs its user in."""
    if error:
        # Anybody can make an address with an error, so that only a word of OAuth's form is shown.
        shown = error if _WORD.fullmatch(error) else "it gave no reason"
        raise unfit(f"the provider did not log you in: {shown}")
    subject, name = await _provider(request).finish(request)
    words = service_of(request), name, address_of(request), subject
    secret = await to_thread.run_sync(accounts.login_known, *words)
    answer = RedirectResponse("/", 303)
    set_cookie(answer, secret)
    return answer


def _provider(request: Request) -> Provider:
    provider = service_of(request).provider
    if provider is None:
        raise not_found("this service has no OpenID Connect provider")
    return provider


def _callback(request: Request) -> str:
    settings = service_of(request).settings
    return f"{(settings.public_url or f'{request.url.scheme}://{request.url.netloc}').rstrip('/')}{CALLBACK}"
