"""Secrets of 256 bits that the service gives out. It keeps their digests alone."""

from __future__ import annotations

import hashlib
import hmac
import secrets

_BYTES = 32


def new_secret() -> str:
    """Returns 256 random bits as text that is safe in URLs and headers."""
    return secrets.token_urlsafe(_BYTES)


def digest(secret: str) -> str:
    """Returns what is stored of a secret. It is random, so that a plain hash cannot be searched backwards."""
    return hashlib.sha256(secret.encode(errors="surrogateescape")).hexdigest()


def csrf_of(session_secret: str) -> str:
    """Returns the text that a form of this session must carry; only a page of the service can know it."""
    return hmac.new(session_secret.encode(errors="surrogateescape"), b"csrf", hashlib.sha256).hexdigest()
