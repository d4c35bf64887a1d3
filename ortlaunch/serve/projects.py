"""Projects: whose runs see whom. A run belongs to one project or to none; what belongs to none is seen by all."""

from __future__ import annotations

import re

from sqlalchemy import select
from sqlalchemy.orm import Session

from ortlaunch.serve.access import Caller
from ortlaunch.serve.answers import not_found
from ortlaunch.serve.audit import record
from ortlaunch.serve.database import reading, writing
from ortlaunch.serve.service import Service
from ortlaunch.serve.tables import Project, User
from ortlaunch.serve.unfit import unfit

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,39}")


def projects(service: Service, caller: Caller) -> list[Project]:
    """Returns the projects that somebody sees, by name."""
    with reading(service.engine) as session:
        return [one for one in session.scalars(select(Project).order_by(Project.name)) if caller.sees(one.name)]


def set_project(service: Service, caller: Caller, name: str, slots: float | None) -> None:
    """Makes a project, or changes the slots that its runs may hold at a time; None is no limit.

    Raises:
        Unfit: it cannot be called so.
    """
    if not _NAME.fullmatch(name):
        raise unfit("a project's name has small letters, digits, dots and dashes, 40 at most", "name")
    with writing(service.engine) as session:
        session.merge(Project(name=name, slots=slots))
        record(session, caller, "project.set", name, {"slots": slots})


def remove_project(service: Service, caller: Caller, name: str) -> None:
    """Removes a project, which must have no members. Its runs are then seen by administrators alone.

    Raises:
        HTTPException: 404 for an unknown one.
        Unfit: it has members.
    """
    with writing(service.engine) as session:
        found = session.get(Project, name)
        if found is None:
            raise not_found("project")
        if members := [user.name for user in session.scalars(select(User)) if name in user.projects]:
            raise unfit(f"its members are {', '.join(members)}: take them out first")
        session.delete(found)
        record(session, caller, "project.remove", name)


def checked(session: Session, names: list[str]) -> list[str]:
    """Returns names of projects, each once.

    Raises:
        Unfit: there is no such project.
    """
    known = set(session.scalars(select(Project.name)))
    if unknown := [name for name in names if name not in known]:
        raise unfit(f"there is no project {unknown[0]} (there are: {', '.join(sorted(known)) or 'none'})", "projects")
    return list(dict.fromkeys(names))


def of_new_run(caller: Caller, asked: str) -> str:
    """Returns the project of a run that somebody submits; empty for none.

    Raises:
        Unfit: it has to be said, or they are no member of it.
    """
    if asked and asked not in caller.projects:
        raise unfit(f"you are no member of a project {asked}", "project")
    if not asked and len(caller.projects) > 1:
        raise unfit(f"name the project of the run: one of {', '.join(caller.projects)}", "project")
    return asked or "".join(caller.projects)


def of_unix_users(service: Service, session: Session) -> dict[str, str]:
    """Returns the project that the runs of command lines belong to, by their Unix users: the first of the person's."""
    if service.settings.shared_account:
        return {}
    people = session.scalars(select(User).where(User.unix_user.is_not(None)).order_by(User.id.desc()))
    return {user.unix_user or "": user.projects[0] for user in people if user.projects}
