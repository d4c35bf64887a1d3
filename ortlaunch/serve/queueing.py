"""What people see of the queue, and what administrators change in it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from fastapi import HTTPException

from ortlaunch.serve.access import Caller
from ortlaunch.serve.audit import record
from ortlaunch.serve.database import reading, writing
from ortlaunch.serve.queue import store
from ortlaunch.serve.queue.scheduling import charged
from ortlaunch.serve.queue.tables import Job, JobState
from ortlaunch.serve.service import Service
from ortlaunch.serve.unfit import unfit


def queue_state(service: Service, caller: Caller) -> dict[str, Any]:
    """Returns the slots, the jobs that wait and those that hold slots, and the users' shares."""
    slate, plan, now = service.queue.slate(), service.queue.plan, time.time()
    places = service.queue.positions()
    with reading(service.engine) as session:
        set_by_admins = store.switches(session)
        holding = store.in_states(session, JobState.STARTING, JobState.RUNNING)
        waiting = store.in_states(session, JobState.WAITING)
        shares = store.shares(session, now)
    for job in (one for one in holding if one.is_here):
        shares[job.account] = shares.get(job.account, 0.0) + charged(len(job.taken)) * store.seconds_run(job, now)
    waiting.sort(key=lambda job: (places.get(job.id, len(places) + 1), job.number))
    return {
        "paused": set_by_admins.paused,
        "draining": set_by_admins.is_drained,
        "slots": _slots(slate, holding, set_by_admins, caller),
        "waiting": [
            _shown(job, caller) | {"position": place, "starts_by": plan.promised.get(job.id)}
            for place, job in enumerate(waiting, start=1)
        ],
        "running": [_shown(job, caller) | {"slots_held": job.taken} for job in holding],
        "shares": [{"owner": owner, "slot_seconds": used} for owner, used in sorted(shares.items())],
    }


def set_paused(service: Service, caller: Caller, *, paused: bool) -> None:
    """Lets the queue start no run; or starts them again, and gives it all slots back."""
    with writing(service.engine) as session:
        store.set_paused(session, paused=paused)
        if not paused:
            store.set_drained(session, [])
        record(session, caller, "queue.pause" if paused else "queue.continue", "queue")
    service.queue.wake()


def drain(service: Service, caller: Caller, slots: Iterable[str] | None) -> None:
    """Takes slots out of the queue: their runs go on, and no other gets them.

    Args:
        service: the service.
        caller: who does it.
        slots: the slots; None for all.

    Raises:
        Unfit: there is no such slot.
    """
    known = set(service.queue.slots.names())
    chosen = None if slots is None else set(slots)
    if chosen is not None and (unknown := chosen - known):
        raise unfit(f"{min(unknown)}: there is no such slot ({', '.join(sorted(known))})", "slots")
    with writing(service.engine) as session:
        store.set_drained(session, chosen)
        record(session, caller, "queue.drain", ", ".join(sorted(chosen)) if chosen is not None else "all slots")
    service.queue.wake()


def set_priority(service: Service, caller: Caller, job_id: str, priority: int) -> dict[str, Any]:
    """Gives a waiting job another priority.

    Raises:
        HTTPException: 404 for an unknown job, 409 for one that does not wait.
    """
    with writing(service.engine) as session:
        job = session.get(Job, job_id)
        if job is None:
            raise HTTPException(404, "there is no such job")
        if job.state != JobState.WAITING:
            raise HTTPException(409, f"it is {job.state}: only a waiting job has a place in the queue")
        record(session, caller, "queue.priority", job.id, {"from": job.priority, "to": priority})
        job.priority = priority
        shown = _shown(job, caller)
    service.queue.wake()
    return shown


def _slots(
    slate: store.Slate, holding: list[Job], set_by_admins: store.Switches, caller: Caller
) -> list[dict[str, Any]]:
    holder = {name: job for job in holding for name in job.taken}
    found = []
    for name in slate.names:
        job, note = holder.get(name), ""
        is_held = set_by_admins.is_drained or name in set_by_admins.drained
        state = "busy" if job is not None else "held" if is_held else "foreign" if name in slate.withheld else "free"
        if state == "foreign":
            note = slate.withheld[name]
        elif is_held:
            note = "an administrator has taken it out"
        seen = job if job is not None and caller.sees(job.project) else None
        run = {"run": seen and seen.run_key, "run_name": seen and seen.name}
        found.append({"name": name, "state": state, **run, "note": note})
    return found


def _shown(job: Job, caller: Caller) -> dict[str, Any]:
    is_seen = caller.sees(job.project)
    return {
        "id": job.run_key if is_seen else None,
        "job": job.id,
        "owner": job.owner if is_seen else None,
        "name": job.name if is_seen else "a run of another project",
        "project": job.project if is_seen else None,
        "state": job.state,
        "slots": job.slots,
        "needs": job.needs,
        "minutes": job.minutes,
        "priority": job.priority,
        "submitted": job.submitted,
        "started": job.started,
        "reason": job.reason,
        "launcher": job.launcher,
    }
