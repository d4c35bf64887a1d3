"""Judges the answer to a bad request."""

from __future__ import annotations

from ortlaunch.base.exit_codes import REQUEST
from tests.attack.forked import STARTED, Answer

MOST_LINES = 6
_MOST_CHARACTERS = 2500


def faults_of(answer: Answer, changed: list[str]) -> list[str]:
    """What is wrong with an answer; empty if it is one clear message, the right exit code, and nothing left behind.

    Args:
        answer: the answer.
        changed: the files and folders that came, went or changed.
    """
    text = f"{answer.out}{answer.err}"
    lines = [line for line in text.splitlines() if line.strip()]
    faults = {
        "no answer in time": answer.is_late,
        "the request was taken": answer.code == STARTED,
        f"exit code {answer.code}": answer.code not in (REQUEST, STARTED),
        "a traceback": "Traceback" in text,
        "an unforeseen error": "unexpected error" in text,
        f"{len(lines)} lines": not 1 <= len(lines) <= MOST_LINES,
        f"{len(text)} characters": len(text) > _MOST_CHARACTERS,
        "no message of ours": not answer.err.startswith("ortlaunch: "),
        "control characters": any(ord(one) < 32 and one != "\n" for one in text),
        f"left behind: {', '.join(changed[:3])}": bool(changed),
    }
    return [fault for fault, is_so in faults.items() if is_so]
