"""Removes secrets from what is written and printed. No other module decides what a secret is.

A secret is told by the name that it is given under (`is_secret`), by its place in a URL, or because an environment
variable with a secret's name holds it; some tokens and private keys also by their shape.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote

CARRIER = "ORTLAUNCH_SECRETS"
"""The environment variable that carries hidden values of a configuration to workers and jobs, as JSON by dotted key."""

_MARK = "***"
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
"""A word of a name. Names are split at every sign, and between a small and a capital letter."""
_STEM = re.compile(
    r"passw(?:or)?d|passphrase|secret|credential|api_?key|priv(?:ate)?_?key|access_?key|account_?key|authori[sz]|"
    r"(?:^|_)(?:pass_(?:word|phrase)|pwd|dsn|jwt|cookies?|netrc|creds?|htpasswd|pgpass)(?:_|$)"
)
"""Texts that make a name secret wherever they are in it."""
_LAST = frozenset(("pass", "pat", "pats", "pw", "auth", "token", "bearer", "privkey", "sas", "otp", "totp", "mnemonic"))
"""Words that make a name secret if it ends with them."""
_JOINED = re.compile(
    r"(?:^|_)(?:admin|db|ftp|http|imap|ldap|mail|mongo|my|pg|proxy|redis|root|smtp|sql|ssh|user)(?:pass|pw)$|"
    r"(?:access|api|auth|bearer|bot|deploy|git|github|gitlab|hf|refresh|wandb)_?tokens?$"
)
"""Words that are written together, such as SSHPASS. COMPASS and BYPASS are none."""
_BEFORE_KEY = frozenset(
    (
        *("access", "account", "admin", "api", "app", "auth", "aws", "azure", "client", "crypt", "decryption"),
        *("deploy", "encrypt", "encryption", "gcp", "hmac", "host", "license", "master", "openai", "private"),
        *("rsa", "secret", "service", "session", "shared", "sign", "signing", "ssh", "storage", "subscription"),
        *("tls", "wandb", "webhook"),
    )
)
_OTHERS = {
    "token": frozenset(
        (
            *("audio", "begin", "bos", "cls", "decoder", "end", "eos", "eot", "image", "mask", "new", "next"),
            *("pad", "per", "prefix", "sep", "special", "start", "stop", "suffix", "text", "unk", "video"),
            "word",
        )
    ),
    "pass": frozenset(
        (
            *("all", "backward", "band", "by", "first", "forward", "high", "low", "multi", "one", "second"),
            *("single", "two", "under"),
        )
    ),
}
"""Words before ``token`` and ``pass`` with which these are no secrets."""
_PLACES = frozenset(("file", "path", "dir", "folder"))
"""Words at the end of a name that say that its value is the place of a secret."""
_QUALIFIERS = frozenset(["b", "base", "new", "old", "prod", "dev", "staging", "value", "raw", "string", "env"])
"""Words at the end of a name that say which form or copy of a secret it has (``b`` is that of b64)."""

_TOKEN = (
    r"(?<![A-Za-z0-9])(?:ort_[\w-]{43}|gh[oprsu]_\w{16,}|github_pat_\w{16,}|gl[a-z]{2,5}-[\w.-]{16,}|hf_\w{16,}|"
    r"sk-(?=[\w-]*[A-Z0-9])[\w-]{16,}|xox[a-z](?:\.xox[a-z])?-[A-Za-z0-9-]{8,}|AIza[\w-]{35}|nvapi-[\w-]{16,}|"
    r"wandb_v1_\w{16,}|dapi[0-9a-f]{32}\w*|eyJ[\w-]{6,}\.[\w-]{6,}(?:\.[\w-]*)*|"
    r"A(?:KI|SI)A[A-Z0-9]{16}(?:[:\s,;/]+[A-Za-z0-9+/]{40}(?![A-Za-z0-9+/=]))?)"
)
"""Tokens of ortlaunch serve, GitHub, GitLab, Hugging Face, OpenAI and Anthropic, Slack, Google, NVIDIA, Databricks and
Weights & Biases, a JSON Web Token (RFC 7519), and AWS's id, which its secret key often follows."""
_PRIVATE_KEY = (
    r"(?s)(-----BEGIN[A-Z0-9 ]* PRIVATE KEY(?: BLOCK)?-----)(.*?)(?=-----END[A-Z0-9 ]* PRIVATE KEY(?: BLOCK)?-----|\Z)"
)
"""A private key (RFC 7468; PGP: RFC 9580): its first line, and all before its last line, or the rest of the text."""
_WEBHOOK = r"(hooks\.slack\.com/(?:services|workflows)/|discord(?:app)?\.com/api/webhooks/)[^\s'\"]+"
"""The address of a webhook, which needs no other secret; the first group is what may be shown."""
_URL = r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+"
_AUTHORIZATION = (
    r"(?i)\b(bearer|basic)(\s+)(?=\S*[0-9+/_=.]|\S{16})[A-Za-z0-9+/._~=-]{8,}|"
    r"(authorization[\"']?\s?[:=]\s?[\"']?)(?:\w+\s+)?[^\s\"']+"
)
_PARAMETER = r"([?&;])([^=&;\s'\"]+)(=)([^&;\s'\"]+)"
_SECRET_PARAMETER = r"(?i)pass|pwd|token|secret|key|auth|signature|credential|^sig$"
"""Parameters of a URL that may hold a secret, also those that open a storage place (Azure, AWS, Google)."""
_WITHOUT_PASSWORD = ("docker", "ssh", "git+ssh", "sftp", "rsync")
"""Schemes whose URLs often have a user's name without a password; elsewhere it is a token."""
_WEB = ("http", "https", "ws", "wss", "ftp", "ftps")
_VALUE = r"\\\"(?:(?!\\\").)*\\\"|\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s'\"]+"
_ASSIGNED = rf"(?<![\w.])([A-Za-z_][\w.-]*)(\\?[\"']?\s?(?:=\s?|:(?=[\s\\\"'])\s?))({_VALUE})"
"""NAME=VALUE, NAME: VALUE and "NAME": "VALUE"."""
_IN_MAPPING = r"([{,]\s*[\"']?)([A-Za-z_][\w.-]*)([\"']?\s*:\s*)([^\s,}]+)"
"""{NAME:VALUE,NAME:VALUE}, as Hydra takes it."""
_OPTION = rf"(?<![\w-])(--?)([A-Za-z][\w-]*)(\s+)(?!-)({_VALUE})"
_USER_OPTION = r"(?<!\S)(-u|--user)([ =])([^\s:'\"/]+):(?!//)[^\s'\"]+"
"""The option of curl and wget with name and password."""
_NETRC = r"(?i)\b(login\s+\S+\s+password\s+)\S+"
_USER_AT_HOST = (
    r"(?<![\w./:@-])([A-Za-z_][\w.+-]*):([^\s:@/'\"]+)@(?!sha\d)"
    r"(?=localhost\b|[A-Za-z][\w-]*[.:(/]|\d+\.\d+\.\d+\.)"
)
"""USER:PASSWORD@HOST without a scheme, as database drivers take it."""
_PLACEHOLDER = (
    r"\*{3,}|<.*>|\$[\w{(].*|`.*|VALUE|null|None|True|False|true|false|[A-Za-z_][\w.]*[(\[].*|~?/[\w.-]+(?:/[\w.-]+)+"
)
"""Values that are no secret: what was replaced before, what stands for a value, calls in source code, paths."""
_HOST = r"^(\[[0-9a-fA-F:.]+\]|[^:@/?#]*)(:\d+)?$"
_USER = r"(://)[^/\s@:]*:\*{3}@"
_SECRET_VARIABLES = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "DATABRICKS_TOKEN")
_LEAST_LENGTH = 8
"""The least length of a secret's value that is searched for. Shorter values, such as "1" or "true", occur anywhere."""
_PIECE_LENGTH = 4
_DEEPEST = 50
"""An assignment in an assignment is looked at so often. What is deeper is hidden: no program writes it."""


@lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Whether a name says that its value is a secret. Of a dotted key the last part decides.

    ``DB_PASS``, ``apiKey`` and ``NCCL_X_PASS`` are such names; ``PATH``, ``PASSENGERS``, ``max_tokens`` and
    ``sort_key`` are none. In names of environment variables (capitals only) every last ``KEY`` and ``TOKENS`` counts.
    """
    last = name.rpartition(".")[2]
    words = [word.lower() for word in _WORD.findall(last)]
    while len(words) > 1 and (words[-1].isdigit() or words[-1] in _QUALIFIERS):
        words.pop()
    if words[-1:] and words[-1] in _PLACES and len(words) > 1:
        return False
    joined = "_".join(words)
    if not words or _STEM.search(joined) or _JOINED.search(joined):
        return bool(words)
    end, before = words[-1], words[-2] if len(words) > 1 else ""
    if end in ("key", "keys"):
        return not before or last.isupper() or before in _BEFORE_KEY
    if end == "tokens":
        return last.isupper() and before not in ("", "max", "min", "num")
    return end in _LAST and before not in _OTHERS.get(end, ())


def without_secrets(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Replaces secrets in a text by ``***``.

    Args:
        text: the text to be written or printed.
        environment: the variables to check; this process's own by default. The values of those that have a secret's
            name are removed from the text.
    """
    if len(text) < _LEAST_LENGTH and _is_word(text):
        return text
    # Each pattern is compiled when a text may hold what it finds: to compile all of them takes a short command 3 ms.
    lower = text.lower()
    if "bearer" in lower or "basic" in lower or "authorization" in lower:
        text = re.sub(_AUTHORIZATION, _hidden_authorization, text)
    text = without_tokens(text, environment)
    if "=" in text or re.search(r":[\s\\\"']", text):
        text = re.sub(_ASSIGNED, _hidden_assignment, text)
    if ":" in text and ("{" in text or "," in text):
        text = re.sub(_IN_MAPPING, _hidden_in_mapping, text)
    if "@" in text:
        text = re.sub(_USER_AT_HOST, rf"\1:{_MARK}@", text)
    if "-" in text and len(text.split(None, 1)) > 1:
        text = re.sub(_OPTION, _hidden_option, text)
    if "-u" in text and ":" in text:
        text = re.sub(_USER_OPTION, rf"\1\2\3:{_MARK}", text)
    return re.sub(_NETRC, rf"\1{_MARK}", text) if "login" in lower else text


