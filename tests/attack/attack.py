"""Makes bad requests, and judges what they come to."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.attack.forked import Answer, forked
from tests.attack.judge import faults_of
from tests.attack.requests import Request
from tests.attack.world import World, made

_PRELOADED = (
    *(
        "ortlaunch.cli",
        "ortlaunch.verbs.run",
        "ortlaunch.verbs.bench",
        "ortlaunch.verbs.resume",
        "ortlaunch.check.command",
        "ortlaunch.estimate.command",
        "ortlaunch.tune.command",
    ),
    *("ortlaunch.compare.command", "ortlaunch.export.command", "ortlaunch.export.run_weights", "ortlaunch.follow.jobs"),
    *("ortlaunch.follow.logs", "ortlaunch.follow.cancel", "ortlaunch.follow.sync", "ortlaunch.doctor.command"),
    *("ortlaunch.compose.hydra_tree", "hydra", "hydra.core.override_parser.overrides_parser", "rich.console"),
)
"""What the forked requests need not import again."""


@dataclass
class Result:
    """What became of the requests."""

    tried: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[Request, list[str], Answer]] = field(default_factory=list)

    @property
    def report(self) -> str:
        """The failures, and at the end the counts."""
        lines = []
        for request, faults, answer in self.failures:
            said = " / ".join(f"{answer.out}{answer.err}".strip().splitlines()[-3:])[:400]
            lines.append(f"{request}\n    {'; '.join(faults)}\n    {said!a}")
        bad = Counter(request.kind for request, _, _ in self.failures)
        for kind, number in sorted(self.tried.items()):
            lines.append(f"{kind:<18} tried {number:>4}  passed {number - bad[kind]:>4}")
        total = self.tried.total()
        return "\n".join([*lines, f"{'all':<18} tried {total:>4}  passed {total - len(self.failures):>4}"])


def attack(requests: Iterable[Request], folder: Path, make: Callable[[list[str], World], Answer] = forked) -> Result:
    """Makes requests one after the other; the folder must be empty.

    Args:
        requests: the requests, all of them bad.
        folder: the place of the world in which they are made.
        make: makes a request.
    """
    for module in _PRELOADED:
        importlib.import_module(module)
    world = made(folder / "world")
    result, before = Result(), world.state()
    for request in requests:
        answer = make(request.words, world)
        after = world.state()
        changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
        result.tried[request.kind] += 1
        if faults := faults_of(answer, sorted(changed)):
            result.failures.append((request, faults, answer))
        before = after
    return result
