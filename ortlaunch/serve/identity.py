"""Whom a proxy vouches for by a header, as oauth2-proxy does: `X-Forwarded-User`, from the proxy's address alone."""

from __future__ import annotations

import ipaddress

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from ortlaunch.serve.connections import is_in

_FOUND = "ortlaunch.identity"


class ByProxy:
    """Takes the header from requests of the proxy. It stands before whatever replaces the proxy's address."""

    def __init__(self, app: ASGIApp, proxy: str, header: str) -> None:
        """
        Args:
            app: the service.
            proxy: the address or network of the proxy.
            header: the name of the header.
        """
        self._app = app
        self._proxy = ipaddress.ip_network(proxy, strict=False)
        self._header = header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request."""
        if scope["type"] == "http" and scope.get("client") and is_in(scope["client"][0], self._proxy):
            names = HTTPConnection(scope).headers.getlist(self._header)
            # With two of them, one may be the browser's own.
            if len(names) == 1 and names[0]:
                scope[_FOUND] = names[0]
        await self._app(scope, receive, send)


def named_by_proxy(connection: HTTPConnection) -> str | None:
    """Returns the name that the proxy gives of who sends a request; None if it gives none."""
    found: str | None = connection.scope.get(_FOUND)
    return found
