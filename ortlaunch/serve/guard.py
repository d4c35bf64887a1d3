"""What stands before every route: the Host header, forged requests, the size of bodies, and the headers of answers."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ortlaunch.serve.access import COOKIE
from ortlaunch.serve.limits import LARGEST_BODY
from ortlaunch.serve.secret import csrf_of
from ortlaunch.serve.settings import Settings

CSRF_HEADER = "x-csrf-token"
_SAFE = frozenset(("GET", "HEAD", "OPTIONS"))
_TOO_LARGE = (413, f"a body has {LARGEST_BODY} bytes at most")
_POLICY = (
    "default-src 'none'; script-src 'self'; worker-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # With no-referrer, browsers would send `Origin: null` with the forms of our own pages.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


class Guard:
    """ASGI middleware. It refuses what no page of the service and no program of ours would send."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._hosts = settings.host_names()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(scope, send)
        headers = Headers(scope=scope)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await _refuse(refusal, scope, receive, answer)
            return
        body = _Body(receive)
        if scope["method"] not in _SAFE:
            if _is_forgeable(headers) and not _has_csrf(headers):
                await _refuse((403, "the form is too old: load the page again"), scope, receive, answer)
                return
            if not await body.read():
                await _refuse(_TOO_LARGE, scope, receive, answer)
                return
        await self._app(scope, body, answer)

    def _refusal(self, scope: Scope, headers: Headers) -> tuple[int, str] | None:
        hosts = headers.getlist("host")
        name = _host_name(hosts[0]) if len(hosts) == 1 else ""
        if name not in self._hosts:
            return 400, "the service is not known under this name (ortlaunch serve --public-url)"
        length = headers.get("content-length")
        if length is not None and (not length.isdecimal() or int(length[:20]) > LARGEST_BODY):
            return _TOO_LARGE
        if scope["method"] in _SAFE or "authorization" in headers:
            return None
        return self._foreign(scope, headers, hosts[0])

    def _foreign(self, scope: Scope, headers: Headers, host: str) -> tuple[int, str] | None:
        """The refusal of a request that another site's page may have sent."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        own = {f"{scope['scheme']}://{host}".lower()}
        if self._settings.public_url:
            parts = urlsplit(self._settings.public_url)
            own.add(f"{parts.scheme}://{parts.netloc}".lower())
        if origin is None and site is None:
            return 403, "a program sends a token (Authorization: Bearer …), a browser the header Origin"
        if (origin is not None and origin.lower() not in own) or site not in (None, "same-origin"):
            return 403, "the request comes from a page of another site"
        return None


class _Body:
    """The `receive` of a request, whose body is read as a whole before the route begins."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._content: bytes | None = None

    async def __call__(self) -> Message:
        if self._content is None:
            return await self._receive()
        content, self._content = self._content, None
        return {"type": "http.request", "body": content, "more_body": False}

    async def read(self) -> bool:
        """Reads the body, and keeps it for the route; returns whether it is short enough."""
        parts: list[bytes] = []
        length = 0
        while True:
            message = await self._receive()
            parts.append(message.get("body", b""))
            length += len(parts[-1])
            if length > LARGEST_BODY:
                return False
            if message["type"] != "http.request" or not message.get("more_body", False):
                break
        self._content = b"".join(parts)
        return True


class _Answer:
    """The `send` of a request, which adds the headers that every answer has."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers[name] = value
            # A script that stays the same is answered with 304; after an update no browser keeps the old one.
            is_static = self._scope["path"].startswith("/static/")
            headers.setdefault("Cache-Control", "no-cache" if is_static else "no-store")
            if self._scope["scheme"] == "https":
                headers["Strict-Transport-Security"] = "max-age=31536000"
        await self._send(message)


async def _refuse(refusal: tuple[int, str], scope: Scope, receive: Receive, send: Send) -> None:
    status, message = refusal
    answer = JSONResponse({"problems": [{"key": None, "message": message}]}, status, {"Connection": "close"})
    await answer(scope, receive, send)


def _is_forgeable(headers: Headers) -> bool:
    """Whether a browser would have added a session to this request by itself, so that it must prove its origin."""
    return "authorization" not in headers and session_secret(headers) is not None


def session_secret(headers: Mapping[str, str]) -> str | None:
    """Returns the secret of the session cookie in a request's headers; None without one."""
    # As Starlette reads them for the routes: another parser may see no session where they see one.
    return cookie_parser(headers.get("cookie", "")).get(COOKIE) or None


def csrf_token(headers: Mapping[str, str]) -> str:
    """Returns what a page's scripts send in the header, for the session that asked for it; empty without a session."""
    secret = session_secret(headers)
    return csrf_of(secret) if secret else ""


def _has_csrf(headers: Headers) -> bool:
    given = headers.get(CSRF_HEADER)
    return given is not None and hmac.compare_digest(given.encode(), csrf_token(headers).encode())


def _host_name(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""
