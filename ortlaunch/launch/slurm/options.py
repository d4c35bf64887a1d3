"""Parses the options of `launcher.extra` and `launcher.srun_extra` as sbatch and srun do.

sbatch splits a line ``#SBATCH …`` into words (quotes and backslashes as in a shell, a comment after ``#``) and gives
the words of all lines together to ``getopt_long``. So one line may hold several options, a long option may be
shortened as long as it is clear, and its value may follow ``=`` or be the next word. What is no option, or lacks a
value, is for sbatch to refuse.
"""

from __future__ import annotations

import re
import shlex

from ortlaunch.base.errors import RequestError

OURS = {
    "--array": "--multirun sets it; launcher.array_limit limits how many tasks run at once",
    "--chdir": "start ortlaunch in that folder",
    "--container-image": "set launcher.container.image",
    "--export": "set launcher.env",
    "--job-name": "set name",
    "--no-requeue": "the run could not survive a preemption or its time limit",
    "--ntasks": "there is one task per node: set launcher.nodes",
    "--ntasks-per-node": "there is one task per node: set launcher.workers_per_node",
    "--open-mode": "the logs of all attempts belong together",
    "--output": "the job's output goes to the run folder",
    "--error": "the job's output goes to the run folder",
    "--parsable": "ortlaunch reads sbatch's answer",
    "--requeue": "ortlaunch sets it already",
    "--signal": "set launcher.grace_seconds",
    "--test-only": "ortlaunch asks that by itself; launcher.dry_run=true shows the script",
    "--wait": "ortlaunch returns when the job is submitted",
    "--wrap": "the script is ortlaunch's",
    "--cpus-per-task": "set launcher.cpus_per_node",
    "--gpus-per-node": "set launcher.gpus_per_node",
    "--gpus": "set launcher.gpus_per_node",
    "--nodes": "set launcher.nodes",
    "--help": "nothing would be submitted",
    "--usage": "nothing would be submitted",
    "--version": "nothing would be submitted",
}
"""Options that a user may not give, with the reason or the key to set instead."""

_SHORT = {
    "D": "--chdir",
    "G": "--gpus",
    "J": "--job-name",
    "N": "--nodes",
    "V": "--version",
    "W": "--wait",
    "a": "--array",
    "c": "--cpus-per-task",
    "e": "--error",
    "h": "--help",
    "n": "--ntasks",
    "o": "--output",
}
"""The letters of those that have one (man sbatch); srun's are the same. Other options go by their long names alone:
a letter may be a flag that others follow, as in ``-Ho/tmp/log``."""
_FREE = "--container"
"""An option of its own that is also the beginning of one of `OURS`."""


def parse(key: str, text: str) -> list[tuple[str, str | None]]:
    """Returns the options in one item of `launcher.extra` or `launcher.srun_extra`, with their values.

    Args:
        key: the item's key, for messages.
        text: the item, such as ``--nice=100`` or ``--comment "two words"``.

    Raises:
        RequestError: it is no option on one line, or an option that ortlaunch sets itself, in whatever form.
    """
    where = f"launcher.{key}"
    if not text.startswith("-") or re.search(r"[\x00-\x1f\x7f]", text):
        raise RequestError(f"{where}: {text!r} is no option on one line, such as --nice=100")
    words = _words(where, text)
    found: list[tuple[str, str | None]] = []
    while words:
        name, value = _split(where, words.pop(0))
        if value is None and words and not words[0].startswith("-"):
            value = words.pop(0)
        found.append((name, value))
    return found


def _words(where: str, text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=False)
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError as error:
        raise RequestError(f"{where}: {text!r}: {error}: write one option, --NAME=VALUE, with its quotes") from None
    if not words:
        raise RequestError(f"{where}: {text!r} is no option on one line, such as --nice=100")
    return words


def _split(where: str, word: str) -> tuple[str, str | None]:
    """Returns a word's option, and the value after its =."""
    if short := re.match(r"-([A-Za-z])", word):
        name, value = _SHORT.get(short[1], ""), None
        if not name:
            raise RequestError(f"{where}: {word}: give each option by itself and by its long name, such as --nice=100")
    elif long := re.fullmatch(r"(--[A-Za-z][\w-]*)(?:=(.*))?", word):
        name, value = long.groups()
    else:
        raise RequestError(f"{where}: {word!r} is no option: write --NAME=VALUE, in quotes where the value has a space")
    # sbatch takes --outp for --output too.
    ours = name if name in OURS else next((one for one in OURS if one.startswith(name) and name != _FREE), None)
    if ours is not None:
        raise RequestError(f"{where}: {name} would be in ortlaunch's way: {OURS[ours]}")
    return name, value
