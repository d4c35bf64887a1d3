"""Parses the options of `launcher.extra` and `launcher.srun_extra` as sbatch and srun do.

sbatch splits a line ``#SBATCH …`` into words (quotes and backslashes as in a shell, a comment after ``#``) and gives
the words of all lines together to ``getopt_long``. So one line may hold several options, a long option may be
shortened as long as it is clear, its value may follow ``=`` or be the next word, and an option without the value that
it needs takes the next line's option for its value.
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
    "A": "--account",
    "B": "--extra-node-info",
    "C": "--constraint",
    "D": "--chdir",
    "F": "--nodefile",
    "G": "--gpus",
    "J": "--job-name",
    "L": "--licenses",
    "M": "--clusters",
    "N": "--nodes",
    "S": "--core-spec",
    "a": "--array",
    "b": "--begin",
    "c": "--cpus-per-task",
    "d": "--dependency",
    "e": "--error",
    "i": "--input",
    "m": "--distribution",
    "n": "--ntasks",
    "o": "--output",
    "p": "--partition",
    "q": "--qos",
    "t": "--time",
    "w": "--nodelist",
    "x": "--exclude",
}
"""The short options with a value (man sbatch); srun's are the same."""
_SHORT_FLAGS = {
    "H": "--hold",
    "O": "--overcommit",
    "Q": "--quiet",
    "V": "--version",
    "W": "--wait",
    "h": "--help",
    "k": "--no-kill",
    "s": "--oversubscribe",
    "v": "--verbose",
}
_FLAGS = frozenset(
    [
        "--contiguous",
        "--exclusive",
        "--get-user-env",
        "--help",
        "--hold",
        "--ignore-pbs",
        "--nice",
        "--no-kill",
        "--no-requeue",
        "--overcommit",
        "--oversubscribe",
        "--parsable",
        "--propagate",
        "--quiet",
        "--reboot",
        "--requeue",
        "--spread-job",
        "--stepmgr",
        "--test-only",
        "--usage",
        "--use-min-nodes",
        "--verbose",
        "--version",
        "--wait",
    ]
)
"""Options that need no value; a value may only follow ``=``."""
_WITH_VALUE = frozenset(_SHORT.values()) | frozenset(
    [
        "--acctg-freq",
        "--batch",
        "--bb",
        "--bbf",
        "--cluster-constraint",
        "--comment",
        "--container",
        "--container-id",
        "--cores-per-socket",
        "--cpu-freq",
        "--cpus-per-gpu",
        "--deadline",
        "--delay-boot",
        "--export",
        "--export-file",
        "--extra",
        "--gid",
        "--gpu-bind",
        "--gpu-freq",
        "--gpus-per-node",
        "--gpus-per-socket",
        "--gpus-per-task",
        "--gres",
        "--gres-flags",
        "--hint",
        "--kill-on-invalid-dep",
        "--mail-type",
        "--mail-user",
        "--mcs-label",
        "--mem",
        "--mem-bind",
        "--mem-per-cpu",
        "--mem-per-gpu",
        "--mincpus",
        "--network",
        "--ntasks-per-core",
        "--ntasks-per-gpu",
        "--ntasks-per-node",
        "--ntasks-per-socket",
        "--open-mode",
        "--power",
        "--prefer",
        "--priority",
        "--profile",
        "--reservation",
        "--signal",
        "--sockets-per-node",
        "--switches",
        "--thread-spec",
        "--threads-per-core",
        "--time-min",
        "--tmp",
        "--tres-bind",
        "--tres-per-task",
        "--uid",
        "--wait-all-nodes",
        "--wckey",
        "--wrap",
    ]
)
_KNOWN = _FLAGS | _WITH_VALUE | frozenset(OURS)


def parse(key: str, text: str) -> list[tuple[str, str | None]]:
    """Returns the options in one item of `launcher.extra` or `launcher.srun_extra`, with their values.

    Args:
        key: the item's key, for messages.
        text: the item, such as ``--nice=100``, ``--comment "two words"`` or ``-t 10``.

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
        _check_free(where, name)
        if value is None and name not in _FLAGS and words and not words[0].startswith("-"):
            value = words.pop(0)
        if value is None and name in _WITH_VALUE:
            raise RequestError(f"{where}: {name} needs a value: write {name}=VALUE")
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
    """Returns a word's option by its long name, and the value in it."""
    if long := re.fullmatch(r"(--[A-Za-z][\w-]*)(?:=(.*))?", word):
        return long[1], long[2]
    short = re.fullmatch(r"-([A-Za-z])(.*)", word)
    if short is None:
        raise RequestError(f"{where}: {word!r} is no option: write --NAME=VALUE, in quotes where the value has a space")
    letter, rest = short[1], short[2]
    if letter in _SHORT:
        return _SHORT[letter], rest or None
    if letter in _SHORT_FLAGS and not rest:
        return _SHORT_FLAGS[letter], None
    raise RequestError(f"{where}: {word}: give each option by itself and by its long name, such as --nice=100")


def _check_free(where: str, name: str) -> None:
    """Refuses an option that ortlaunch sets. A name that is no option may be short for one: sbatch takes --outp too."""
    meant = name if name in _KNOWN else next((ours for ours in OURS if ours.startswith(name)), name)
    if meant in OURS:
        raise RequestError(f"{where}: {name} would be in ortlaunch's way: {OURS[meant]}")
