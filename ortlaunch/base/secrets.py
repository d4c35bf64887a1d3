"""Removes secrets from what is written: variables with a secret's name, credentials in URLs, and secret values."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from urllib.parse import quote, unquote

_NAME = re.compile(
    r"token|secret|passw|passphrase|passwd|(^|_)pwd$|pwd_|credential|api_?key|access_?key|private_?key|(^|_)keys?$|"
    r"(^|_)auth$|authoriz|jwt|cookie|netrc",
    re.IGNORECASE,
)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"]+")
_BEARER = re.compile(r"(?i)\b(bearer|basic)(\s+)[A-Za-z0-9+/._~=-]{8,}")
_SECRET_QUERY = re.compile(r"(?i)([?&][^=&\s]*(?:pass|pwd|token|secret|key)[^=&\s]*=)[^&\s]+")
_USERINFO = re.compile(r"(://)([^/\s@]+)@")
_SECRET_VARIABLES = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "DATABRICKS_TOKEN")
_HOST_ONLY = re.compile(r"^(\[[0-9a-fA-F:.]+\]|[^:@/?#]*)(:\d+)?$")
_KNOWN = re.compile(r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|AKIA[0-9A-Z]{16}|dapi[0-9a-f]{32}\w*)\b")
_TRACKER_KEY = re.compile(r"(\btrack(?:ing|ers)(?:\.\w+)*\.(\w+)=)([^\s'\"]+)")
"""A tracker's key with its value, as it appears on the command line or in Hydra's record of the command."""
_LEAST_LENGTH = 8
"""The least length of a secret's value that is searched for. Shorter values, such as "1" or "true", occur anywhere."""


def is_secret(name: str) -> bool:
    """Whether a variable's name says that it holds a secret."""
    return _NAME.search(name) is not None


def without_secrets(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Removes credentials in URLs and in trackers' keys, words that look like tokens, and the environment's secrets.

    Args:
        text: the text to be written.
        environment: the variables to check; this process's own by default. The values of those that have a secret's
            name are removed from the text.
    """
    for value in _secret_values(os.environ if environment is None else environment):
        text = text.replace(value, "***")
    text = _TRACKER_KEY.sub(lambda found: f"{found[1]}***" if is_secret(found[2]) else found[0], text)
    text = _URL.sub(lambda found: redacted(found.group()), text)
    return _KNOWN.sub("***", _BEARER.sub(r"\1\2***", text))


def _secret_values(environment: Mapping[str, str]) -> list[str]:
    """The values of the secret variables, longest first, so that a secret that contains another is removed whole."""
    values = {
        value
        for name, value in environment.items()
        # The path of a key file or socket is no secret, and other paths may begin with it.
        if is_secret(name) and len(value) >= _LEAST_LENGTH and not value.startswith("/")
    }
    return sorted(values, key=len, reverse=True)


def redacted(uri: str) -> str:
    """The URI with its secret replaced by ``***``: a password, or a token given as the user or in the query."""
    before, credentials, after = _parts(uri)
    if credentials:
        user, colon, _ = credentials.partition(":")
        before += f"{user}:***@" if colon else "***@"
    return _SECRET_QUERY.sub(r"\1***", before + after)


def is_hidden(text: str) -> bool:
    """Whether a secret in the text was replaced by ``***``."""
    return "***" in text


def _parts(uri: str) -> tuple[str, str, str]:
    """Splits a URI into the part before the credentials, the credentials, and the part after their '@'."""
    scheme, separator, rest = uri.partition("://")
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if not separator or scheme.startswith(("sqlite", "file")) or "@" not in rest or _HOST_ONLY.match(authority):
        return uri, "", ""
    # A password may hold an unescaped '/' or '@': everything up to the last '@' is taken as credentials.
    credentials, _, after = rest.rpartition("@")
    return f"{scheme}://", credentials, after


def scrubbed(text: str, uri: str) -> str:
    """A library's error text without the credentials in the URI and in MLflow's environment variables."""
    text = text.replace(uri, redacted(uri))
    for secret in _secrets(uri):
        text = text.replace(secret, "***")
    return _SECRET_QUERY.sub(r"\1***", _USERINFO.sub(r"\1***@", text))


def _secrets(uri: str) -> list[str]:
    """The secrets of the URI and of MLflow's variables, longest first, so that none is removed only in part."""
    user, colon, password = _parts(uri)[1].partition(":")
    secret = password if colon else user
    secrets = {secret, unquote(secret), quote(unquote(secret), safe="")}
    secrets |= {os.environ.get(name, "") for name in _SECRET_VARIABLES}
    return sorted((secret for secret in secrets if len(secret) > 2), key=len, reverse=True)
