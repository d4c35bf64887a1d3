"""How a service was started."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import urlsplit

from ortlaunch.run.roots import RUN_ROOT

DEFAULT_PORT = 8470
LOOPBACK = "127.0.0.1"
OIDC_SECRET = "ORTLAUNCH_OIDC_SECRET"
"""The environment variable that holds the secret by which an OpenID Connect provider knows the service."""


@dataclass(frozen=True)
class Settings:
    """What the command line of `ortlaunch serve` says."""

    host: str = LOOPBACK
    port: int = DEFAULT_PORT
    """0 takes a free port."""
    root: Path = RUN_ROOT
    """The run root of new runs."""
    further_roots: tuple[Path, ...] = ()
    """Run roots whose runs are shown too."""
    database_path: Path | None = None
    """None: `.serve/serve.db` below the run root."""
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    trusted_proxy: str | None = None
    """The address of the reverse proxy that ends TLS; its X-Forwarded headers are believed."""
    public_url: str | None = None
    """The address that people open, where it is not the one that the service listens on."""
    shared_account: bool = False
    """All runs belong to the account of the service."""
    slots: int | None = None
    """How many workers may train at once; None: the GPUs of this machine, or one worker group without GPUs."""
    oidc_issuer: str | None = None
    """The OpenID Connect provider that vouches for people."""
    oidc_client: str | None = None
    """The name by which the provider knows the service."""
    oidc_claim: str = "preferred_username"
    """The provider's claim that holds the name of the user here."""
    identity_header: str | None = None
    """The header by which the trusted proxy says who somebody is."""
    on_end: str | None = None
    """A command that is run for each run that ends."""

    @cached_property
    def database(self) -> Path:
        """The file of the database."""
        return self.database_path or self.root.absolute() / ".serve" / "serve.db"

    @property
    def lock_file(self) -> Path:
        """The file that the service of this database holds locked."""
        return self.database.with_suffix(".lock")

    @property
    def slots_lock(self) -> Path:
        """The file that the service of the run root's slots on this machine holds locked, whatever its database."""
        return self.root.absolute() / ".serve" / f"slots-{socket.gethostname()}.lock"

    @property
    def secrets(self) -> Path:
        """The folder with the secrets of runs; see `ortlaunch.serve.kept`."""
        return self.database.with_name("secrets")

    @property
    def on_end_file(self) -> Path:
        """What `on_end` was told."""
        return self.database.with_name("on-end.json")

    @property
    def unix_users(self) -> Path:
        """The list of the Unix users for whom the service may act; see `ortlaunch.serve.unix_users`."""
        return self.database.with_name("unix_users")

    @property
    def roots(self) -> tuple[Path, ...]:
        """All run roots, the one of new runs first."""
        return (self.root, *self.further_roots)

    @property
    def has_tls(self) -> bool:
        """Whether the service itself speaks TLS."""
        return self.tls_certificate is not None

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def url(self, port: int | None = None) -> str:
        """Returns the address that people open.

        Args:
            port: the port that the service really listens on; None for the one of the settings.
        """
        if self.public_url:
            return self.public_url.rstrip("/")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.has_tls else 'http'}://{host}:{self.port if port is None else port}"

    def host_names(self) -> frozenset[str]:
        """Returns the names, without ports, that a request's Host header may have."""
        names = {self.host.lower()}
        if self.public_url:
            names.add((urlsplit(self.public_url).hostname or "").lower())
        if self.is_loopback:
            names |= {"localhost", "127.0.0.1", "::1"}
        return frozenset(names - {"", "0.0.0.0", "::"})
