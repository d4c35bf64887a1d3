"""`/oidc`: log in by an OpenID Connect provider, where the service was started with one."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse

from ortlaunch.serve import accounts
from ortlaunch.serve.answers import not_found
from ortlaunch.serve.api.session import address_of, set_cookie
from ortlaunch.serve.limits import network_of
from ortlaunch.serve.oidc import CALLBACK, Provider
from ortlaunch.serve.service import service_of
from ortlaunch.serve.unfit import unfit

COOKIE = "__Host-ortlaunch-oidc"
router = APIRouter(include_in_schema=False)
_WORD = re.compile(r"[a-z_]{1,40}")
_Text = Annotated[str, Query(max_length=4096)]


@router.get("/oidc")
def begin(request: Request) -> RedirectResponse:
    """Sends the browser to the provider."""
    service_of(request).limits.address.take(f"oidc {network_of(address_of(request))}")
    url, browser = _provider(request).begin(_callback(request))
    answer = RedirectResponse(url, 303)
    # Lax: the browser comes back from another site.
    answer.set_cookie(COOKIE, browser, max_age=600, path="/", secure=True, httponly=True, samesite="lax")
    return answer


@router.get(CALLBACK)
def finish(request: Request, state: _Text = "", code: _Text = "", error: _Text = "") -> RedirectResponse:
    """Takes the browser back, and logs its user in."""
    if error:
        # Anybody can make an address with an error, so that only a word of OAuth's form is shown.
        shown = error if _WORD.fullmatch(error) else "it gave no reason"
        raise unfit(f"the provider did not log you in: {shown}")
    provider, browser = _provider(request), request.cookies.get(COOKIE, "")
    name = provider.finish(_callback(request), state, code, browser)
    secret = accounts.login_known(service_of(request), name, address_of(request))
    answer = RedirectResponse("/", 303)
    answer.delete_cookie(COOKIE, path="/", secure=True, httponly=True, samesite="lax")
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
