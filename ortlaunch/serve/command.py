"""`ortlaunch serve`: starts the service. It imports the web libraries late, so that `--help` works without them."""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import os
import shlex
import shutil
import socket
import ssl
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ortlaunch.base import exit_codes
from ortlaunch.base.addresses import split_address
from ortlaunch.base.arguments import Parser, positive, whole
from ortlaunch.base.errors import RequestError
from ortlaunch.base.locks import exclusive, is_held
from ortlaunch.base.reading import in_words
from ortlaunch.base.text import say
from ortlaunch.run.roots import RUN_ROOT
from ortlaunch.serve.settings import DEFAULT_PORT, LOOPBACK, OIDC_SECRET, Settings

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from ortlaunch.serve.service import Service

NEEDED = ("alembic", "argon2", "fastapi", "httptools", "jinja2", "prometheus_client", "sqlalchemy", "uvicorn")
"""The packages of the extra `serve`, by the names that they are imported under."""
_MOST_PORTS = 65535
_LEAVING_SECONDS = 1
_ROOT_SECONDS = 5.0
_DEAF_SECONDS = 300
"""A connection that takes nothing for so long is ended."""
_DESCRIPTION = """\
Start the service: a page and an API in which several people submit, queue, follow, stop and compare runs.

It listens on this machine alone. At the first start it prints a link by which the first administrator chooses a
password. Runs that it starts go on when it ends, and it finds them again.

Another address than this machine's needs TLS: a certificate of the service's own, or a reverse proxy that is named
with --trusted-proxy and --public-url.

Runs belong to the Unix user of the person who submits them. For other users than the service's own it needs sudo and
the file unix_users beside its database (docs: serve). --shared-account lets all runs belong to the service's account;
every page then says so."""


def main(arguments: list[str]) -> int:
    """Runs `ortlaunch serve` until a signal ends it.

    Args:
        arguments: the command line after the verb.

    Raises:
        RequestError: the service may not or cannot start like this.
    """
    options = _parser().parse_args(arguments)
    settings = settings_of(options)
    check(settings)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise RequestError(f"serve: these packages are missing: {', '.join(missing)} (pip install 'ortlaunch[serve]')")
    if options.link is not None:
        _print_link(settings, options.link)
        return exit_codes.DONE
    return _serve(settings)


def settings_of(options: argparse.Namespace) -> Settings:
    """Returns what the command line says."""
    first, *further = options.root or [RUN_ROOT]
    return Settings(
        host=options.host,
        port=options.port,
        root=first.absolute(),
        further_roots=tuple(root.absolute() for root in further),
        database_path=options.database and options.database.absolute(),
        tls_certificate=options.tls_certificate,
        tls_key=options.tls_key,
        trusted_proxy=options.trusted_proxy,
        public_url=options.public_url,
        shared_account=options.shared_account,
        slots=options.slots,
        oidc_issuer=options.oidc_issuer,
        oidc_client=options.oidc_client,
        oidc_claim=options.oidc_claim,
        identity_header=options.identity_header,
        on_end=options.on_end,
    )


def check(settings: Settings) -> None:
    """Refuses what would be open to more people than the user means.

    Raises:
        RequestError: the message names the option that is missing or wrong.
    """
    if (settings.tls_certificate is None) != (settings.tls_key is None):
        raise RequestError("serve: a certificate and its key go together (--tls-certificate, --tls-key)")
    for file in (settings.tls_certificate, settings.tls_key):
        if file is not None and not file.is_file():
            raise RequestError(f"serve: {file}: there is no such file")
    if settings.tls_certificate is not None and settings.tls_key is not None:
        _check_certificate(settings.tls_certificate, settings.tls_key)
    if settings.public_url is not None:
        _check_url(settings.public_url)
    if settings.trusted_proxy is not None:
        _check_proxy(settings)
    if not settings.is_loopback and not settings.has_tls and settings.trusted_proxy is None:
        raise RequestError(
            f"serve: {settings.host} is open to other machines, which needs TLS: a certificate (--tls-certificate and "
            "--tls-key) or a reverse proxy with one (--trusted-proxy ADDRESS --public-url https://NAME)"
        )
    if settings.host in ("0.0.0.0", "::") and settings.public_url is None:
        raise RequestError(
            f"serve: nobody can open {settings.host}: give the address that people open, --public-url=URL"
        )
    if settings.identity_header is not None and settings.trusted_proxy is None:
        raise RequestError("serve: --identity-header needs --trusted-proxy ADDRESS: others could write the header too")
    if settings.oidc_issuer is not None or settings.oidc_client is not None:
        _check_provider(settings)
    if settings.on_end is not None:
        _check_on_end(settings.on_end)
    for root in settings.further_roots:
        is_folder = _is_folder(root)
        if is_folder is None:
            say(
                f"ortlaunch serve: --root {root} does not answer, as when a file server hangs: its runs are shown later"
            )
        elif not is_folder:
            raise RequestError(f"serve: --root {root}: there is no such folder")


