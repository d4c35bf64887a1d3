"""The shapes of what the API says about runs. None means that a value is not known or does not apply."""

from __future__ import annotations

from typing_extensions import TypedDict


class Row(TypedDict):
    """One line of the list: a run, or a job of the queue whose run has not begun. Times are seconds since the epoch."""

    id: str
    """The run's key, ``<date>-<time>-<id>``; the API takes the queue's id and the short id too."""
    run_id: str
    job: str | None
    """The queue's id of the run's latest job."""
    name: str
    experiment: str
    owner: str
    """The user who submitted it; of a run from a command line the Unix user."""
    state: str
    """waiting, starting, refused or cancelled; from its beginning on queued, pending, requeued, preempted, running,
    stopping, stopped, finished, failed, killed or unknown."""
    reason: str
    position: int | None
    step: int | None
    steps: int | None
    loss: float | None
    diverged: bool
    rate: float | None
    rate_unit: str
    seconds_left: float | None
    started: float
    updated: float
    project: str
    """Empty for none: everybody sees it."""
    sweep: str | None
    tags: list[str]
    note: str
    columns: dict[str, str | float | None]
    """The values of the columns that were asked for."""


class Page(TypedDict):
    """A page of the list."""

    runs: list[Row]
    total: int
    page: int
    pages: int


class Facets(TypedDict):
    """What the list can be filtered by."""

    states: dict[str, int]
    owners: list[str]
    experiments: list[str]
    projects: list[str]
    columns: list[str]
    """Parameters and metrics that runs have, as columns and for conditions."""


class Change(TypedDict):
    """A key that has not its default."""

    key: str
    value: str
    default: str | None


class FailureShape(TypedDict):
    """A worker's failure."""

    rank: int
    host: str
    message: str
    at: float


class CheckpointShape(TypedDict):
    """A checkpoint."""

    name: str
    step: int
    at: float
    size: int
    complete: bool
    eval_loss: float | None


class Goodput(TypedDict):
    """The share of productive time, from 0 to 1, and where the time went in seconds."""

    share: float
    parts: dict[str, float]


class LauncherShape(TypedDict):
    """What runs it, and where."""

    name: str
    place: str
    job_id: str | None
    nodes: int
    restarts: int


class MlflowShape(TypedDict):
    """Where MLflow has the run."""

    run_id: str
    store: str
    """The tracking URI, without credentials."""
    url: str | None
    """The run's page on a tracking server; None for a file."""


class FileShape(TypedDict):
    """A file that can be fetched."""

    name: str
    size: int
    changed: float


class Kept(TypedDict):
    """A picture or a text that a hook has kept."""

    name: str
    """Of the file, for ``/files/{name}``."""
    at: float
    text: str | None
    """The text's beginning; None for a picture."""


class Detail(TypedDict):
    """Everything about one run but its curves, logs and configuration."""

    row: Row
    place: str
    changed: list[Change]
    failures: list[FailureShape]
    checkpoints: list[CheckpointShape]
    goodput: Goodput | None
    launcher: LauncherShape
    mlflow: MlflowShape | None
    ranks: list[int]
    logs: list[str]
    """The names that ``/logs/{name}`` takes beside the ranks."""
    files: list[FileShape]
    kept: list[Kept]
    """The newest pictures and texts of hooks."""
    metrics: list[str]
    problems: list[str]
    """The files of the run that cannot be read, and why."""


class Curve(TypedDict):
    """One metric: at most 1,000 points. A value that is no finite number is null."""

    steps: list[int]
    values: list[float | None]


class Curves(TypedDict):
    """The curves of a run."""

    id: str
    curves: dict[str, Curve]
    names: list[str]
    """All metrics of the run."""
    began: float
    times: Curve
    """The seconds from `began` to each step."""
    offset: int
    """The topic ``run:ID@OFFSET`` goes on exactly after these points."""


class Match(TypedDict):
    """A line that a search found."""

    offset: int
    line: str


class LogPart(TypedDict):
    """A part of a log: whole lines, without control characters."""

    rank: str
    offset: int
    """The byte where the text begins."""
    next: int
    """The byte where it ends; the topic ``log:ID:RANK@NEXT`` goes on exactly there."""
    size: int
    text: str
    rest: str
    """An unfinished line after `next`; it is not counted, and comes again when it is whole."""
    matches: list[Match] | None
    """What a search found from `offset` on; None without a search."""
    more: bool
    """Whether there is more after `next` now."""


class Difference(TypedDict):
    """A key of the configuration that another run has with another value."""

    key: str
    value: str | None
    other: str | None


class Configuration(TypedDict):
    """A run's configuration, and how another run's differs."""

    text: str
    differences: list[Difference] | None
