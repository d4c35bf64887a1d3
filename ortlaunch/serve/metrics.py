"""What Prometheus is told: requests as they come, and queue, slots, runs and streams as they are when it asks."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import func, select
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ortlaunch.serve.database import reading
from ortlaunch.serve.index.listing import facets_of
from ortlaunch.serve.queue.tables import OPEN_STATES, Job, JobState
from ortlaunch.serve.service import Service

_PREFIX = "ortlaunch"
_registry = CollectorRegistry()
_requests = Counter(f"{_PREFIX}_requests", "Answered requests.", ("method", "route", "status"), registry=_registry)
_seconds = Histogram(
    f"{_PREFIX}_request_seconds",
    "Time from a request to the beginning of its answer.",
    ("method", "route"),
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
    registry=_registry,
)
ProcessCollector(registry=_registry)
_HOLDING = (JobState.STARTING, JobState.RUNNING)
"""States of jobs that hold slots."""
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


class CountRequests:
    """ASGI middleware that counts requests by their routes; addresses as they were sent would be too many labels."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 500

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                _seconds.labels(_method(scope), _route(scope)).observe(time.perf_counter() - began)
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            _requests.labels(_method(scope), _route(scope), str(status)).inc()


class ServiceCollector(Collector):
    """Asks the parts of a service how they are."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """Yields the figures."""
        with reading(self._service.engine) as session:
            taken = session.scalars(select(Job.taken).where(Job.state.in_(_HOLDING))).all()
            jobs = dict(session.execute(select(Job.state, func.count()).group_by(Job.state)).all())
        yield _by("jobs", "Open jobs of the queue.", "state", {state: jobs.get(state, 0) for state in OPEN_STATES})
        unsent = sum(run.unsent for run in self._service.runs.runs.values())
        yield _by("runs", "Rows of the list.", "state", facets_of(self._service, None)["states"])
        yield _one("relay_unsent_bytes", "Bytes of journals that tracking servers have not got.", unsent)
        yield from self._slots({name for names in taken for name in names})
        yield _one("streams", "Open event streams.", self._service.streams.count)
        yield _one("index_age_seconds", "Time since the run folders were looked at.", self._service.runs.age)

    def _slots(self, taken: set[str]) -> Iterator[Metric]:
        slate = self._service.queue.slate()
        foreign = len(slate.withheld.keys() - taken)
        counts = {"all": len(slate.names), "taken": len(taken), "foreign": foreign}
        yield _by("slots", "Slots of this machine.", "use", counts)


def exposition(service: Service) -> bytes:
    """Returns all figures in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(ServiceCollector(service))
    return generate_latest(_registry) + generate_latest(registry)


def _method(scope: Scope) -> str:
    return scope["method"] if scope["method"] in _METHODS else "other"


def _route(scope: Scope) -> str:
    return getattr(scope.get("route"), "path", "none")


def _one(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{_PREFIX}_{name}", meaning, value=value)


def _by(name: str, meaning: str, label: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(f"{_PREFIX}_{name}", meaning, labels=[label])
    for key, value in values.items():
        family.add_metric([str(key)], value)
    return family
