"""`/api/fields`, `/api/ready-jobs`, and what changes runs below `/api/runs`.

Most of these wait for a child; see `ortlaunch.serve.waiting`.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from ortlaunch.serve import submitting
from ortlaunch.serve.access import Caller, Role, needs
from ortlaunch.serve.fields import CHOICES, catalogue, jobs_to_choose
from ortlaunch.serve.projects import of_new_run
from ortlaunch.serve.queue.tables import Job
from ortlaunch.serve.requests import MOST_MINUTES, MOST_SWEPT, Submission, judge_all
from ortlaunch.serve.service import Service, service_of
from ortlaunch.serve.waiting import in_thread

router = APIRouter(tags=["runs"])
Viewer = Annotated[Caller, Depends(needs(Role.viewer))]
Runner = Annotated[Caller, Depends(needs(Role.runner))]
RunId = Annotated[str, Path(min_length=2, max_length=64, description="the run's key, its short id, or the queue's id")]
Minutes = Annotated[float | None, Field(gt=0, le=MOST_MINUTES, description="the run is stopped after this time")]
RepeatKey = Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=200)]
Scalar = StrictBool | StrictInt | StrictFloat | StrictStr | None
Keys = dict[str, Scalar]


class Wanted(BaseModel):
    """A run to start, or a sweep: a ready job, the defaults or a script, and keys that differ."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    job: Annotated[str | None, Field(max_length=100)] = None
    keys: Keys = {}
    axes: Annotated[dict[str, Annotated[list[Scalar], Field(max_length=MOST_SWEPT)]], Field(max_length=10)] = {}
    """Values of further keys: each combination is a run."""
    script: Annotated[str, Field(max_length=4000)] = ""
    """The script and its arguments, as after ``--`` on a command line; for authors."""
    project: Annotated[str, Field(max_length=40)] = ""
    """It may be left out by those who have one or none."""
    minutes: Minutes = None

    def runs(self, caller: Caller) -> list[Submission]:
        """Returns the runs that it means."""
        return judge_all(self.job, self.keys, self.axes, caller.role, self.minutes, self.script)


class Changes(BaseModel):
    """Keys that change when a run goes on."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    keys: Keys = {}
    minutes: Minutes = None


class Note(BaseModel):
    """What people say of a run."""

    model_config = ConfigDict(extra="forbid")
    title: Annotated[str, Field(max_length=160)] = ""
    """Another name in lists; empty for the run's own."""
    tags: Annotated[list[Annotated[str, Field(max_length=40)]], Field(max_length=20)] = []
    note: Annotated[str, Field(max_length=2000)] = ""


class ReadyJob(BaseModel):
    """A ready job."""

    name: str
    meaning: str


class Checked(BaseModel):
    """What would be started; of a sweep its first run."""

    runs: int

    command: str
    """The same run from a command line."""
    plan: str
    """The text of the dry run."""
    name: str
    experiment: str
    launcher: str
    slots: int
    """0 for a job of a scheduler, and on the CPU of a machine with GPUs."""
    needs: dict[str, float]
    """Cores, and bytes of memory and disk, that it takes of this machine at least; none for a job of a scheduler."""
    steps: int | None
    minutes: float | None


class Queued(BaseModel):
    """A job of the queue."""

    id: str
    """The run's key."""
    job: str
    """The queue's id."""
    sweep: str | None
    """The id of the sweep whose first run it is."""
    state: str
    position: int | None
    reason: str


class Stopped(BaseModel):
    """What became of a request to stop."""

    id: str
    state: str
    said: str


class Place(BaseModel):
    """Where a deleted run is now."""

    place: str


class Exported(BaseModel):
    """Weights in plain names, in the run folder."""

    folder: str
    files: list[str]


@router.get("/api/ready-jobs")
def ready_jobs(_caller: Viewer) -> list[ReadyJob]:
    """Lists the ready jobs."""
    return [ReadyJob(**one) for one in jobs_to_choose()]


@router.get("/api/fields")
async def fields(
    request: Request, caller: Viewer, job: Annotated[str | None, Query(max_length=100)] = None
) -> dict[str, Any]:
    """The keys of a run as typed fields. Further parameters are group choices, such as `model=gpt2`."""
    groups = {key for key, several in catalogue().items() if several[0].group == CHOICES}
    choices = {key: value for key, value in request.query_params.items() if key in groups}
    return await in_thread(caller, submitting.fields_for, service_of(request), caller, job or None, choices)


@router.post("/api/runs/check")
async def check(request: Request, body: Wanted, caller: Runner) -> Checked:
    """Checks a request by all rules, and shows what would be started. Writes nothing."""
    runs = body.runs(caller)
    of_new_run(caller, body.project)
    found = await in_thread(caller, submitting.check, service_of(request), caller, runs, is_long=len(runs) > 1)
    return Checked(**found)


@router.post("/api/runs", status_code=201)
async def submit(
    request: Request,
    body: Wanted,
    caller: Runner,
    idempotency_key: RepeatKey = None,
) -> Queued:
    """Puts a run into the queue, or all runs of a sweep. The same Idempotency-Key always means the same run."""
    service, runs = service_of(request), body.runs(caller)
    words = service, caller, runs, idempotency_key, body.project
    return _queued(service, (await in_thread(caller, submitting.submit, *words, is_long=len(runs) > 1)).job)


@router.get("/api/runs/{run_id}/keys")
async def keys(request: Request, run_id: RunId, caller: Viewer) -> dict[str, Any]:
    """The request by which a run was submitted, for doing it again with changes."""
    return await in_thread(caller, submitting.keys_of, service_of(request), caller, run_id)


@router.post("/api/runs/{run_id}/cancel", status_code=202)
async def cancel(request: Request, run_id: RunId, caller: Runner) -> Stopped:
    """Takes a run from the queue, or asks it to stop with a checkpoint."""
    return Stopped(**await in_thread(caller, submitting.stop, service_of(request), caller, run_id))


@router.post("/api/runs/{run_id}/resume", status_code=201)
async def resume(
    request: Request, run_id: RunId, caller: Runner, body: Changes | None = None, idempotency_key: RepeatKey = None
) -> Queued:
    """Puts a run that is over into the queue again, to go on from its newest checkpoint."""
    service, changes = service_of(request), body or Changes()
    words = service, caller, run_id, changes.keys, changes.minutes, idempotency_key
    return _queued(service, (await in_thread(caller, submitting.resume, *words)).job)


@router.put("/api/runs/{run_id}/note", status_code=204)
def annotate(request: Request, run_id: RunId, body: Note, caller: Runner) -> None:
    """Gives a run another name in lists, tags and a note."""
    submitting.annotate(service_of(request), caller, run_id, body.title, body.tags, body.note)


@router.post("/api/runs/{run_id}/delete")
async def delete(request: Request, run_id: RunId, caller: Runner) -> Place:
    """Moves a run that is over into the bin of its run root."""
    return Place(**await in_thread(caller, submitting.delete, service_of(request), caller, run_id))


@router.post("/api/runs/{run_id}/export")
async def export(request: Request, run_id: RunId, caller: Runner) -> Exported:
    """Writes the weights of the newest checkpoint into the run folder, in plain names."""
    return Exported(**await in_thread(caller, submitting.export, service_of(request), caller, run_id, is_long=True))


def _queued(service: Service, job: Job) -> Queued:
    place = service.queue.positions().get(job.id)
    return Queued(id=job.run_key, job=job.id, sweep=job.sweep, state=job.state, position=place, reason=job.reason)
