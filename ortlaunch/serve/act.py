"""The child's side of `ortlaunch.serve.actor`: ``python -P -m ortlaunch.serve.act ACTION``, JSON in and JSON out.

The answer is one JSON object on standard output: what the action returns, or ``{"refused": MESSAGE, "key": KEY}``.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import signal
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.base.reading import in_words
from ortlaunch.base.secrets import CARRIER, without_secrets
from ortlaunch.base.user import account_name

ACTIONS = {
    "fields": "ortlaunch.serve.acts.composing:fields",
    "check": "ortlaunch.serve.acts.composing:check",
    "check_sweep": "ortlaunch.serve.acts.composing:check_sweep",
    "keys": "ortlaunch.serve.acts.composing:keys",
    "start": "ortlaunch.serve.acts.starting:start",
    "outcome": "ortlaunch.serve.acts.runs:outcome",
    "check_resume": "ortlaunch.serve.acts.runs:check_resume",
    "cancel": "ortlaunch.serve.acts.runs:cancel_run",
    "delete": "ortlaunch.serve.acts.runs:delete",
    "export_weights": "ortlaunch.serve.acts.runs:export_weights",
    "compare": "ortlaunch.serve.acts.comparing:compare",
}
"""The function of each action as MODULE:FUNCTION. It takes the request and returns the answer."""
_LARGEST_REQUEST = 1024 * 1024
_LATE_SECONDS = 5.0
"""So long after nobody waits for the answer any more, this process ends."""
_KEY = re.compile(r"(?:resume: )?\+?([a-z_]+(?:[./][A-Za-z_]\w*)*)(?:=| is not set| needs | has )")
"""The key that a refusal of the rules begins with."""


def main() -> None:
    """Reads the request, runs the action and prints the answer."""
    # Whatever the action prints goes to the standard error, so that the answer is alone on standard output.
    answer_to = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    request = json.loads(sys.stdin.read(_LARGEST_REQUEST))
    # The service cannot kill a process of another user. Processes that this one starts have no such end.
    signal.setitimer(signal.ITIMER_REAL, request["seconds"] + _LATE_SECONDS)
    try:
        os.chdir(request["folder"])
    except OSError as error:
        # It is no refusal: a disk may be away for a moment only, and a start is tried again.
        sys.exit(f"{request['folder']} cannot be entered by the Unix user {account_name()}: {in_words(error)}")
    if request.get("secrets"):
        os.environ[CARRIER] = json.dumps(request["secrets"])
    with redirect_stdout(io.StringIO()):
        answer = _answer(sys.argv[1], request)
    json.dump(answer, answer_to)
    answer_to.close()
    # Threads of libraries are not waited for: the answer is complete.
    os._exit(0)


def key_of(message: str) -> str | None:
    """Returns the key that a refusal is about; None if it names none at its beginning."""
    found = _KEY.match(message)
    return found[1] if found is not None else None


def _answer(action: str, request: dict[str, Any]) -> dict[str, Any]:
    module, _, function = ACTIONS[action].partition(":")
    try:
        found: dict[str, Any] = getattr(importlib.import_module(module), function)(request)
    except RequestError as error:
        message = without_secrets(str(error))
        return {"refused": message, "key": key_of(message)}
    return found


def root_of(request: dict[str, Any]) -> Path:
    """Returns the run root of the user whom the request is for."""
    return Path(request["root"])


if __name__ == "__main__":
    main()
