"""The state of the git repository that ortlaunch was started in: its commit, its changes and a patch of them."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

PATCH_LIMIT = 1024 * 1024
"""Greatest size of a patch that is kept, in bytes."""
_UNTRACKED_LIMIT = 200
_SECONDS = 10.0
# The user's settings of git must not change the output of these commands.
_SETTINGS = ("-c", "core.quotepath=false", "-c", "core.fsmonitor=false", "-c", "color.ui=false")
_DIFF = (
    *("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--submodule=short"),
    *("--src-prefix=a/", "--dst-prefix=b/"),
)


@dataclass(frozen=True)
class Repository:
    """A repository at one moment."""

    root: Path
    commit: str
    dirty: bool
    """Whether tracked files differ from the commit, staged or not."""
    branch: str | None = None
    """None where HEAD is detached."""
    untracked: list[str] = field(default_factory=list)
    """Names of the files and folders that git does not track."""
    excluded: tuple[str, ...] = ()
    """Pathspecs of the files that ortlaunch writes, which are left out."""

    def facts(self) -> dict[str, object]:
        """Returns what the run's record holds about the repository."""
        return {"commit": self.commit, "dirty": self.dirty, "branch": self.branch, "root": str(self.root)}

    def patch(self) -> bytes:
        """Returns a patch for ``git apply``. Lines at its top begin with '#' and say what is missing.

        The patch names untracked files but does not contain them. If it is longer than `PATCH_LIMIT` bytes, the
        contents of binary files are left out. If it is then still too long, it is cut off.
        """
        notes = [f"changes of tracked files against {self.commit}, staged ones included"]
        diff, whole = self._diff("--binary")
        if not whole:
            notes.append(f"with binary files it is longer than {PATCH_LIMIT} bytes: their contents are left out")
            diff, whole = self._diff()
        if not whole:
            notes.append(f"cut off after {PATCH_LIMIT} bytes: it cannot be applied as it is")
        # A name with a line break must not end the comment.
        notes += [f"untracked: {name}".replace("\n", "\\n") for name in self.untracked[:_UNTRACKED_LIMIT]]
        if len(self.untracked) > _UNTRACKED_LIMIT:
            notes.append(f"and {len(self.untracked) - _UNTRACKED_LIMIT} more untracked")
        head = "".join(f"# {note}\n" for note in notes)
        return head.encode("utf-8", "surrogateescape") + diff

    def _diff(self, *options: str) -> tuple[bytes, bool]:
        """Returns the diff, and whether it is complete."""
        return _limited([*_DIFF, *options, self.commit, "--", ".", *self.excluded], self.root, PATCH_LIMIT)


def repository(folder: Path, ours: Sequence[Path] = ()) -> Repository | None:
    """Returns the repository that a folder is in; None outside of one, before its first commit, or without git.

    Args:
        folder: any folder of its working tree.
        ours: files and folders that ortlaunch writes; they do not count as the user's changes.
    """
    found = _lines("rev-parse", "--show-toplevel", "HEAD", folder=folder)
    if found is None or len(found) != 2:
        return None
    root, commit = Path(found[0]), found[1]
    branch = _lines("symbolic-ref", "--quiet", "--short", "HEAD", folder=root)
    own = [path.resolve() for path in ours]
    inside = [path.relative_to(root.resolve()) for path in own if path.is_relative_to(root.resolve())]
    excluded = tuple(f":(exclude,top,literal){path}" for path in inside if path.parts)
    listed = _status(root, "normal", excluded)
    if listed is None:
        # git may need too long to find all untracked files. The second call does not look for them.
        listed = _status(root, "no", excluded)
    if listed is None:
        return None
    untracked = [entry[3:] for entry in listed if entry.startswith("?? ")]
    return Repository(
        root=root,
        commit=commit,
        dirty=len(untracked) < len(listed),
        branch=branch[0] if branch else None,
        untracked=untracked,
        excluded=excluded,
    )


def _status(root: Path, untracked: str, excluded: tuple[str, ...]) -> list[str] | None:
    """Returns one entry for each file that differs; None if git fails or takes too long."""
    options = ("--porcelain", "-z", f"--untracked-files={untracked}", "--ignore-submodules=none")
    return _lines("status", *options, "--", ".", *excluded, folder=root, end="\0")


def _lines(*arguments: str, folder: Path, end: str = "\n") -> list[str] | None:
    """Returns the lines that git prints; None if it fails or takes too long."""
    try:
        done = subprocess.run(
            ["git", *_SETTINGS, *arguments],
            cwd=folder,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return [line for line in os.fsdecode(done.stdout).split(end) if line]


def _limited(arguments: list[str], folder: Path, limit: int) -> tuple[bytes, bool]:
    """Returns the first `limit` bytes of git's output, and whether that is all of it."""
    try:
        process = subprocess.Popen(
            ["git", *_SETTINGS, *arguments],
            cwd=folder,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return b"", False
    watch = threading.Timer(_SECONDS, process.kill)
    watch.start()
    try:
        assert process.stdout is not None
        with process.stdout as output:
            text = output.read(limit + 1)
        if len(text) > limit:
            process.kill()
            return text[:limit], False
        return text, process.wait() == 0
    finally:
        watch.cancel()
        process.kill()
        process.wait()


def _environment() -> dict[str, str]:
    # These commands must not take the lock that a commit may need meanwhile, nor wait for a pager or a password.
    return {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_PAGER": "cat", "GIT_TERMINAL_PROMPT": "0"}
