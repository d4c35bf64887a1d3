"""The packages of ``make test-neighbours`` come after ortlaunch's own; their torchvision is of another build."""

from __future__ import annotations

import os
import sys

FOLDER = os.environ.get("ORTLAUNCH_NEIGHBOURS", "")
if FOLDER and FOLDER not in sys.path:
    sys.path.append(FOLDER)
