"""The folder in which bad requests are made: a run, broken files, and paths that cannot be used."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import save_config, to_config
from ortlaunch.run.run import Run

RUN = "aaaaaa"
"""The short id of the run, which has finished."""
BROKEN = {
    "syntax": b"name: mlp\nparams:\n  a: [\n",
    "twice": b"seed: 1\nseed: 2\n",
    "binary": b"\xff\xfe\x00\x80" * 200,
    "nul": b"name: mlp\x00\n",
    "python": b'name: !!python/object/apply:os.system ["touch planted"]\n',
    "alias": b"name: *nowhere\n",
    "tag": b"name: !unknown x\n",
    "list": b"- a\n- b\n",
    "number": b"5\n",
    "text": b"only words\n",
    "deep": b"name: " + b"[" * 5000 + b"\n",
    "defaults": b"defaults: 5\n",
    "lacking": b"defaults:\n  - nowhere: nothing\n",
    "circle": b"defaults:\n  - circle\n",
    "key": b"nosuchkey: 5\n",
    "digits": b"seed: " + b"9" * 10_000 + b"\n",
    "hexadecimal": b"seed: 0x" + b"f" * 10_000 + b"\n",
    "infinite": b"seed: .inf\n",
    "cycle": b"name: &a [*a]\n",
    "interpolation": b"name: ${nowhere}\n",
    "escape": b'name: "\\e[31m\\0"\n',
}
"""The contents of broken files of configuration by their names."""


@dataclass(frozen=True)
class World:
    """The folder, which no bad request may change."""

    path: Path

    @property
    def work(self) -> Path:
        """The working folder of the requests."""
        return self.path / "work"

    @property
    def environment(self) -> dict[str, str]:
        """The variables of the requests. What may be kept, such as the list of run roots, goes outside `watched`."""
        kept = ("PATH", "LANG", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
        return {name: os.environ[name] for name in kept if name in os.environ} | {
            "HOME": str(self.path / "home"),
            "TMPDIR": str(self.path / "tmp"),
            "ORTLAUNCH_CACHE": str(self.path.parent / f"{self.path.name}-cache"),
            "ORTLAUNCH_JOBS": str(self.path / "jobs"),
            "ORTLAUNCH_SLURM_PROFILES": str(self.path / "profiles"),
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "OMP_NUM_THREADS": "1",
            "PYTHONUTF8": "1",
        }

    def state(self) -> dict[str, tuple[int, int, int]]:
        """Mode, size and time of every file. A folder in which something came and went again is unchanged."""
        found = {}
        for path in self.path.rglob("*"):
            stat = path.lstat()
            content = (0, 0) if S_ISDIR(stat.st_mode) else (stat.st_size, stat.st_mtime_ns)
            found[str(path.relative_to(self.path))] = (stat.st_mode, *content)
        return found


def made(path: Path) -> World:
    """Makes the folder."""
    world = World(path)
    for name in ("work/runs/default", "work/full", "home", "tmp", "jobs", "profiles", "cfg/model", "cfg/optimizer"):
        (path / name).mkdir(parents=True)
    (world.work / "file").write_text("a file\n")
    (world.work / "full" / "inner").write_text("a file\n")
    (world.work / "loop").symlink_to("loop")
    for name, content in BROKEN.items():
        for place in ("jobs", "profiles", "cfg/model", "cfg/optimizer"):
            (path / place / f"{name}.yaml").write_bytes(content)
    _make_run(world.work / "runs" / "default" / f"20260101-120000-mlp-{RUN}")
    return world


def _make_run(path: Path) -> None:
    run = Run(path)
    run.logs.mkdir(parents=True)
    (run.logs / "rank-0.log").write_text("a line\n")
    save_config(
        to_config(compose(["model=mlp", "backend=eager", "device=cpu", "tracking=none", "train.steps=10"])),
        run.config_file,
    )
    with run.journal() as journal:
        journal.start("default", "mlp", RUN)
        journal.params({"train": {"steps": 10}})
        journal.metrics(10, {"train/loss": 1.0})
        journal.end("FINISHED")
