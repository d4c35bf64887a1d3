"""Training data: sources by name, read in batches that are shared out over the ranks. Imported by workers only."""

from __future__ import annotations

from ortlaunch.data.loader import Loader, build_loader

__all__ = ["Loader", "build_loader"]
