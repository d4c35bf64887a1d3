"""How long a connection may be without a whole request, and how many there may be: uvicorn itself bounds neither."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import resource
from collections import Counter

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ortlaunch.serve.limits import network_of

HEAD_SECONDS = 10.0
"""From a connection, or the first byte of a further request on it, to the end of the request's headers."""
BODY_SECONDS = 30.0
"""From there to the end of the body."""
MOST_OF_ADDRESS = 128
"""Connections of one address at a time. People behind one router share it, and a browser takes six."""
_OWN_FILES = 200
"""Files that the service itself opens: the database, run folders, pipes to children."""


def protocol_for(trusted_proxy: str | None) -> type[HttpToolsProtocol]:
    """Returns the class of a server's connections.

    Args:
        trusted_proxy: the address or network of a proxy, which may have any number of connections.
    """
    proxy = None if trusted_proxy is None else ipaddress.ip_network(trusted_proxy, strict=False)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = math.inf if files == resource.RLIM_INFINITY else max(_OWN_FILES, files - _OWN_FILES)
    of_address = Counter[str]()

    class Connection(HttpToolsProtocol):
        """A connection that ends if a request does not."""

        _deadline: asyncio.TimerHandle | None = None
        _network: str | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            address = self.client[0] if self.client is not None else ""
            if proxy is None or not is_in(address, proxy):
                self._network = network_of(address)
                of_address[self._network] += 1
            if len(self.connections) > most or of_address[self._network or ""] > MOST_OF_ADDRESS:
                transport.abort()
            else:
                self._end_after(HEAD_SECONDS)

        def connection_lost(self, exc: Exception | None) -> None:
            self._go_on()
            if self._network is not None:
                of_address[self._network] -= 1
                # Addresses come from outside: none is kept for longer than it has a connection.
                if not of_address[self._network]:
                    del of_address[self._network]
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            # uvicorn waits no longer for a further request once anything comes, also if it is an empty line.
            if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
                self._end_after(HEAD_SECONDS)
            super().data_received(data)

        def on_headers_complete(self) -> None:
            self._end_after(BODY_SECONDS)
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._go_on()
            super().on_message_complete()

        def _end_after(self, seconds: float) -> None:
            self._go_on()
            self._deadline = self.loop.call_later(seconds, self.transport.abort)

        def _go_on(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return Connection


def is_in(address: str, network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> bool:
    """Whether an address is one of a network."""
    try:
        return ipaddress.ip_address(address) in network
    except ValueError:
        return False
