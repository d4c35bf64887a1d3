"""MLflow's tracking store of a script's own run: ``ortlaunch://RUN_DIR``.

ortlaunch gives a script this tracking URI. Whatever the script logs by MLflow's interface becomes events of the run's
journal, and the relay sends them with all others to the run's own MLflow run. So there is one run over all attempts,
one writer of its store, and a server that is away keeps nothing waiting.

MLflow asks `open_store` for the store, by the entry point ``ortlaunch`` of its group ``mlflow.tracking_store``, and
imports this module with every ``import mlflow``: it imports nothing heavy itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from ortlaunch.tracking.script_run import ScriptStore


def open_store(store_uri: str, artifact_uri: str | None = None) -> ScriptStore:
    """Opens the store of a run; MLflow calls it.

    Args:
        store_uri: ``ortlaunch://RUN_DIR``.
        artifact_uri: is not used: files go into the run folder.
    """
    from ortlaunch.tracking.script_run import ScriptStore

    return ScriptStore(Path(unquote(urlsplit(store_uri).path)))
