"""What people do with runs through the service: submit, stop, resume, delete and export them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import HTTPException
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from ortlaunch.base.secrets import hidden, without_secrets_in_words
from ortlaunch.run.key import RunKey
from ortlaunch.serve.access import Caller, Role, may_change, require_unchanged
from ortlaunch.serve.actor import Refused, own_user
from ortlaunch.serve.allowance import NEEDS, allowed, in_words, limits_of, require_disk
from ortlaunch.serve.audit import record
from ortlaunch.serve.database import reading, writing
from ortlaunch.serve.fields import CHOICES, OPEN_MODELS, PARAMS, catalogue, fields_of, jobs_to_choose, may_choose
from ortlaunch.serve.index.finding import Found, find, found_run
from ortlaunch.serve.kept import forget, keep, kept, secrets_among
from ortlaunch.serve.projects import of_new_run
from ortlaunch.serve.queue import store
from ortlaunch.serve.queue.slots import gpus_of
from ortlaunch.serve.queue.tables import OPEN_STATES, Job, JobState
from ortlaunch.serve.requests import Submission, judge
from ortlaunch.serve.service import Service
from ortlaunch.serve.tables import RunNote, User
from ortlaunch.serve.unfit import unfit

_UNREADABLE = "the check gave an answer that cannot be read"
_MOST_OPEN = 1000
"""Jobs of one user that are not over."""
_LONGEST_KEY = 200
_ENDING_SECONDS = 15.0
"""How long a run that has made its last step may take to end."""


@dataclass(frozen=True)
class Submitted:
    """A job that was made, or that an earlier request with the same key has made."""

    job: Job
    is_new: bool


def unix_user_of(service: Service, caller: Caller) -> str:
    """Returns the Unix user whom the runs of a caller belong to.

    Raises:
        Unfit: nobody has said it, or the service may not act for that user.
    """
    if caller.unix_user is None:
        raise unfit("your account has no Unix user to start runs as: an administrator sets it")
    if not service.actor.may_act_for(caller.unix_user):
        text = f"the service may not start runs as the Unix user {caller.unix_user}"
        raise unfit(f"{text}: an administrator has to allow it")
    return caller.unix_user


def fields_for(
    service: Service, caller: Caller, job: str | None = None, choices: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Returns the keys of a run as fields, with the values that a ready job and some choices give them.

    Args:
        service: the service.
        caller: who asks.
        job: the ready job; None for the defaults.
        choices: the options of config groups by the groups' names.

    Raises:
        Unfit: there is no such job or option, or it does not compose.
    """
    wanted = judge(job, choices or {}, max(caller.role, Role.runner))
    unix_user = caller.unix_user
    if unix_user is None or not service.actor.may_act_for(unix_user):
        unix_user = own_user()
    composed = _asked(service, unix_user, "fields", {"words": wanted.words})
    chosen, values = composed["chosen"], composed["values"]
    found = []
    for one in fields_of(chosen):
        options = [option for option in one.choices if one.group != CHOICES or may_choose(one.key, option, caller.role)]
        value = chosen.get(one.key) if one.group == CHOICES else values.get(one.key, one.default)
        found.append(one.as_dict() | {"choices": options, "value": value, "may_set": caller.role >= one.role})
    return {"job": job, "chosen": chosen, "fields": found, "free": _takes_any(chosen)}


def limits_for(service: Service, caller: Caller) -> list[str]:
    """Returns what the role of a caller may take of this machine, in words."""
    with reading(service.engine) as session:
        return in_words(limits_of(session)[caller.role.name])


def check(service: Service, caller: Caller, wanted: Sequence[Submission]) -> dict[str, Any]:
    """Returns what would be started: of the first run what the API shows, and how many ``runs`` there are.

    Raises:
        Unfit: the request is refused.
    """
    checked, allowance = _check(service, caller, unix_user_of(service, caller), wanted)[0]
    shown = ("command", "plan", "slots", "needs", "name", "experiment", "launcher", "steps")
    return {name: checked[name] for name in shown} | {"minutes": allowance.minutes, "runs": len(wanted)}


