"""The run roots of a user. Each folder that holds runs is listed once in the user's cache."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ortlaunch.base.files import replace_text
from ortlaunch.base.locks import exclusive
from ortlaunch.base.user import user_cache

RUN_ROOT = Path("runs")
"""The default run root, relative to the folder where the run is started."""

_MOST = 50
_WAIT_SECONDS = 2.0


def keep(path: Path, text: str) -> None:
    """Writes a file of the cache atomically. An error is ignored, because a run does not need the cache."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)


def known_roots() -> list[Path]:
    """The run roots to search: this folder's, then those in which the user has started runs, the latest first."""
    here = RUN_ROOT.absolute()
    return [root for root in dict.fromkeys([here, *_noted()]) if root.is_dir()]


def note_root(root: Path) -> None:
    """Remembers a run root, so that its runs are found from any folder."""
    if _noted()[:1] == [root]:
        return
    file = _file()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
    # Of two runs that begin at the same moment, neither writes the list without the other's root.
    with exclusive(file.with_name(f".{file.name}.lock"), _WAIT_SECONDS):
        kept = [other for other in _noted() if other != root and other.is_dir()]
        keep(file, "".join(f"{one}\n" for one in [root, *kept][:_MOST]))


def _noted() -> list[Path]:
    try:
        lines = _file().read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
    return [Path(line) for line in lines if line]


def _file() -> Path:
    return user_cache() / "run-roots"
