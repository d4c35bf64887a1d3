"""Acts for a Unix user: one child process for each request, with few environment variables and bounded in time.

The service itself neither composes a configuration nor starts, stops or reads a run of another user. It asks
``python -P -m ortlaunch.serve.act`` (`ortlaunch.serve.act`), as that user by ``sudo -n`` where it is not its own one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.base.ownership import require_own
from ortlaunch.base.reading import in_words
from ortlaunch.base.secrets import without_secrets
from ortlaunch.base.text import printable
from ortlaunch.base.user import account_name
from ortlaunch.serve.exchange import TooMuch, exchange
from ortlaunch.serve.service import Service
from ortlaunch.serve.unfit import Unavailable
from ortlaunch.serve.unix_users import listed_users

_SECONDS = 60.0
_SECONDS_OF = {"start": 120.0, "cancel": 300.0, "export_weights": 600.0, "compare": 300.0, "check_sweep": 300.0}
"""How long an action may take, where that is not `_SECONDS`."""
_LARGEST_ANSWER = 32 * 1024 * 1024
_LONGEST_MESSAGE = 20_000
"""Characters of a message that are taken: the child's user may have changed what it says, and it is logged and kept."""
_VARIABLES = frozenset(
    [
        *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV"),
        *("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"),
        *("DBUS_SESSION_BUS_ADDRESS", "HF_HOME", "HF_HUB_OFFLINE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"),
        *("ORTLAUNCH_SLURM_PROFILES", "ORTLAUNCH_TRUST", "ORTLAUNCH_JOBS", "ORTLAUNCH_CACHE", "ORTLAUNCH_MARCH"),
        *("SLURM_CONF", "MLFLOW_TRACKING_URI", "OMP_NUM_THREADS", "XDG_CONFIG_HOME"),
    ]
)
"""The variables of the service that every child gets. None of them holds a secret."""
_FAMILIES = ("LC_", "NCCL_", "GLOO_")
"""The beginnings of further ones: a machine may need NCCL's to train at all, and no key of a run sets them."""
_OF_MLFLOW = frozenset(["MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"])
"""The variables that a child gets only to start a run, which sends its record with them, to the server that the
service's own variables name and to none that a run folder does."""
AT_ONCE = 3
"""Children of one Unix user in one lane at a time: those of one who does not answer leave room for those of others."""
_LANE_OF = {
    **dict.fromkeys(("start", "outcome"), "queue"),
    "cancel": "stop",
    **dict.fromkeys(("export_weights", "compare", "check_sweep"), "long"),
}
"""Actions that wait only for each other, where that is not the lane of the short ones: what takes minutes keeps neither
the queue nor a check waiting."""
_TURN_SECONDS = 30.0


class Refused(Exception):
    """A request that the checks refuse, or that the run's state does not allow."""

    def __init__(self, message: str, key: str | None = None) -> None:
        """
        Args:
            message: the sentence for the user.
            key: the dotted key that it is about; None if it is about none.
        """
        super().__init__(message)
        self.message = message
        self.key = key