def submit(
    service: Service,
    caller: Caller,
    wanted: Sequence[Submission],
    idempotency_key: str | None = None,
    project: str = "",
) -> Submitted:
    """Puts runs into the queue, all of them or none; several are a sweep.

    Args:
        service: the service.
        caller: who submits them.
        wanted: the runs.
        idempotency_key: the same key always means the same job, of a sweep its first one.
        project: the project that they belong to; it may be left out by those who have one or none.

    Raises:
        Unfit: the request is refused.
    """
    project = of_new_run(caller, project)
    unix_user, digest = unix_user_of(service, caller), store.digest_of([project, *(one.as_dict() for one in wanted)])
    if idempotency_key is not None and not 1 <= len(idempotency_key) <= _LONGEST_KEY:
        raise unfit(f"Idempotency-Key: must have 1 to {_LONGEST_KEY} characters")
    with reading(service.engine) as session:
        known = _known(session, caller, idempotency_key, digest)
    if known is not None:
        return Submitted(known, is_new=False)
    checked = _check(service, caller, unix_user, wanted)
    with writing(service.engine) as session:
        # Another request with this key may have come first while this one was checked.
        known = _known(session, caller, idempotency_key, digest)
        if known is not None:
            return Submitted(known, is_new=False)
        # The check takes up to a minute. Who was locked out meanwhile has no job that waits, and gets none.
        require_unchanged(service, session, caller)
        _check_number(session, caller, len(wanted))
        jobs = [
            _stored(service, session, caller, (unix_user, one), found)
            for one, found in zip(wanted, checked, strict=True)
        ]
        for job in jobs:
            job.project, job.sweep = project, jobs[0].run_id if len(jobs) > 1 else None
        if idempotency_key is not None:
            store.remember(session, caller.user_id, idempotency_key, digest, jobs[0])
    return Submitted(_decided(service, jobs[0].id), is_new=True)


def _stored(
    service: Service,
    session: Session,
    caller: Caller,
    asked: tuple[str, Submission],
    found: tuple[dict[str, Any], store.Allowance],
) -> Job:
    """Writes the job of a request of a Unix user's that was checked."""
    (unix_user, wanted), (checked, allowance) = asked, found
    request = hidden("", wanted.as_dict())
    keep(service.settings.secrets, str(checked["run_dir"]), secrets_among(wanted.keys, checked["words"]))
    owner, run_key = (caller.user_id, caller.name), checked["run_key"]
    made = store.add_job(session, owner, unix_user, run_key, request, _shown(checked), allowance)
    record(session, caller, "run.submit", made.id, {"run": run_key, **request})
    return made


def keys_of(service: Service, caller: Caller, asked: str) -> dict[str, Any]:
    """Returns the request by which a run was submitted, or could have been, for doing it again with changes.

    Raises:
        HTTPException: 404 for an unknown run.
    """
    found = find(service, caller, asked)
    with reading(service.engine) as session:
        query = select(Job).where(Job.run_id == found.run_id, Job.resumes.is_(False), Job.run_dir == found.place)
        job = session.scalars(query.limit(1)).first()
    if job is not None:
        given = job.request["keys"]
        secrets = kept(service.settings.secrets, found.place) if may_change(caller, found.owner) else {}
        keys = hidden("", given) | {key: secrets[key] for key in given if key in secrets}
        script = job.request.get("script", "")
        return {"job": job.request["job"], "keys": keys, "minutes": job.minutes, "script": script, "left_out": []}
    stored = _asked(service, found.unix_user, "keys", {"run_dir": found.place})
    known = {key: value for key, value in stored["keys"].items() if key in catalogue() or key.startswith(PARAMS)}
    names = {one["name"] for one in jobs_to_choose()}
    left_out = [*stored["left_out"], *(key for key in stored["keys"] if key not in known)]
    ready = stored["job"] if stored["job"] in names else None
    return {"job": ready, "keys": known, "minutes": None, "script": stored["script"], "left_out": left_out}


def stop(service: Service, caller: Caller, asked: str) -> dict[str, Any]:
    """Takes a job from the queue, or asks its run to stop with a checkpoint.

    Raises:
        HTTPException: 404, 403, or 409 for a run that is over.
    """
    found = _changeable(service, caller, asked)
    with writing(service.engine) as session:
        job = store.open_job_of(session, found.place)
        record(session, caller, "run.stop", found.id, {"job": job.id if job is not None else None})
        if job is not None and job.state == JobState.WAITING:
            store.note_end(session, job, JobState.CANCELLED, reason=f"taken from the queue by {caller.name}")
            state = str(JobState.CANCELLED)
        elif job is not None:
            if job.stop_asked is None:
                # Why it could not be started before does not count any more.
                job.stop_asked, job.reason = time.time(), ""
            state = "stopping"
    if job is None:
        if not found.has_folder:
            raise HTTPException(409, "it is over")
        said = _asked(service, found.unix_user, "cancel", {"run_dir": found.place})["said"]
        return {"id": found.id, "state": "stopping", "said": said}
    service.queue.wake()
    return {"id": found.id, "state": state, "said": ""}


