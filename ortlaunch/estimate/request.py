"""What the command asks the tracing process for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ortlaunch.config.schema import Config
from ortlaunch.launch.allocator import allocator_variables
from ortlaunch.tracking import trackers

REQUEST = "request.json"
TRIED = {"ort": "ONNX Runtime", "compile": "torch.compile"}
"""The backends whose memory only real steps show, by their names."""

Points = Sequence[Sequence[int]]
"""Micro-batches, each with the bytes of the largest worker by a trial with it."""


@dataclass(frozen=True)
class Request:
    """The run's size, and the memory that it may take."""

    workers: int
    """Workers on each machine."""
    nodes: int
    limit: int | None
    """Bytes of each machine; None if they are not known."""
    limit_source: str
    """Where the limit is from, in words."""
    quick: bool
    """Whether to look only at the run as it is asked for, without trials and without what could be changed about it."""
    on_gpu: bool = False
    """Whether each worker has a GPU, whose memory is asked for. The limit is then that of a GPU."""
    tried: Mapping[str, Points] = field(default_factory=dict)
    """What trials have shown, by the backend."""
    why_untried: str = ""
    """Why there were no trials of a backend that needs them, as a clause about real steps."""

    @property
    def sharing(self) -> int:
        """Workers that share the memory which is limited."""
        return 1 if self.on_gpu else self.workers

    @property
    def world_size(self) -> int:
        """Workers on all machines."""
        return self.workers * self.nodes

    def write(self, folder: Path) -> None:
        """Leaves the request in the folder."""
        (folder / REQUEST).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Request:
        """Reads what `write` left."""
        return cls(**json.loads((folder / REQUEST).read_text()))


def variables_of(config: Config) -> dict[str, str]:
    """Returns the variables of the tracing process: what a worker may read, and the settings of its allocator."""
    return trackers.worker_environment(config) | allocator_variables(config)
