"""What all routes of one service share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastapi import Request
from sqlalchemy import Engine

from ortlaunch.serve.limits import Limits
from ortlaunch.serve.readers import Readers
from ortlaunch.serve.settings import Settings

if TYPE_CHECKING:
    from ortlaunch.serve.oidc import Provider


@dataclass
class Service:
    """The service; `app.state.service`."""

    settings: Settings
    engine: Engine
    limits: Limits = field(default_factory=Limits)
    readers: Readers = field(default_factory=Readers)
    """The threads of the requests that read run folders."""
    provider: Provider | None = None
    """Who vouches for people beside their passwords."""
    actor: Any = None
    queue: Any = None
    machine: Any = None
    runs: Any = None
    streams: Any = None
    on_end: Any = None


def service_of(request: Request) -> Service:
    """Returns the service that a request came to."""
    found: Service = request.app.state.service
    return found
