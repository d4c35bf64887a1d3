"""The table of the index, which can be made anew from the run folders."""

from __future__ import annotations

from sqlalchemy import BigInteger, Float, Index, Integer, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from ortlaunch.serve.database import Base


class IndexedRun(Base):
    """What the list shows of one run folder. Times are seconds since the epoch."""

    __tablename__ = "runs"
    __table_args__ = (Index("runs_by_state", "state", "started"), Index("runs_by_start", "started"))

    place: Mapped[str] = mapped_column(Text, primary_key=True)
    """The path of the run folder; it is `run_dir` of the run's jobs in the queue."""
    key: Mapped[str] = mapped_column(String(64), index=True)
    """``<date>-<time>-<id>``, the id in the API."""
    run_id: Mapped[str] = mapped_column(String(64), index=True)
    name: Mapped[str] = mapped_column(Text)
    experiment: Mapped[str] = mapped_column(Text, index=True)
    unix_user: Mapped[str] = mapped_column(String(64), index=True)
    """The owner of the folder."""
    owner: Mapped[str] = mapped_column(Text, index=True)
    """The user of the service whose job it was last; of a run from a command line the Unix user."""
    job: Mapped[str | None] = mapped_column(String(16))
    """The queue's id of the run's latest job that has begun."""
    state: Mapped[str] = mapped_column(String(16))
    """A value of `ortlaunch.follow.state.State`."""
    reason: Mapped[str] = mapped_column(Text, default="")
    is_over: Mapped[bool] = mapped_column(default=False)
    step: Mapped[int | None] = mapped_column(BigInteger)
    steps: Mapped[int | None] = mapped_column(BigInteger)
    loss: Mapped[float | None] = mapped_column(Float)
    diverged: Mapped[bool] = mapped_column(default=False)
    """Whether the latest loss is no finite number, which neither JSON nor SQLite can hold."""
    rate: Mapped[float | None] = mapped_column(Float)
    rate_unit: Mapped[str] = mapped_column(String(16), default="")
    seconds_left: Mapped[float | None] = mapped_column(Float)
    started: Mapped[float] = mapped_column(Float)
    """When the run was made."""
    updated: Mapped[float] = mapped_column(Float)
    """When the run last journalled something."""
    ended: Mapped[float | None] = mapped_column(Float)
    launcher: Mapped[str] = mapped_column(String(64), default="local")
    scheduler_job: Mapped[str] = mapped_column(String(300), default="")
    nodes: Mapped[int] = mapped_column(Integer, default=1)
    restarts: Mapped[int] = mapped_column(Integer, default=0)
    checkpoint: Mapped[str] = mapped_column(String(64), default="")
    unsent: Mapped[int] = mapped_column(BigInteger, default=0)
    """Bytes of the journal that a tracking server has not got yet."""
    changed: Mapped[int] = mapped_column(BigInteger)
    """The folder's modification time in nanoseconds, for which the row of a run that is over holds."""