def _is_folder(root: Path) -> bool | None:
    """Whether a run root is a folder; None if nothing answers soon. The service starts for the other roots then."""
    found: list[bool] = []

    def look() -> None:
        try:
            found.append(root.is_dir())
        except OSError:
            found.append(False)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(_ROOT_SECONDS)
    return found[0] if found else None


def _check_certificate(certificate: Path, key: Path) -> None:
    try:
        # Without a password for the key, the terminal would be asked for one.
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        raise RequestError(
            f"serve: the certificate {certificate} and the key {key} cannot be used: {str(reason).lower()} (both "
            "must be in the PEM format, the key that of the certificate, and without a passphrase)"
        ) from None


def _check_url(url: str) -> None:
    parts = split_address(url)
    plain = parts.scheme in ("http", "https") and parts.hostname and parts.path in ("", "/") and not parts.query
    if not plain or "@" in parts.netloc:
        raise RequestError(f"serve: --public-url {url}: must be https://NAME or https://NAME:PORT")


def _check_proxy(settings: Settings) -> None:
    try:
        ipaddress.ip_network(settings.trusted_proxy or "", strict=False)
    except ValueError:
        raise RequestError(
            f"serve: --trusted-proxy {settings.trusted_proxy}: must be an IP address or network"
        ) from None
    if not (settings.public_url or "").startswith("https://"):
        raise RequestError("serve: --trusted-proxy needs --public-url https://NAME, the address that people open")


def _check_on_end(command: str) -> None:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise RequestError(f"serve: --on-end {command}: {error}") from None
    if not words or shutil.which(words[0]) is None:
        raise RequestError(f"serve: --on-end {command}: there is no such program")


def _check_provider(settings: Settings) -> None:
    if settings.oidc_issuer is None or settings.oidc_client is None:
        raise RequestError("serve: --oidc-issuer and --oidc-client go together")
    parts = split_address(settings.oidc_issuer)
    if not parts.hostname or (parts.scheme != "https" and parts.hostname not in ("localhost", LOOPBACK)):
        raise RequestError(f"serve: --oidc-issuer {settings.oidc_issuer}: must begin with https:// and a name")
    if not os.environ.get(OIDC_SECRET):
        raise RequestError(f"serve: --oidc-issuer needs the client's secret in the environment, as {OIDC_SECRET}")
    if importlib.util.find_spec("authlib") is None:
        raise RequestError("serve: --oidc-issuer needs the package authlib (pip install 'ortlaunch[oidc]')")


def _serve(settings: Settings) -> int:
    import uvicorn

    from ortlaunch.serve.app import make_app
    from ortlaunch.serve.connections import protocol_for
    from ortlaunch.serve.database import check_database

    check_database(settings.database)
    # It comes first: a port that is taken leaves no folder and no lock file behind.
    bound = _bound(settings)
    for folder in (settings.database.parent, settings.slots_lock.parent):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(
                f"serve: the folder {folder} cannot be made: {error.strerror}: choose another place by --root or "
                "--database"
            ) from None
    with exclusive(settings.lock_file) as mine, exclusive(settings.slots_lock) as mine_alone:
        if not mine:
            raise RequestError(_another(settings))
        if not mine_alone:
            raise RequestError(
                f"serve: another service starts the runs of {settings.root} on this machine, with another database: "
                "name another run root with --root"
            )
        app = make_app(settings)
        _greet(settings, app.state.service, bound.getsockname()[1])
        config = uvicorn.Config(
            _behind_proxy(app, settings),
            log_level="warning",
            access_log=False,
            server_header=False,
            ws="none",
            lifespan="on",
            http=protocol_for(settings.trusted_proxy),
            proxy_headers=False,
            ssl_certfile=settings.tls_certificate,
            ssl_keyfile=settings.tls_key,
            timeout_graceful_shutdown=_LEAVING_SECONDS,
        )
        server = uvicorn.Server(config)
        server.run(sockets=[bound])
    return exit_codes.DONE if server.started else exit_codes.FAILED