def _is_word(text: str) -> bool:
    """Whether a text is a word or a number, without any sign by which a secret could be told."""
    return all(part.isalnum() for part in re.split(r"[_.-]", text) if part)


def without_tokens(text: str, environment: Mapping[str, str] | None = None) -> str:
    """As `without_secrets`, but without a look at names. It leaves a program's source as it is, such as ``token = x``.

    The number of lines stays the same.
    """
    for value in _environment_secrets(os.environ if environment is None else environment):
        text = text.replace(value, _MARK)
    if "-----BEGIN" in text:
        text = re.sub(_PRIVATE_KEY, lambda found: found[1] + _masked_lines(found[2]), text)
    if "://" in text:
        text = re.sub(_URL, lambda found: redacted(found.group()), text)
        if "hooks.slack.com/" in text or "discord" in text:
            text = re.sub(_WEBHOOK, rf"\1{_MARK}", text)
    return re.sub(_TOKEN, _MARK, text)


def without_secrets_of(name: str, value: str) -> str:
    """A value without secrets: all of it where its name says that it is one, else what looks like one."""
    if is_secret(name) and value and not re.fullmatch(_PLACEHOLDER, value):
        return _MARK
    # A whole URI may hold spaces and quotes, which end one in a text.
    return without_secrets(redacted(value) if re.match(r"[A-Za-z][\w+.-]*://", value) else value)