def resume(
    service: Service,
    caller: Caller,
    asked: str,
    keys: Mapping[str, Any],
    minutes: float | None,
    idempotency_key: str | None = None,
) -> Submitted:
    """Puts a run that is over into the queue again, to go on from its newest checkpoint.

    Args:
        service: the service.
        caller: who asks for it.
        asked: the run's id.
        keys: the keys that change.
        minutes: the time limit.
        idempotency_key: the same key always means the same job.

    Raises:
        HTTPException: 404, 403, or 409 for a run that is in the queue.
        Unfit: the request is refused.
    """
    found = _changeable(service, caller, asked)
    found_run(service, caller, asked)
    wanted = judge(None, keys, caller.role, minutes)
    digest = store.digest_of({"resume": found.place, **wanted.as_dict()})
    with reading(service.engine) as session:
        known = _known(session, caller, idempotency_key, digest)
    if known is not None:
        return Submitted(known, is_new=False)
    _settle(service, found)
    before = kept(service.settings.secrets, found.place)
    request = {"run_dir": found.place, "words": wanted.words, "secrets": before | secrets_among(wanted.keys)}
    checked = _asked(service, found.unix_user, "check_resume", request)
    checked = _sound(service, {"run_dir": found.place, **checked}, Path(found.place))
    allowance = _allowed(service, caller, wanted, checked)
    if checked["own_code"] and caller.role < Role.author:
        reason = f"{checked['own_code']} of this run is code or a command of an author's"
        raise HTTPException(403, f"{reason}: to go on with it needs the role {Role.author.name}")
    owner = found.owner or caller.name
    with writing(service.engine) as session:
        known = _known(session, caller, idempotency_key, digest)
        if known is not None:
            return Submitted(known, is_new=False)
        require_unchanged(service, session, caller)
        _require_closed(store.open_job_of(session, found.place))
        user_id = session.scalar(select(User.id).where(User.name == owner)) or caller.user_id
        key = str(RunKey.parsed(found.id))
        keep(service.settings.secrets, found.place, secrets_among(wanted.keys, checked["words"]))
        asked_for = hidden("", wanted.as_dict())
        job = store.add_job(session, (user_id, owner), found.unix_user, key, asked_for, _shown(checked), allowance)
        job.project = found.project
        if idempotency_key is not None:
            store.remember(session, caller.user_id, idempotency_key, digest, job)
        record(session, caller, "run.resume", found.id, {"job": job.id, "keys": wanted.keys})
    return Submitted(_decided(service, job.id), is_new=True)


def delete(service: Service, caller: Caller, asked: str) -> dict[str, Any]:
    """Moves a run that is over into the bin.

    Raises:
        HTTPException: 404, 403, or 409 for a run that is in the queue.
        Unfit: the run goes on.
    """
    found = _over(service, caller, asked, "run.delete")
    done = _asked(service, found.unix_user, "delete", {"run_dir": found.place})
    forget(service.settings.secrets, found.place)
    return done


def export(service: Service, caller: Caller, asked: str) -> dict[str, Any]:
    """Writes the weights of a run's newest checkpoint into its folder; returns their ``folder`` and ``files``.

    Raises:
        HTTPException: 404 or 403.
        Unfit: the run has no complete checkpoint, or only an author may execute its model's code.
    """
    found = _changeable(service, caller, asked)
    found_run(service, caller, asked)
    with writing(service.engine) as session:
        record(session, caller, "run.export", found.id)
    secrets = kept(service.settings.secrets, found.place)
    request = {"run_dir": found.place, "is_author": caller.role >= Role.author, "secrets": secrets}
    return _asked(service, found.unix_user, "export_weights", request)


def annotate(service: Service, caller: Caller, asked: str, title: str, tags: list[str], note: str) -> None:
    """Writes what people say of a run: another name, tags and a note.

    Raises:
        HTTPException: 404 or 403.
    """
    found = _changeable(service, caller, asked)
    written = {"title": title.strip(), "tags": sorted({tag.strip() for tag in tags} - {""}), "note": note.strip()}
    with writing(service.engine) as session:
        session.merge(RunNote(place=found.place, **written))
        record(session, caller, "run.note", found.id, written)


def _over(service: Service, caller: Caller, asked: str, action: str) -> Found:
    found = _changeable(service, caller, asked)
    found_run(service, caller, asked)
    _settle(service, found)
    with writing(service.engine) as session:
        require_unchanged(service, session, caller)
        _require_closed(store.open_job_of(session, found.place))
        record(session, caller, action, found.id)
    return found


def _settle(service: Service, found: Found) -> None:
    """Lets the queue note that a run has ended, if it is ending. What goes on is refused."""
    with reading(service.engine) as session:
        job = store.open_job_of(session, found.place)
    _require_closed(job and service.queue.settle(job.id, _ENDING_SECONDS))


def _decided(service: Service, job_id: str) -> Job:
    """Returns a new job after the queue has decided about it, with its reason if it waits."""
    service.queue.decide()
    with reading(service.engine) as session:
        return session.get_one(Job, job_id)