@dataclass(frozen=True)
class Actor:
    """Runs actions as Unix users."""

    root: Path
    """The run root."""
    allow_list: Path | None = None
    """The list of the Unix users whom the service may act for by sudo (`ortlaunch.serve.unix_users`). None: nobody."""
    _turns: dict[tuple[str, str], threading.BoundedSemaphore] = field(default_factory=dict, repr=False, compare=False)

    def call(self, unix_user: str, action: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Runs one action in a child and returns its answer. It blocks: call it outside the event loop.

        Args:
            unix_user: the user whom the run belongs to.
            action: one of `ortlaunch.serve.act.ACTIONS`, whose functions say what they take and return.
            request: what the action takes, as JSON.

        Raises:
            Refused: the action refuses the request.
            Unavailable: there is no answer.
        """
        lane = unix_user, _LANE_OF.get(action, "short")
        turns = self._turns.setdefault(lane, threading.BoundedSemaphore(AT_ONCE))
        if not turns.acquire(timeout=_TURN_SECONDS):
            raise Unavailable(f"{action}: {AT_ONCE} requests for the Unix user {unix_user} are at work: try again")
        try:
            return self._call(unix_user, action, request)
        finally:
            turns.release()

    def _call(self, unix_user: str, action: str, request: Mapping[str, Any]) -> dict[str, Any]:
        words = [*self._as_user(unix_user), sys.executable, "-P", "-m", "ortlaunch.serve.act", action]
        seconds = _SECONDS_OF.get(action, _SECONDS)
        child = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env=_environment(action),
            start_new_session=True,
        )
        root = self.folder_of(unix_user)
        # A relative place in the configuration, such as that of MLflow's database, begins at the working folder.
        folder = root.parent if unix_user == own_user() else root
        document = json.dumps({**request, "root": str(root), "folder": str(folder), "seconds": seconds})
        try:
            answer, said = exchange(child, document.encode(), seconds, _LARGEST_ANSWER)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{action}: no answer within {seconds:g} s") from None
        except TooMuch:
            raise Unavailable(f"{action}: the answer has more than {_LARGEST_ANSWER:,} bytes") from None
        finally:
            if child.returncode is None:
                _abandon(child)
        return _read(action, child.returncode, answer, said.decode(errors="replace"))

    def folder_of(self, unix_user: str) -> Path:
        """The run root of a user: the service's own root, or below it a folder that belongs to the user."""
        root = self.root.absolute()
        return root if unix_user == own_user() else root / unix_user

    def may_act_for(self, unix_user: str) -> bool:
        """Whether the service may start runs of a Unix user."""
        return unix_user == own_user() or unix_user in self._listed()

    def _as_user(self, unix_user: str) -> list[str]:
        if unix_user == own_user():
            return []
        if unix_user not in self._listed():
            where = f"{self.allow_list} does not list it" if self.allow_list else "it has no list of users"
            raise Refused(f"the service may not act for the Unix user {unix_user}: {where}")
        return ["sudo", "-n", "-u", unix_user, "--"]

    def _listed(self) -> list[str]:
        if self.allow_list is None:
            return []
        try:
            require_own(self.allow_list, use="act for another user")
            return listed_users(self.allow_list)
        except FileNotFoundError:
            return []
        except RequestError as error:
            raise Refused(str(error)) from error
        except OSError as error:
            raise Unavailable(f"{self.allow_list} cannot be read: {in_words(error)}") from error


def _abandon(child: subprocess.Popen[bytes]) -> None:
    """Kills a child that gives no answer, and does not wait: one of another user cannot be killed, and ends itself."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    for pipe in (child.stdin, child.stdout, child.stderr):
        with suppress(OSError):
            assert pipe is not None
            pipe.close()
    with suppress(subprocess.TimeoutExpired):
        child.wait(1)


def own_user() -> str:
    """The Unix user whom the service runs as."""
    return account_name()


def _environment(action: str) -> dict[str, str]:
    names = _VARIABLES | _OF_MLFLOW if action == "start" else _VARIABLES
    kept = {name: value for name, value in os.environ.items() if name in names or name.startswith(_FAMILIES)}
    return kept | {"PYTHONUNBUFFERED": "1"}


def _read(action: str, code: int, answer: bytes, said: str) -> dict[str, Any]:
    try:
        found = json.loads(answer)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        # A line that is cut is left out: what tells that something is a secret may be before the cut.
        tail = said if len(said) <= _LONGEST_MESSAGE else said[-_LONGEST_MESSAGE:].partition("\n")[2]
        lines = without_secrets(tail).strip().splitlines()
        why = printable(lines[-1]) if lines else f"ended with {code} and without an answer"
        raise Unavailable(f"{action}: {why}")
    if "refused" in found:
        key = found.get("key")
        raise Refused(str(found["refused"])[:_LONGEST_MESSAGE], key if isinstance(key, str) else None)
    return found


def make_actor(service: Service) -> Actor:
    """Returns the actor of a service."""
    return Actor(service.settings.root, service.settings.unix_users)
