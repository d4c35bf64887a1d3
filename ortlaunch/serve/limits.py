"""How often somebody may ask, and how long a body may be."""

from __future__ import annotations

import ipaddress
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field

LARGEST_BODY = 256 * 1024
"""Bytes of a request's body."""
LOGINS = 5
LOGIN_SECONDS = 60.0
"""Five attempts to log in a minute for one name from one address."""
FROM_ADDRESS = 30
"""Wrong attempts a minute from one address, for any names: people behind one router share it."""
FOR_NAME = 60
"""Attempts a minute for one name, from any addresses: more than one address may make, which could lock somebody out."""
TOKEN_REQUESTS = 10
"""Requests a second with one token."""
SESSION_REQUESTS = 100
"""Requests a second of one browser."""
NOTED = 60
"""Refusals and downloads of one person a minute that get into the audit."""
MOST_COMPARED = 50
"""Runs of one comparison."""
_MOST_KEYS = 10_000


class TooManyRequests(Exception):
    """A limit was reached."""

    def __init__(self, seconds: float) -> None:
        super().__init__("too many requests")
        self.seconds = max(1, int(seconds + 0.999))
        """After so many seconds a further request is taken."""


@dataclass
class Bucket:
    """Lets through `most` requests at once for each key, and as many again over `seconds`."""

    most: int
    seconds: float
    _filled: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, key: str, now: float | None = None) -> None:
        """Counts one request.

        Raises:
            TooManyRequests: there were too many.
        """
        moment = time.monotonic() if now is None else now
        with self._lock:
            left, before = self._filled.pop(key, (float(self.most), moment))
            left = min(self.most, left + (moment - before) * self.most / self.seconds)
            taken = left >= 1.0
            self._filled[key] = (left - 1.0 if taken else left, moment)
            # Keys come from outside, so their number is bounded; the ones not seen for longest go.
            if len(self._filled) > _MOST_KEYS:
                self._filled.popitem(last=False)
        if not taken:
            raise TooManyRequests((1.0 - left) * self.seconds / self.most)

    def give_back(self, key: str) -> None:
        """Takes one request back, such as an attempt that was right."""
        with self._lock:
            left, before = self._filled.get(key, (float(self.most), 0.0))
            self._filled[key] = (min(self.most, left + 1.0), before)


def network_of(address: str) -> str:
    """Returns what attempts from an address are counted by: of IPv6 the /64, in which one machine has every address."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((int(found), 64), strict=False))


@dataclass
class Limits:
    """The limits of one service."""

    login: Bucket = field(default_factory=lambda: Bucket(LOGINS, LOGIN_SECONDS))
    address: Bucket = field(default_factory=lambda: Bucket(FROM_ADDRESS, LOGIN_SECONDS))
    name: Bucket = field(default_factory=lambda: Bucket(FOR_NAME, LOGIN_SECONDS))
    token: Bucket = field(default_factory=lambda: Bucket(TOKEN_REQUESTS, 1.0))
    session: Bucket = field(default_factory=lambda: Bucket(2 * SESSION_REQUESTS, 2.0))
    noted: Bucket = field(default_factory=lambda: Bucket(NOTED, 60.0))
    forgetting: Bucket = field(default_factory=lambda: Bucket(1, 3600.0))
    """How often old attempts to log in are taken out of the audit."""
