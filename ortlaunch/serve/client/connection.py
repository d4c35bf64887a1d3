"""Asks a service. It needs nothing but Python, so that `ortlaunch --server` works without the extra `serve`."""

from __future__ import annotations

import ipaddress
import json
import os
import stat
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException, HTTPMessage
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlencode

from ortlaunch.base.addresses import split_address
from ortlaunch.base.errors import RequestError
from ortlaunch.base.reading import read_text

TOKEN = "ORTLAUNCH_TOKEN"
"""The environment variable that holds the token."""
_SECONDS = 60
_TRIES, _TRIES_WHILE_IT_RESTARTS = 4, 60
"""How often a request is sent, a second apart; and a question to a service that has answered before, so that whoever
follows a run stays through an update of the service."""
_LARGEST_ANSWER = 64 << 20
_OVERLOADED = (502, 503, 504)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would send the token to another server."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        """Follows nothing."""


class Connection:
    """A service, and the token to ask it with.

    Args:
        url: its address.

    Raises:
        RequestError: the address will not do, or there is no token.
    """

    def __init__(self, url: str) -> None:
        parts = split_address(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or "@" in parts.netloc:
            raise RequestError(f"--server {url}: must be https://NAME, or http://127.0.0.1:PORT on this machine")
        if parts.scheme == "http" and not _is_here(parts.hostname):
            raise RequestError(f"--server {url}: the token would be sent unencrypted: use https://")
        self.url = url.rstrip("/")
        self._token = _token()
        self._has_answered = False
        # A proxy named by the environment would see the token of an unencrypted connection.
        proxies = urllib.request.ProxyHandler({} if parts.scheme == "http" else None)
        self._opener = urllib.request.build_opener(_NoRedirects, proxies)

    def get(self, *path: str, **query: str | int | None) -> Any:
        """Asks for something.

        Args:
            *path: the parts of the path after ``/api/``.
            **query: the query; None leaves one out.

        Raises:
            RequestError: the service cannot be reached, or refuses.
        """
        given = {name: value for name, value in query.items() if value is not None}
        return self._ask("GET", path, urlencode(given))

    def post(self, *path: str, body: Mapping[str, Any] | None = None, key: str | None = None) -> Any:
        """Asks to do something.

        Args:
            *path: the parts of the path after ``/api/``.
            body: what to send.
            key: makes a repeated request the same one, so that it is sent again after a lost connection.

        Raises:
            RequestError: the service cannot be reached, or refuses.
        """
        return self._ask("POST", path, "", dict(body or {}), key)

    def _ask(
        self,
        method: str,
        path: tuple[str, ...],
        query: str,
        body: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> Any:
        url = "/".join((self.url, "api", *(quote(part, safe="") for part in path))) + (f"?{query}" if query else "")
        headers = {"Authorization": f"Bearer {self._token}", "Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if key is not None:
            headers["Idempotency-Key"] = key
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, content, headers, method=method)
        is_patient = method == "GET" and self._has_answered
        for tries_left in reversed(range(_TRIES_WHILE_IT_RESTARTS if is_patient else _TRIES)):
            try:
                with self._opener.open(request, timeout=_SECONDS) as answer:
                    found = _parsed(answer.read(_LARGEST_ANSWER), self.url)
                self._has_answered = True
                return found
            except urllib.error.HTTPError as error:
                wait = 1.0 if is_patient and error.code in _OVERLOADED else _wait(error)
                if wait is None or not tries_left:
                    raise RequestError(_refusal(error, self.url)) from None
            except (OSError, HTTPException) as error:
                if not tries_left or (method != "GET" and key is None):
                    reason = getattr(error, "reason", None) or error
                    raise RequestError(f"{self.url} cannot be reached: {reason}") from None
                wait = 1.0
            time.sleep(wait)
        raise AssertionError("every try ends above")


def _wait(error: urllib.error.HTTPError) -> float | None:
    """The seconds after which to ask again; None if that is of no use. A refused request was not begun."""
    if error.code == 429:
        text = error.headers.get("Retry-After", "1")
        return min(30.0, float(text)) if text.isdecimal() else 1.0
    return None


def _refusal(error: urllib.error.HTTPError, url: str) -> str:
    """What the service says, one line for each problem."""
    try:
        found = json.loads(error.read(1 << 20))["problems"]
        lines = [f"{one['key']}: {one['message']}" if one["key"] else str(one["message"]) for one in found]
    except (ValueError, KeyError, TypeError, OSError, HTTPException):
        lines = []
    if error.code == 401:
        lines = [f"{url} does not accept the token (make one on its page, and put it into {TOKEN} or {token_file()})"]
    elif error.code in _OVERLOADED and not lines:
        lines = [f"{url} has no answer at the moment (HTTP {error.code})"]
    return "\n".join(lines) or f"{url} refused the request: HTTP {error.code}"


def _parsed(content: bytes, url: str) -> Any:
    try:
        return json.loads(content) if content else None
    except ValueError:
        raise RequestError(f"{url}: the answer is no JSON: is that the address of ortlaunch serve?") from None


def token_file() -> Path:
    """The file that holds the token where the environment has none."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "ortlaunch" / "token"


def _token() -> str:
    given = os.environ.get(TOKEN, "").strip()
    if given:
        return _plain(given, TOKEN)
    path = token_file()
    try:
        found = path.stat()
        text = read_text(path, 4096).strip()
    except FileNotFoundError:
        raise RequestError(
            f"there is no token for the service: make one on its page, and put it into {TOKEN}, or with mode 600 into "
            f"{path}"
        ) from None
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from None
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise RequestError(f"{path} must be yours and readable by you alone: chmod 600 {path}")
    return _plain(text, str(path))


def _plain(text: str, place: str) -> str:
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise RequestError(f"{place} holds no token of a service")
    return text


def _is_here(name: str) -> bool:
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
