"""TensorBoard: event files in the run folder, so that ``tensorboard --logdir RUNS`` shows every run.

An event file can only be appended to, and TensorBoard shows a point twice that is in the file twice. The relay
therefore stores the file's length as the mark, together with its offset in the journal. Before the sink appends, it
truncates the file to that length. If a relay was killed in between, the next one thus replaces the points that it
wrote.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import PRIVATE
from ortlaunch.base.secrets import is_hidden
from ortlaunch.config.schema import TrackingConfig
from ortlaunch.run.run import Run
from ortlaunch.tracking.tracker import Context, Identity, Sink, Tracker
from ortlaunch.tracking.translate import Ended, Input, Operation, Params, Points, Reopened, Tags

_FILE = "events.out.tfevents.{seconds}.ortlaunch"
"""TensorBoard reads every file as an event file whose name contains `tfevents`."""
_VERSION = "brain.Event:2"


@dataclass
class TensorboardConfig(TrackingConfig):
    """TensorBoard event files, with metrics as scalars, and parameters, tags, data and status as text."""

    name: str = "tensorboard"
    folder: str | None = None
    """Folder for the event files, in which each run has the folder EXPERIMENT/RUN; null writes to `tensorboard` in the
    run folder."""


class TensorboardTracker(Tracker[TensorboardConfig]):
    """Event files for TensorBoard."""

    title = "TensorBoard"
    keeps_artifacts = False
    config = TensorboardConfig

    def check(self, cfg: TensorboardConfig) -> None:
        """Refuses a run if the package is missing, or if the folder is a URL."""
        if importlib.util.find_spec("tensorboard") is None:
            raise RequestError(
                "tracking=tensorboard: the package tensorboard is not installed: pip install 'ortlaunch[tensorboard]'"
            )
        if cfg.folder is not None and "://" in cfg.folder:
            raise RequestError(f"trackers.tensorboard.folder={cfg.folder}: must be a folder, not a URL")

    def resolved(self, cfg: TensorboardConfig, cwd: Path) -> TensorboardConfig:
        """The configuration with an absolute folder."""
        return cfg if cfg.folder is None else replace(cfg, folder=str(cwd.absolute() / Path(cfg.folder).expanduser()))

    def place(self, cfg: TensorboardConfig) -> str:
        """The folder. For a folder in the run folder it is a fixed text, because the run folder may be moved."""
        return cfg.folder or "tensorboard in the run folder"

    def files(self, cfg: TensorboardConfig) -> list[Path]:
        """The folder, if it is outside the run folder."""
        return [] if cfg.folder is None else [Path(cfg.folder)]

    def where(self, cfg: TensorboardConfig, run_dir: Path, mark: str | None) -> str:
        """The folder of the run's event file, as text."""
        return f"TensorBoard at {folder_of(cfg, run_dir)}"

    def lines(self, cfg: TensorboardConfig, run_dir: Path, experiment: str, mark: str | None) -> list[tuple[str, str]]:
        """The command that shows the experiment's runs."""
        logdir = run_dir.parent if cfg.folder is None else Path(cfg.folder) / run_dir.parent.name
        return [("tensorboard", f"tensorboard --logdir {shlex.quote(str(logdir))}")]

    def sink(self, cfg: TensorboardConfig, context: Context) -> TensorboardSink:
        """The sink that writes the run's event file."""
        return TensorboardSink(folder_of(cfg, context.run_dir))


def folder_of(cfg: TensorboardConfig, run_dir: Path) -> Path:
    """The folder of a run's event file."""
    if cfg.folder is None:
        return Run(run_dir).tracker_folder(cfg.name)
    return Path(cfg.folder) / run_dir.parent.name / run_dir.name


@dataclass(frozen=True)
class _Mark:
    """The position in the event file."""

    file: str
    length: int
    """The length in bytes of the part that was committed."""
    step: int
    """The last step, at which texts are shown."""

    @classmethod
    def of(cls, text: str) -> _Mark:
        length, step, file = text.split(" ", 2)
        return cls(file, int(length), int(step))

    def __str__(self) -> str:
        return f"{self.length} {self.step} {self.file}"


class TensorboardSink(Sink):
    """One event file. `send` collects events in memory, and `commit` appends them in one write."""

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: the folder of the event file.
        """
        self._folder = folder
        self._mark = _Mark("", 0, 0)
        self._pending = BytesIO()

    def holds(self, mark: str) -> bool:
        """Whether the event file exists and is at least as long as at the mark."""
        try:
            wanted = _Mark.of(mark)
            return (self._folder / wanted.file).stat().st_size >= wanted.length
        except (OSError, ValueError):
            return False

    def open(self, identity: Identity, mark: str | None) -> str:
        """Creates the folder, and begins an event file or continues the one of the mark."""
        self._folder.mkdir(parents=True, exist_ok=True)
        new = _Mark(_FILE.format(seconds=identity.t // 1000), 0, 0)
        self._mark = new if mark is None else _Mark.of(mark)
        if self._mark.length == 0:
            self._write(identity.t / 1000, file_version=_VERSION)
        return str(self._mark)

    def send(self, operation: Operation) -> None:
        """Collects the events of an operation. It ignores artifacts, which are in the run folder already."""
        if isinstance(operation, Points):
            for point in operation.points:
                self._mark = replace(self._mark, step=max(self._mark.step, point.step))
                value = _summary().Value(tag=point.key, simple_value=point.value)
                self._write(point.timestamp / 1000, step=point.step, summary=_summary()(value=[value]))
        elif isinstance(operation, Params):
            self._text("parameters", _table(operation.values), operation.t)
        elif isinstance(operation, Tags):
            for key, text in operation.values.items():
                self._text(f"tags/{key}", text, operation.t)
        elif isinstance(operation, Input):
            self._text(
                f"data/{operation.name}", _table({"digest": operation.digest, "source": operation.source}), operation.t
            )
        elif isinstance(operation, Reopened):
            self._text("status", "RUNNING", operation.t)
        elif isinstance(operation, Ended):
            self._text("status", operation.status, operation.t)

    def commit(self) -> str:
        """Cuts off what a killed relay has left, and appends the collected events."""
        data = self._pending.getvalue()
        path = self._folder / self._mark.file
        with path.open("r+b" if path.exists() else "w+b") as file:
            file.truncate(self._mark.length)
            file.seek(self._mark.length)
            file.write(data)
            if is_hidden(data.decode(errors="replace")):
                os.fchmod(file.fileno(), PRIVATE)
        self._mark = replace(self._mark, length=self._mark.length + len(data))
        self._pending = BytesIO()
        return str(self._mark)

    def _text(self, tag: str, text: str, milliseconds: int) -> None:
        from tensorboard.plugins.text.summary import text_pb

        self._write(milliseconds / 1000, step=self._mark.step, summary=text_pb(tag, text))

    def _write(self, wall_time: float, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        RecordWriter(self._pending).write(Event(wall_time=wall_time, **content).SerializeToString())


def _summary() -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary


def _table(values: dict[str, str]) -> str:
    """Keys and values as a Markdown table, which TensorBoard renders."""
    rows = "".join(f"| {_cell(key)} | {_cell(value)} |\n" for key, value in values.items())
    return f"| key | value |\n| --- | --- |\n{rows}"


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