def _changeable(service: Service, caller: Caller, asked: str) -> Found:
    found = find(service, caller, asked)
    if not may_change(caller, found.owner):
        raise HTTPException(403, "this run belongs to somebody else")
    return found


def _require_closed(job: Job | None) -> None:
    if job is not None:
        raise HTTPException(409, f"the run is {job.state} in the queue as {job.id}: stop it first")


def _check(
    service: Service, caller: Caller, unix_user: str, wanted: Sequence[Submission]
) -> list[tuple[dict[str, Any], store.Allowance]]:
    """Returns of each new run what its check says, with its ``run_key``, and what it may take."""
    with reading(service.engine) as session:
        asked = [{"words": one.words, "run_key": store.new_run_key(session)} for one in wanted]
    if len(asked) == 1:
        answers = [_asked(service, unix_user, "check", asked[0])]
    else:
        answers = _asked(service, unix_user, "check_sweep", {"runs": asked})["runs"]
    if not isinstance(answers, list) or len(answers) != len(asked):
        raise unfit(_UNREADABLE)
    found = []
    for one, request, answer in zip(wanted, asked, answers, strict=True):
        checked = _sound(service, answer, service.actor.folder_of(unix_user))
        # The index leaves hidden folders out, as those of the service are: such a run would start and never be seen.
        if Path(checked["run_dir"]).parent.name.startswith("."):
            raise unfit("must not begin with '.': the service does not look into hidden folders", "experiment")
        allowance = _allowed(service, caller, one, checked)
        found.append(({**checked, "run_key": request["run_key"]}, allowance))
    require_disk(service, [checked for checked, _ in found])
    return found


def _allowed(service: Service, caller: Caller, wanted: Submission, checked: Mapping[str, Any]) -> store.Allowance:
    """Returns what a run may take. A time limit of a scheduler's job would also count the time that it waits there."""
    if wanted.minutes is not None and not checked["needs"]:
        message = "minutes is for runs on this machine's slots: a scheduler's job has launcher.time"
        raise unfit(message, "minutes")
    return allowed(service, caller, wanted.minutes, checked)


def _sound(service: Service, checked: dict[str, Any], below: Path) -> dict[str, Any]:
    """Refuses a run that this machine has not the slots for, and an answer that no check of ours gives.

    The child is a process of the run's user, who may have changed what it says.
    """
    slots, needs, place, words = checked["slots"], checked["needs"], Path(str(checked["run_dir"])), checked["words"]
    names = service.queue.slots.names()
    total = len(names)
    is_sound = type(slots) is int and slots >= 0 and place.is_relative_to(below) and ".." not in place.parts
    # A run of this machine has all of its needs, and a scheduler's job has none of them, and no slots.
    is_sound = is_sound and isinstance(needs, dict) and set(needs) == (set(NEEDS) if slots else set())
    is_sound = is_sound and all(type(one) in (int, float) and 0 <= one < math.inf for one in needs.values())
    if not is_sound or not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise unfit(_UNREADABLE)
    if slots > total and (trouble := service.queue.slots.trouble):
        raise HTTPException(503, f"the GPUs of this machine cannot be determined: {trouble}", {"Retry-After": "10"})
    if slots > total:
        key = "launcher.workers_per_node"
        raise unfit(f"the run needs {slots} slots, and this machine has {total}", key)
    takes_none = slots and not checked.get("on_gpu") and gpus_of(names)
    return {**checked, "slots": 0} if takes_none else checked


def _shown(checked: dict[str, Any]) -> dict[str, Any]:
    return {**checked, "words": without_secrets_in_words(checked["words"])}


def _asked(service: Service, unix_user: str, action: str, request: dict[str, Any]) -> dict[str, Any]:
    """Asks the child; its refusal stands beside the key that it names, if that is one of ours."""
    try:
        found: dict[str, Any] = service.actor.call(unix_user, action, request)
    except Refused as error:
        key = error.key if error.key in catalogue() else None
        raise unfit(error.message, key) from error
    return found


def _known(session: Any, caller: Caller, key: str | None, digest: str) -> Job | None:
    if key is None or (found := store.repeated(session, caller.user_id, key)) is None:
        return None
    request, job = found
    if request.digest != digest:
        raise unfit("Idempotency-Key: another request was sent with this key before")
    return job


def _check_number(session: Session, caller: Caller, more: int) -> None:
    query = select(func.count()).select_from(Job).where(Job.owner == caller.name, Job.state.in_(OPEN_STATES))
    if (session.scalar(query) or 0) + more > _MOST_OPEN:
        raise HTTPException(429, f"nobody has more than {_MOST_OPEN} jobs in the queue", {"Retry-After": "60"})


def _takes_any(chosen: Mapping[str, str]) -> bool:
    """Whether the model takes parameters that no file lists."""
    return chosen.get("model") in OPEN_MODELS
