"""The tables of accounts and of the audit. Times are seconds since 1970; secrets are stored as SHA-256 only."""

from __future__ import annotations

from sqlalchemy import JSON, Float, ForeignKey, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from ortlaunch.serve.database import Base


class User(Base):
    """A person who may log in."""

    __tablename__ = "users"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    role: Mapped[str]
    unix_user: Mapped[str | None]
    """As whom this person's runs start."""
    password: Mapped[str | None]
    """The argon2id hash; None before the person has chosen a password."""
    subject: Mapped[str | None] = mapped_column(unique=True)
    """The issuer and the subject by which an OpenID Connect provider has vouched for the person."""
    projects: Mapped[list[str]] = mapped_column(JSON, default=list, server_default="[]")
    """The projects that the person is a member of."""
    disabled: Mapped[bool] = mapped_column(default=False)
    created: Mapped[float]


class Project(Base):
    """People who see each other's runs, which share what the queue gives them."""

    __tablename__ = "projects"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    slots: Mapped[float | None] = mapped_column(Float)
    """Those that its runs may hold at a time; None: no limit."""


class LoginSession(Base):
    """A browser that has logged in."""

    __tablename__ = "sessions"
    id: Mapped[int] = mapped_column(primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"), index=True)
    digest: Mapped[str] = mapped_column(unique=True)
    created: Mapped[float]
    used: Mapped[float]
    expires: Mapped[float]


class Token(Base):
    """A token for programs."""

    __tablename__ = "tokens"
    id: Mapped[int] = mapped_column(primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"), index=True)
    name: Mapped[str]
    digest: Mapped[str] = mapped_column(unique=True)
    role: Mapped[str]
    """The highest role that it gives."""
    created: Mapped[float]
    expires: Mapped[float]
    revoked: Mapped[float | None]


class Link(Base):
    """A link that lets somebody choose a password once."""

    __tablename__ = "links"
    id: Mapped[int] = mapped_column(primary_key=True)
    user_id: Mapped[int | None] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"), index=True)
    """None: the link makes the first administrator."""
    digest: Mapped[str] = mapped_column(unique=True)
    expires: Mapped[float]


class AuditEntry(Base):
    """Something that was changed, or that somebody tried in vain."""

    __tablename__ = "audit"
    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[float]
    user_id: Mapped[int | None]
    user: Mapped[str]
    action: Mapped[str]
    target: Mapped[str]
    detail: Mapped[str]
    """JSON, without secrets."""
    __table_args__ = (Index("audit_at", "at"),)


class RunNote(Base):
    """What people have written about a run."""

    __tablename__ = "run_notes"
    place: Mapped[str] = mapped_column(Text, primary_key=True)
    """The run folder."""
    title: Mapped[str]
    """It is shown instead of the run's name; empty for that."""
    tags: Mapped[list[str]] = mapped_column(JSON)
    note: Mapped[str]


class RoleLimits(Base):
    """What the people of one role may take of this machine, as an administrator has set it; None: no limit."""

    __tablename__ = "limits"
    role: Mapped[str] = mapped_column(String(16), primary_key=True)
    slots: Mapped[float | None] = mapped_column(Float)
    """GPUs, or groups of workers on the CPU, of one person at a time."""
    hours: Mapped[float | None] = mapped_column(Float)
    """Of one run, as the next ones."""
    memory: Mapped[float | None] = mapped_column(Float)
    """GiB of the machine's main memory."""
    disk: Mapped[float | None] = mapped_column(Float)
    """GiB of the run folder."""