def hidden(name: str, value: Any) -> Any:
    """`without_secrets_of` for every text in nested mappings and lists; other values stay as they are."""
    if isinstance(value, Mapping):
        return {key: hidden(str(key), one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [hidden(name, one) for one in value]
    return without_secrets_of(name, value) if isinstance(value, str) else value


def without_secrets_in_words(words: list[str]) -> list[str]:
    """The words of a command without secrets. The value of KEY=VALUE may hold any sign, and may be the next word.

    A value may be written as Hydra writes it in a sweep, with a backslash before some signs.
    """
    shown: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        # A word that ends in two equals signs is no KEY=VALUE, but may be in base64.
        if equals and value != "=" and re.fullmatch(r"[+~-]*[A-Za-z_][\w./@-]*", name):
            key = name.lstrip("+~-")
            plain = re.sub(r"\\(.)", r"\1", value)
            without = without_secrets_of(key, plain)
            shown.append(f"{without_secrets(name)}={without_secrets_of(key, value if without == plain else without)}")
        elif shown and re.fullmatch(r"--?[A-Za-z][\w-]*", words[len(shown) - 1]) and not word.startswith("-"):
            shown.append(without_secrets_of(words[len(shown) - 1].lstrip("-"), word))
        else:
            shown.append(without_secrets(word))
    return shown


def _hidden_assignment(found: re.Match[str], depth: int = 0) -> str:
    name, sign, value = found.groups()
    quote_ = next((one for one in ('\\"', '"', "'") if value.startswith(one)), "")
    inner = value[len(quote_) :]
    if name.lower() in ("key", "keys", "tokens") or not is_secret(name):  # KEY=VALUE stands for any key.
        if depth == _DEEPEST:
            return f"{name}{sign}{_MARK}"
        shown = re.sub(_ASSIGNED, lambda one: _hidden_assignment(one, depth + 1), inner)
        return f"{name}{sign}{quote_}{shown}"
    plain = value.strip("'\"\\").rstrip(".,;:!?)")
    before = found.string[: found.start()].rpartition("\n")[2]
    # "it asks for a password: give one" is a sentence, and a line that begins with "password: " is YAML.
    is_sentence = sign.strip() == ":" and before.strip(" -#") != "" and plain.isalpha() and plain.islower()
    return found[0] if is_sentence or re.fullmatch(_PLACEHOLDER, plain) else f"{name}{sign}{quote_}{_MARK}{quote_}"


def _hidden_in_mapping(found: re.Match[str]) -> str:
    before, name, sign, value = found.groups()
    if not is_secret(name) or re.fullmatch(_PLACEHOLDER, value.strip("'\"")):
        return found[0]
    return f"{before}{name}{sign}{_MARK}"


def _hidden_option(found: re.Match[str]) -> str:
    dashes, name, space, value = found.groups()
    is_plain = not is_secret(name) or "=" in value or re.fullmatch(_PLACEHOLDER, value)
    return found[0] if is_plain else f"{dashes}{name}{space}{_MARK}"


def _hidden_authorization(found: re.Match[str]) -> str:
    return f"{found[3]}{_MARK}" if found[3] else f"{found[1]}{found[2]}{_MARK}"


def _masked_lines(text: str) -> str:
    """Masks every line and keeps their number and the marks of a patch, so that a patch stays one."""
    lines = text.split("\n")
    return "\n".join(
        line if line in ("", "+", "-", " ") else f"{line[0] if line[0] in '+- ' else ''}{_MARK}" for line in lines
    )


def _environment_secrets(environment: Mapping[str, str]) -> list[str]:
    """The values of the secret variables, longest first, so that a secret that contains another is removed whole."""
    found: set[str] = set()
    for name, value in environment.items():
        if "://" in value and "@" in value:
            found.add(_parts(value)[1].partition(":")[2])
        if name == CARRIER:
            found |= set(carried_values(environment).values())
        elif is_secret(name):
            found.add(value)
    found |= {unquote(value) for value in found} | {quote(value, safe="") for value in found}
    # The path of a key file or socket is no secret, and other paths may begin with it. A word of letters is in texts.
    searched = {
        value
        for value in found
        if len(value) >= _LEAST_LENGTH and not value.startswith("/") and not (value.isalpha() and value.islower())
    }
    return sorted(searched, key=len, reverse=True)


def carried_values(environment: Mapping[str, str]) -> dict[str, str]:
    """The values of a configuration that `CARRIER` holds, by dotted key; none if it holds anything else."""
    try:
        values = json.loads(environment.get(CARRIER, "{}"))
    except ValueError:
        return {}
    if not isinstance(values, dict):
        return {}
    return {key: value for key, value in values.items() if isinstance(value, str)}


def whole_words(words: list[str], environment: Mapping[str, str]) -> list[str]:
    """The words of a command whose secrets were hidden from ``ps``, with those that `CARRIER` holds by hidden word."""
    values = carried_values(environment)
    return [values.get(word, word) for word in words]


def redacted(uri: str) -> str:
    """The URI with its secret replaced by ``***``: a password, or a token given as the user or in the query."""
    before, credentials, after = _parts(uri)
    if credentials:
        user, colon, _ = credentials.partition(":")
        before += f"{re.sub(_TOKEN, _MARK, user)}:{_MARK}@" if colon else f"{_MARK}@"
    return re.sub(_PARAMETER, _hidden_parameter, before + after)


def _hidden_parameter(found: re.Match[str]) -> str:
    sign, name, equals, _ = found.groups()
    return f"{sign}{name}{equals}{_MARK}" if re.search(_SECRET_PARAMETER, unquote(name)) else found[0]


def has_credentials(uri: str) -> bool:
    """Whether a URI holds a password or a token."""
    return redacted(uri) != uri


def is_hidden(text: str) -> bool:
    """Whether a secret in the text was replaced by ``***``."""
    return _MARK in text


def may_be(value: str, shown: str) -> bool:
    """Whether a text could be the one that was shown as `shown`, with ``***`` for any part of it."""
    return re.fullmatch(".*".join(re.escape(part) for part in shown.split(_MARK)), value, re.DOTALL) is not None


def _parts(uri: str) -> tuple[str, str, str]:
    """Splits a URI into the part before the credentials, the credentials, and the part after their '@'."""
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme.startswith(("sqlite", "file")) or "@" not in rest:
        return uri, "", ""
    found = re.match(_HOST, re.split(r"[/?#]", rest, maxsplit=1)[0])
    # A host, whose path holds an '@'. Outside of the web, digits before a '/' may be the begin of a password.
    if found and (found[2] is None or scheme.lower().rpartition("+")[2] in _WEB):
        return uri, "", ""
    # A password may hold an unescaped '/' or '@': everything up to the last '@' is taken as credentials.
    credentials, _, after = rest.rpartition("@")
    if ":" not in credentials and scheme.lower() in _WITHOUT_PASSWORD:
        return uri, "", ""
    return f"{scheme}://", credentials, after


def scrubbed(text: str, uri: str) -> str:
    """A library's error text without the credentials in the URI and in MLflow's environment variables."""
    text = text.replace(uri, redacted(uri))
    for secret in _secrets(uri):
        text = text.replace(secret, _MARK)
    return re.sub(_USER, rf"\1{_MARK}@", without_secrets(text))


def _secrets(uri: str) -> list[str]:
    """The secrets of the URI and of MLflow's variables, longest first, so that none is removed only in part.

    A library that splits the URI at another '@' or '/' shows a piece of the password, so pieces count too.
    """
    user, colon, password = _parts(uri)[1].partition(":")
    secret = password if colon else user
    whole = {secret, unquote(secret), quote(unquote(secret), safe="")}
    pieces = {piece for one in whole for piece in re.split(r"[@/?#:]", one) if len(piece) >= _PIECE_LENGTH}
    whole |= {os.environ.get(name, "") for name in _SECRET_VARIABLES}
    return sorted((one for one in whole | pieces if len(one) > 2), key=len, reverse=True)
