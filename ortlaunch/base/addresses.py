"""Takes addresses apart that somebody has typed."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit


def split_address(url: str) -> SplitResult:
    """The parts of a URL. What is none has no parts, and so no host: callers refuse that anyway.

    Such are ``https://[name``, a port that is no number, and a part of a host's name that is too long to be looked up.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
        (parts.hostname or "").encode("idna")
    except ValueError:
        return urlsplit("")
    return parts
