"""MLflow as a tracker: its rules, paths, credentials and commands. `sink.py` writes to MLflow."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import is_there
from ortlaunch.base.secrets import has_credentials, redacted, scrubbed, without_secrets_of
from ortlaunch.config.schema import Config, MlflowConfig
from ortlaunch.config.tracking_uri import check_uri, compare_command, is_databricks, resolve_tracking, sqlite_path
from ortlaunch.tracking import sqlite_store
from ortlaunch.tracking.tracker import Context, Tracker

if TYPE_CHECKING:
    from ortlaunch.tracking.sink import MlflowSink

_MAGIC = b"SQLite format 3\0"
TRACKING_URI = "ORTLAUNCH_TRACKING_URI"
"""The environment variable for a tracking URI that holds a password, because no file may hold it."""


class MlflowTracker(Tracker[MlflowConfig]):
    """MLflow, embedded or a server."""

    title = "MLflow"
    config = MlflowConfig
    lists_runs = True
    mark_key = "mlflow_run_id"
    variable = TRACKING_URI

    def check(self, cfg: MlflowConfig) -> None:
        """Refuses a URI that MLflow would refuse, and a file that is no database."""
        check_uri(cfg.uri)
        if is_databricks(cfg.uri) and not (cfg.experiment_name or "").startswith("/"):
            raise RequestError(
                f"tracking.uri={redacted(cfg.uri)}: Databricks names an experiment by its path in the workspace: give "
                "tracking.experiment_name=/Users/NAME/TITLE"
            )
        if (store := sqlite_path(cfg.uri)) is not None:
            check_file(cfg.uri, store)
        if has_credentials(cfg.artifacts):
            raise RequestError(
                f"tracking.artifacts={redacted(cfg.artifacts)}: MLflow would show the credentials with every run: set "
                "the storage's own variables instead, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )

    def resolved(self, cfg: MlflowConfig, cwd: Path) -> MlflowConfig:
        """The configuration with an absolute database file and artifact folder."""
        return resolve_tracking(cfg, cwd)

    def public(self, cfg: MlflowConfig) -> MlflowConfig:
        """The configuration without the credentials in the URI."""
        return replace(cfg, uri=_public(cfg.uri), artifacts=_public(cfg.artifacts))

    def environment(self, cfg: MlflowConfig) -> dict[str, str]:
        """A variable with the URI, if the URI holds a password."""
        return {TRACKING_URI: cfg.uri} if has_credentials(cfg.uri) else {}

    def restored(self, cfg: MlflowConfig, environment: Mapping[str, str]) -> MlflowConfig:
        """The configuration with the URI from the environment, if that is the same URI with its password."""
        uri = environment.get(TRACKING_URI, "")
        # The variable may be left from another run, whose store must not get this run.
        return replace(cfg, uri=uri) if uri and _public(uri) == cfg.uri else cfg

    def place(self, cfg: MlflowConfig) -> str:
        """The URI without credentials."""
        return redacted(cfg.uri)

    def scrubbed(self, cfg: MlflowConfig, text: str) -> str:
        """The text without the credentials in the URI and in MLflow's own variables."""
        return scrubbed(text, cfg.uri)

    def files(self, cfg: MlflowConfig) -> list[Path]:
        """The database of an embedded store with SQLite's files beside it, and the artifact folder."""
        files = [] if "://" in cfg.artifacts else [Path(cfg.artifacts)]
        store = sqlite_path(cfg.uri)
        if store is not None:
            files += [store.with_name(f".{store.name}.lock")]
            files += [store.with_name(f"{store.name}{suffix}") for suffix in ("", "-journal", "-wal", "-shm")]
        return files

    def compare_command(self, cfg: MlflowConfig, *words: str) -> str:
        """The command `ortlaunch compare` for this store."""
        return compare_command(cfg, *words)

    def where(self, cfg: MlflowConfig, run_dir: Path, mark: str | None) -> str:
        """MLflow's id of the run."""
        return f"MLflow run {mark or '-'}"

    def lines(self, cfg: MlflowConfig, run_dir: Path, experiment: str, mark: str | None) -> list[tuple[str, str]]:
        """The store with the run's id, and the command that compares the experiment's runs."""
        return [
            ("mlflow", f"{redacted(cfg.uri)} run {mark}"),
            ("compare", compare_command(cfg, "--experiment", cfg.experiment_name or experiment)),
        ]

    def sink(self, cfg: MlflowConfig, context: Context) -> MlflowSink:
        """The sink that writes the run to MLflow."""
        from ortlaunch.tracking.sink import MlflowSink

        return MlflowSink(cfg, context)


def check_file(uri: str, store: Path, key: str = "tracking.uri") -> None:
    """Refuses a file in which MLflow cannot make a store, or which belongs to another program.

    Args:
        uri: the address, without credentials.
        store: its file.
        key: the key or option that has it.

    Raises:
        RequestError: the message names the file and what to do.
    """
    shown = f"{key}={uri}"
    with suppress(OSError):
        if store.is_dir():
            raise RequestError(f"{shown}: {store} is a folder: name a file, or move the folder away")
        if store.exists() and not store.is_file():
            raise RequestError(f"{shown}: {store} is no plain file: name another one")
        above = next(folder for folder in store.absolute().parents if is_there(folder))
        if not above.is_dir():
            raise RequestError(f"{shown}: {above} is no folder, so {store} cannot be made: name another file")
        if store.is_symlink() and not store.exists():
            raise RequestError(
                f"{shown}: {store} is a link to a file that is not there: name that file itself, "
                f"{key}=sqlite:///{store.resolve()}"
            )
        # MLflow makes a store of an empty file.
        begins = b""
        if store.is_file():
            with store.open("rb") as file:
                begins = file.read(len(_MAGIC))
        if begins and begins != _MAGIC:
            raise RequestError(
                f"{shown}: {store} is no SQLite database: move it away, and ortlaunch makes a new store, "
                "which ortlaunch sync --all fills with earlier runs"
            )
        # A database that another process has locked is looked at when the run is sent.
        with suppress(sqlite3.Error):
            if begins and sqlite_store.is_foreign(store):
                raise RequestError(f"{shown}: {store} is the database of another program: name another file")


def _public(uri: str) -> str:
    return without_secrets_of("uri", uri)


def mlflow_of(config: Config) -> MlflowConfig | None:
    """The store that `ortlaunch compare` reads; None for a run that is not recorded in MLflow."""
    return config.tracking if isinstance(config.tracking, MlflowConfig) else None