def _behind_proxy(app: ASGIApp, settings: Settings) -> ASGIApp:
    """Lets the headers of the trusted proxy count, and those of nobody else."""
    from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

    from ortlaunch.serve.identity import ByProxy

    if settings.trusted_proxy is None:
        return app
    # uvicorn's types of an application are others than Starlette's.
    inner: Any = ProxyHeadersMiddleware(app, trusted_hosts=settings.trusted_proxy)  # type: ignore[arg-type]
    if settings.identity_header is None:
        return cast("ASGIApp", inner)
    return ByProxy(inner, settings.trusted_proxy, settings.identity_header)


def _another(settings: Settings) -> str:
    return f"serve: another service uses {settings.database} (name another one with --database)"


def _bound(settings: Settings) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # The connections have it from this socket: one whose client reads nothing could not be closed otherwise, since
        # what was sent before is still on its way.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAF_SECONDS * 1000)
        bound.bind(address)
        bound.listen()  # A browser that opens the address at once waits, instead of being refused.
    except (OSError, UnicodeError) as error:
        # A name that is none of a host has no form that can be looked up.
        if is_held(settings.lock_file):
            raise RequestError(_another(settings)) from None
        raise RequestError(f"serve: {settings.host}:{settings.port} cannot be used: {in_words(error)}") from None
    return bound


def _greet(settings: Settings, service: Service, port: int) -> None:
    from ortlaunch.serve.accounts import first_link

    url = settings.url(port)
    say(f"ortlaunch serve: {url}  runs in {settings.root}  (Ctrl-C ends the service, runs go on)")
    if settings.shared_account:
        say("ortlaunch serve: all runs belong to this account, whoever submits them (--shared-account)")
    secret = first_link(service)
    if secret is not None:
        # `say` would hide the secret, and showing it once is what this line is for.
        print(f"ortlaunch serve: the first administrator opens, within an hour: {url}/link/{secret}", flush=True)


def _print_link(settings: Settings, name: str) -> None:
    from ortlaunch.serve.accounts import link_by_name
    from ortlaunch.serve.database import open_database
    from ortlaunch.serve.service import Service

    if not settings.database.is_file():
        raise RequestError(f"serve: there is no database {settings.database}")
    service = Service(settings, open_database(settings.database))
    secret = link_by_name(service, name)
    if secret is None:
        raise RequestError(f"serve: there is no user {name}")
    print(f"{settings.url()}/link/{secret}")


def _port(text: str) -> int:
    value = whole(text)
    if value is None or value > _MOST_PORTS:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a port, 0 to {_MOST_PORTS}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ortlaunch serve", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--host", default=LOOPBACK, help=f"the address to listen on (default: {LOOPBACK})")
    add("--port", type=_port, default=DEFAULT_PORT, help=f"the port; 0 takes a free one (default: {DEFAULT_PORT})")
    add(
        "--root",
        type=Path,
        action="append",
        metavar="FOLDER",
        help="the run root of new runs (default: runs); a further one is shown too",
    )
    add("--database", type=Path, metavar="FILE", help="on a local disk (default: .serve/serve.db in the run root)")
    add("--tls-certificate", type=Path, metavar="FILE", help="the service speaks TLS itself, with --tls-key FILE")
    add("--tls-key", type=Path, metavar="FILE", help="the key of the certificate")
    add("--trusted-proxy", metavar="ADDRESS", help="the reverse proxy that ends TLS; its X-Forwarded headers count")
    add("--public-url", metavar="URL", help="the address that people open, if it is another one")
    add("--shared-account", action="store_true", help="all runs belong to the account of the service")
    add("--slots", type=positive, metavar="N", help="workers that train at once (default: the GPUs, or 1 without)")
    add("--oidc-issuer", metavar="URL", help="an OpenID Connect provider that vouches for users, by its address")
    add("--oidc-client", metavar="ID", help=f"how the provider knows the service; its secret is in {OIDC_SECRET}")
    add("--oidc-claim", metavar="NAME", default="preferred_username", help="the claim with the user's name here")
    add("--identity-header", metavar="NAME", help="the header by which the trusted proxy says who somebody is")
    add("--on-end", metavar="COMMAND", help="run for each run that ends, with JSON on its standard input")
    add("--link", metavar="USER", help="print a link by which this user chooses another password, and end")
    return parser
