"""MLflow as a tracker: its rules, places, credentials and commands; `sink.py` is what writes there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.base.secrets import redacted, scrubbed
from ortlaunch.config.schema import Config, MlflowConfig
from ortlaunch.config.tracking_uri import check_uri, compare_command, resolve_tracking, sqlite_path
from ortlaunch.tracking.sink import MlflowSink
from ortlaunch.tracking.tracker import Context, Tracker

TRACKING_URI = "ORTLAUNCH_TRACKING_URI"
"""Variable with the tracking URI where it holds a password, which stands in no file."""


class MlflowTracker(Tracker[MlflowConfig]):
    """MLflow, embedded or a server."""

    title = "MLflow"
    config = MlflowConfig
    lists_runs = True
    mark_key = "mlflow_run_id"

    def check(self, cfg: MlflowConfig) -> None:
        """Refuses a URI that MLflow would refuse, and waits that are no waits."""
        if cfg.timeout_seconds < 1:
            raise RequestError(f"tracking.timeout_seconds={cfg.timeout_seconds}: must be at least 1")
        if cfg.flush_seconds < 0:
            raise RequestError(f"tracking.flush_seconds={cfg.flush_seconds}: must be at least 0")
        check_uri(cfg.uri)

    def resolved(self, cfg: MlflowConfig, cwd: Path) -> MlflowConfig:
        """With an absolute database file and artifact folder."""
        return resolve_tracking(cfg, cwd)

    def public(self, cfg: MlflowConfig) -> MlflowConfig:
        """Without the credentials that the URI may carry."""
        return replace(cfg, uri=redacted(cfg.uri))

    def environment(self, cfg: MlflowConfig) -> dict[str, str]:
        """The URI, where it holds a password."""
        return {TRACKING_URI: cfg.uri} if redacted(cfg.uri) != cfg.uri else {}

    def restored(self, cfg: MlflowConfig, environment: Mapping[str, str]) -> MlflowConfig:
        """With the URI that the environment carries."""
        return replace(cfg, uri=environment.get(TRACKING_URI) or cfg.uri)

    def place(self, cfg: MlflowConfig) -> str:
        """The URI without credentials."""
        return redacted(cfg.uri)

    def scrubbed(self, cfg: MlflowConfig, text: str) -> str:
        """Without the URI's credentials and those of MLflow's own variables."""
        return scrubbed(text, cfg.uri)

    def files(self, cfg: MlflowConfig) -> list[Path]:
        """An embedded store's database with what SQLite puts beside it, and the artifacts."""
        files = [] if "://" in cfg.artifacts else [Path(cfg.artifacts)]
        store = sqlite_path(cfg.uri)
        if store is not None:
            files += [store.with_name(f".{store.name}.lock")]
            files += [store.with_name(f"{store.name}{suffix}") for suffix in ("", "-journal", "-wal", "-shm")]
        return files

    def compare_command(self, cfg: MlflowConfig, *words: str) -> str:
        """`ortlaunch compare` with this store."""
        return compare_command(cfg, *words)

    def where(self, cfg: MlflowConfig, run_dir: Path, mark: str | None) -> str:
        """MLflow's id of the run."""
        return f"MLflow run {mark or '-'}"

    def lines(self, cfg: MlflowConfig, run_dir: Path, experiment: str, mark: str | None) -> list[tuple[str, str]]:
        """The store with the run's id, and how to compare it."""
        return [
            ("mlflow", f"{redacted(cfg.uri)} run {mark}"),
            ("compare", compare_command(cfg, "--experiment", experiment)),
        ]

    def sink(self, cfg: MlflowConfig, context: Context) -> MlflowSink:
        """The run in MLflow."""
        return MlflowSink(cfg, context)


def mlflow_of(config: Config) -> MlflowConfig | None:
    """The store that `ortlaunch compare` reads; None for a run that is not recorded in MLflow."""
    return config.tracking if isinstance(config.tracking, MlflowConfig) else None
