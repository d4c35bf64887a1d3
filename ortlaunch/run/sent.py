"""What the relay has noted of a run beside its journal."""

from __future__ import annotations

import json
from pathlib import Path


def mlflow_run_id(run_dir: Path) -> str | None:
    """The id that MLflow gave to a run; None where it has not been sent."""
    try:
        noted = json.loads((run_dir / "relay.json").read_text())
    except (OSError, ValueError):
        return None
    run_id = noted.get("mlflow_run_id") if isinstance(noted, dict) else None
    return run_id if isinstance(run_id, str) else None
