"""Run folders that an earlier version has made: unpacked for a test, with stand-ins for the machine that made them.

Runs keep absolute paths, and places in their journals as counts of bytes. So the folder in which they are stored has a
path of a fixed length, and moves only to one of the same length.
"""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
ARCHIVE = REPOSITORY / "tests" / "stored_runs" / "runs.tar.xz"
LENGTH = 150
"""Of the folder's path, in bytes: longer than that of a test's own folder."""
PLACE = "/stored/".ljust(LENGTH, "x")
"""The folder's path in the archive."""

_STAND_INS = {
    "sbatch": '[ "$1" = --test-only ] || echo "$STAND_IN_JOB"',
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done\nSLURM_NODEID=0 exec "$@"',
    "scontrol": '[ "$2" != hostnames ] || echo "$3"\n[ "$2" != job ] || echo "JobId=$4 JobState=RUNNING Restarts=0"',
    "squeue": 'cat "$0.txt"',
    "sacct": "",
}
"""SLURM's commands as one node without a controller answers them; the queue is what a test writes into squeue.txt."""


class Stored:
    """The folder: `work/` where the runs were started, and the `cache/` of who started them."""

    def __init__(self, parent: Path) -> None:
        """
        Args:
            parent: below it the folder lies, under a name that makes its path as long as it has to be.
        """
        self.folder = parent / ("x" * (LENGTH - len(os.fsencode(parent)) - 1))
        assert len(os.fsencode(self.folder)) == LENGTH, f"{parent} is too long a path for the stored runs"
        self.work = self.folder / "work"
        self.cache = self.folder / "cache"
        self.bin = self.folder / "bin"

    @property
    def variables(self) -> dict[str, str]:
        """Of the machine where the runs were made: SLURM is there."""
        return {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(self.folder),
            "ORTLAUNCH_CACHE": str(self.cache),
        }

    @property
    def environment(self) -> dict[str, str]:
        """All variables of who started the runs."""
        return self.variables | {"LANG": "C.UTF-8", "PYTHONPATH": str(self.folder / "tree")}

    def runs(self, name: str) -> list[Path]:
        """The run folders with this name."""
        return sorted(self.work.glob(f"runs/*/????????-??????-{name}-??????"))

    def run(self, name: str) -> Path:
        """The only one."""
        (found,) = self.runs(name)
        return found

    def write_stand_ins(self) -> None:
        """SLURM's commands."""
        self.bin.mkdir()
        for name, text in _STAND_INS.items():
            _write_script(self.bin / name, text)
        self.queue()

    def queue(self, *lines: str) -> None:
        """What squeue says from now on."""
        (self.bin / "squeue.txt").write_text("".join(f"{line}\n" for line in lines))

    def start_job(self, run_dir: Path, job_id: int, restart: int = 0, **variables: str) -> subprocess.Popen[bytes]:
        """Runs a submitted script, as SLURM does when it is the job's turn; what it prints goes to `job_output`."""
        job = {"SLURM_JOB_ID": str(job_id), "SLURM_JOB_NODELIST": "localhost", "SLURM_RESTART_COUNT": str(restart)}
        command = ["bash", str(run_dir / "sbatch.sh")]
        with self.job_output(job_id).open("wb") as output:
            return subprocess.Popen(
                command,
                env=self.environment | job | variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def job_output(self, job_id: int) -> Path:
        """What a job prints."""
        return self.folder / f"job-{job_id}.out"

    def rename(self, old: str, new: str) -> None:
        """Puts one text in the place of another of the same length, wherever the runs have written it."""
        assert len(os.fsencode(old)) == len(os.fsencode(new)), (old, new)
        for path in [*self.work.rglob("*"), *self.cache.rglob("*")]:
            if not path.is_file() or path.is_symlink():
                continue
            if path.suffix == ".db":
                _rename_in_database(path, old, new)
            elif os.fsencode(old) in (content := path.read_bytes()):
                _rewrite(path, content.replace(os.fsencode(old), os.fsencode(new)))


def unpack(parent: Path) -> Stored:
    """Unpacks the stored runs below a folder, as if they had been made there, and on this machine."""
    stored = Stored(parent)
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(stored.folder, filter="data")
    stored.rename(PLACE, str(stored.folder))
    # Whether a launcher still lives can be asked on its own machine alone.
    for path in stored.work.rglob("launcher.json"):
        _rewrite(path, json.dumps(json.loads(path.read_text()) | {"host": socket.gethostname()}).encode())
    # Submitted scripts name the interpreter and the source.
    python = stored.folder / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    _write_script(python, f'exec "{sys.executable}" "$@"')
    (stored.folder / "tree").symlink_to(REPOSITORY)
    stored.write_stand_ins()
    return stored


def _write_script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def _rewrite(path: Path, content: bytes) -> None:
    """With the times that it has: some tell when a run began."""
    times = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def _rename_in_database(path: Path, old: str, new: str) -> None:
    """By SQL, since a long value lies in pieces all over the file."""
    connection = sqlite3.connect(path)

    def column(query: str, number: int) -> list[Any]:
        return [row[number] for row in connection.execute(query).fetchall()]

    with connection:
        for table in column("SELECT name FROM sqlite_master WHERE type = 'table'", 0):
            for name in column(f"PRAGMA table_info({table})", 1):
                connection.execute(
                    f'UPDATE "{table}" SET "{name}" = replace("{name}", ?, ?) WHERE instr("{name}", ?)', (old, new, old)
                )
    connection.close()
