"""Finds the run or job that an id of the API means."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from fastapi import HTTPException
from sqlalchemy import select
from sqlalchemy.orm import Session

from ortlaunch.run.run import Run
from ortlaunch.serve.access import Caller
from ortlaunch.serve.database import reading
from ortlaunch.serve.projects import of_unix_users
from ortlaunch.serve.queue.tables import Job
from ortlaunch.serve.service import Service
from ortlaunch.serve.tables import User

_JOB = re.compile(r"q\d{1,15}")
_KEY = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")
_SHORT = re.compile(r"[0-9a-f]{6}")


@dataclass(frozen=True)
class Found:
    """A run, or a job of the queue whose run has no folder yet."""

    id: str
    """The run's key."""
    run_id: str
    place: str
    """The run folder; it is there if `has_folder`."""
    is_indexed: bool
    job_id: str | None
    """The latest job of the run in the queue; None for a run from a command line."""
    owner: str
    """The name of the user of the service who may change it; empty if only administrators may."""
    unix_user: str
    project: str
    """Empty for none."""

    @property
    def has_folder(self) -> bool:
        """Whether the run folder is there. A run that the index does not have yet is looked for."""
        return self.is_indexed or self.run.exists

    @property
    def run(self) -> Run:
        """The run by its folder."""
        return Run(Path(self.place))


def find(service: Service, caller: Caller, asked: str) -> Found:
    """Returns the run that an id means: its key, its short id, or the id of its job in the queue.

    It reads no run folder.

    Args:
        service: the service.
        caller: who asks. Runs of other projects are unknown to them.
        asked: the id.

    Raises:
        HTTPException: 404 for an unknown id; 409 for a short id that several runs have.
    """
    with reading(service.engine) as session:
        known = (_found(service, session, place) for place in _places(service, session, asked))
        runs = [one for one in known if caller.sees(one.project)]
    if not runs:
        form = "such as 20260131-235959-1a2b3c, or by its last six letters"
        hint = "" if _is_id(asked) else f": a run is named here by its id, {form}"
        raise HTTPException(404, f"there is no such run{hint}")
    if len(runs) > 1:
        raise HTTPException(409, f"{asked} means {len(runs)} runs: name one by its key, <date>-<time>-<id>")
    return runs[0]


def found_run(service: Service, caller: Caller, asked: str) -> Found:
    """As `find`, for what needs the run folder.

    Raises:
        HTTPException: also 404 for a job whose run has not begun.
    """
    found = find(service, caller, asked)
    if not found.has_folder:
        raise HTTPException(404, "the run has not begun: it has no run folder yet")
    return found


def _is_id(asked: str) -> bool:
    return any(form.fullmatch(asked) for form in (_JOB, _KEY, _SHORT))


def _places(service: Service, session: Session, asked: str) -> set[str]:
    if _JOB.fullmatch(asked):
        return set(session.scalars(select(Job.run_dir).where(Job.id == asked)))
    if _KEY.fullmatch(asked):
        jobs = select(Job.run_dir).where(Job.run_id == asked[-6:], Job.run_key == asked)
    elif _SHORT.fullmatch(asked):
        jobs = select(Job.run_dir).where(Job.run_id == asked)
    else:
        return set()
    # A folder that somebody else has named like a run of the service does not stand for it, nor make its id ambiguous.
    return set(session.scalars(jobs)) or {
        place for place, run in service.runs.runs.items() if asked in (run.key, run.run_id)
    }


def _found(service: Service, session: Session, place: str) -> Found:
    run = service.runs.run_at(place)
    query = select(Job).where(Job.run_dir == place)
    if run is not None:
        query = query.where(Job.run_id == run.run_id)
    job = session.scalars(query.order_by(Job.number.desc()).limit(1)).first()
    known = run or job
    assert known is not None
    owner = (
        job.owner if job is not None else "" if service.settings.shared_account else _user_of(session, known.unix_user)
    )
    return Found(
        id=run.key if run is not None else job.run_key if job is not None else "",
        run_id=known.run_id,
        place=place,
        is_indexed=run is not None,
        job_id=job.id if job is not None else None,
        owner=owner,
        unix_user=job.unix_user if job is not None else known.unix_user,
        project=job.project if job is not None else of_unix_users(service, session).get(known.unix_user, ""),
    )


def _user_of(session: Session, unix_user: str) -> str:
    """The user of the service whose runs belong to a Unix user; empty if there is none, or several."""
    names = session.scalars(select(User.name).where(User.unix_user == unix_user).limit(2)).all()
    return names[0] if len(names) == 1 else ""
