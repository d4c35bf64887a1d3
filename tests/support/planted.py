"""Thirty kinds of secret, none of them real, and a search for what is left of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

# Every secret holds one of these, in small or capital letters.
NEEDLES = ("hunter2", "deadbee2")
_BODY = "Hunter2HunterHunter2Hunter"
_HEX = "deadbee2" * 4

BY_SHAPE = {
    "ours": f"ort_{_BODY}-{_BODY[:16]}",
    "github classic": f"ghp_{_BODY}",
    "github app": f"ghs_{_BODY}",
    "github fine-grained": f"github_pat_{_BODY}_x",
    "gitlab": f"glpat-{_BODY}",
    "gitlab deploy": f"gldt-{_BODY}",
    "hugging face": f"hf_{_BODY}",
    "openai": f"sk-{_BODY}",
    "openai project": f"sk-proj-{_BODY}_-x",
    "anthropic": f"sk-ant-api03-{_BODY}",
    "slack bot": f"xoxb-2024-{_BODY}",
    "slack webhook": f"https://hooks.slack.com/services/T0/B0/{_BODY}",
    "aws id": "AKIAHUNTER2HUNTER2AA",
    "aws session id and key": f"ASIAHUNTER2HUNTER2AA:{_BODY}/+{_BODY[:12]}",
    "google api": f"AIza{_BODY}123456789",
    "jwt": f"eyJhbGciOi.eyJ{_BODY}.{_BODY}",
    "databricks": f"dapi{_HEX}",
    "nvidia ngc": f"nvapi-{_BODY}",
    "private key": f"-----BEGIN RSA PRIVATE KEY-----\n{_BODY}\n{_BODY}\n-----END RSA PRIVATE KEY-----",
    "pgp key": f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n\n{_BODY}\n-----END PGP PRIVATE KEY BLOCK-----",
    "bearer": f"Bearer {_BODY}",
    "basic": "Authorization: Basic aHunter2==",
    "s3 with credentials": "s3://AKIAX:hunter2/x@bucket/folder",
    "password with @": "postgresql://ann:p@ss-hunter2@db.example/mlflow",
    "password that is quoted": "https://ann:%40hunter2%2F@host.example/x",
    "user that is a token": "https://hunter2@git.example/x.git",
    "parameter of a url": "https://host.example/x?a=1&access_token=hunter2",
    "signature of a url": "https://store.example/x?sv=1&sig=hunter2",
    "netrc": "machine host.example login ann password hunter2",
    "curl": "curl -u ann:hunter2 https://host.example",
    "driver": "ann:hunter2@db.example:5432/mlflow",
    "option": "tool --db-password hunter2 run",
    "json": '{"client_secret": "hunter2 and more"}',
}
BY_NAME = dict.fromkeys(
    (
        *("db_pass", "smtp_pass", "pat", "github_pat", "privkey", "dsn", "sentry_dsn", "password", "passphrase", "pwd"),
        *("api_key", "apiKey", "accessToken", "hub_token", "client_secret", "cookie", "jwt", "auth", "sshpass"),
    ),
    "x-hunter2",
)
VARIABLES = dict.fromkeys(
    (
        *("NCCL_X_PASS", "NCCL_PAT", "TORCH_DSN", "UCX_PRIVKEY", "DB_PASS", "SMTP_PASS", "PAT", "PRIVKEY", "DSN"),
        *("AWS_SECRET_ACCESS_KEY", "NCCL_KEY", "ORTLAUNCH_COOKIE", "MKL_PASSPHRASE"),
    ),
    "x-hunter2",
)


def found_in(text: str) -> list[str]:
    """The lines of a text in which something of a secret is left."""
    return [line for line in text.splitlines() if any(needle in line.lower() for needle in NEEDLES)]


def left_in_files(*folders: Path) -> dict[str, list[str]]:
    """The files below some folders that hold something of a secret, with these lines."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    found = {str(path): found_in(path.read_bytes().decode(errors="replace")) for path in files}
    return {path: [line[:200] for line in lines] for path, lines in found.items() if lines}


def public_files(folders: Iterable[Path]) -> list[Path]:
    """The files in which a secret was hidden, but which others may read too."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if b"***" in path.read_bytes() and path.stat().st_mode & 0o077]
