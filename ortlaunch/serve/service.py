"""What all routes of one service share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import Request
from sqlalchemy import Engine

from ortlaunch.serve.limits import Limits
from ortlaunch.serve.settings import Settings


class Part(Protocol):
    """A part of the service that works in the background."""

    def start(self) -> None:
        """Begins. It is called in a thread, and must return soon."""

    def stop(self) -> None:
        """Ends; runs go on. It is called in a thread, and must return within some seconds."""


@dataclass
class Service:
    """The service; `app.state.service`."""

    settings: Settings
    engine: Engine
    limits: Limits = field(default_factory=Limits)
    actor: Any = None
    queue: Any = None
    runs: Any = None
    streams: Any = None


def service_of(request: Request) -> Service:
    """Returns the service that a request came to."""
    found: Service = request.app.state.service
    return found
