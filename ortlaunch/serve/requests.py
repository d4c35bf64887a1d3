"""Judges what somebody submits, ``{"job": NAME, "keys": {NAME: SCALAR}}``, and turns it into words of a command line.

On a command line a value may run code (``+hydra.callbacks…``), read variables (``${oc.env:…}``) and name any folder.
So only the keys of `ortlaunch.serve.fields` are taken, with JSON scalars of their types, and texts are quoted: no
grammar of Hydra is left in them.
"""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ortlaunch.base.secrets import is_secret, without_secrets_in_words
from ortlaunch.compose.overrides import quoted
from ortlaunch.config.bounds import is_usable
from ortlaunch.config.meant import meant_key
from ortlaunch.serve.access import Role
from ortlaunch.serve.fields import CHOICES, OPEN_MODELS, PARAMS, Field, catalogue, is_choice, jobs_to_choose, may_choose
from ortlaunch.serve.unfit import Problem, Unfit, unfit

Scalar = str | int | float | bool | None
MOST_MINUTES = 366 * 24 * 60
MOST_SWEPT = 100
"""Runs of one sweep."""
_LONGEST_TEXT = 2000
_MOST_LINES = 50
_MOST_KEYS = 200
_PARAMETER = re.compile(r"(model|script)\.params\.[A-Za-z_]\w{0,60}")
OF_SCRIPT = "script.params."
_SLURM_TEXT = re.compile(r"[A-Za-z0-9_.:,&|*+@/()\[\]][A-Za-z0-9_.:,&|*+@/()\[\]-]*")
"""What stands in an option of sbatch. It does not begin with a dash, which would make it another option."""
_INTERPOLATION = "${"
_MISSING = "???"
"""OmegaConf's sign for a value that must be given."""


@dataclass(frozen=True)
class Submission:
    """A request that may be composed."""

    job: str | None
    keys: dict[str, Scalar]
    minutes: float | None = None
    script: str = ""
    """The script and its arguments, as in a shell; empty for ortlaunch's own loop."""
    words: list[str] = field(default_factory=list)
    """The words for the command line."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the request as it was sent."""
        sent = {"job": self.job, "keys": self.keys, "minutes": self.minutes}
        return {**sent, "script": self.script} if self.script else sent


def judge_all(
    job: str | None,
    keys: Mapping[str, Any],
    axes: Mapping[str, Sequence[Any]],
    role: Role,
    minutes: float | None = None,
    script: str = "",
) -> list[Submission]:
    """Returns the submissions of a sweep, one for each combination of the axes' values; without axes there is one.

    Args:
        job: see `judge`, as the next ones.
        keys: the keys that all runs have.
        axes: the values of further keys.
        role: the role of who sends it.
        minutes: the longest time that each run may take.
        script: the script and its arguments.

    Raises:
        Unfit: the request is refused, or it is too many runs.
    """
    for key, values in axes.items():
        if key in keys:
            raise unfit("it is a key of all runs and an axis of the sweep: give it once", key)
        if not values or len(set(map(repr, values))) < len(values):
            raise unfit("an axis has one value or more, each once", key)
    number = math.prod(map(len, axes.values()))
    if number > MOST_SWEPT:
        raise unfit(f"these axes make {number} runs: at most {MOST_SWEPT} are taken")
    combinations = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    return [judge(job, {**keys, **one}, role, minutes, script) for one in combinations]


def judge(
    job: str | None, keys: Mapping[str, Any], role: Role, minutes: float | None = None, script: str = ""
) -> Submission:
    """Returns the submission that a request means.

    Args:
        job: the name of a ready job; None for the defaults.
        keys: the keys by their dotted names, and group choices by the groups' names.
        role: the role of who sends it.
        minutes: the longest time that the run may take; None for no limit.
        script: the script and its arguments, as after ``--`` in a shell; empty for ortlaunch's own loop.

    Raises:
        Unfit: the request is refused; it says everything that is wrong.
    """
    problems = [] if job is None else _of_job(job)
    last, refusal = _script_words(script)
    if script and role < Role.author:
        refusal = f"running a script needs the role {Role.author.name}"
    if script and job is not None:
        problems.append(Problem("job", "a ready job is for ortlaunch's own loop: leave it out beside a script"))
    if refusal:
        problems.append(Problem("script", refusal))
    if minutes is not None and not 0 < minutes <= MOST_MINUTES:
        problems.append(Problem("minutes", f"must be greater than 0 and at most {MOST_MINUTES}"))
    if len(keys) > _MOST_KEYS:
        raise unfit(f"{len(keys)} keys: at most {_MOST_KEYS} are taken")
    chosen: list[str] = []
    single: list[str] = []
    for key, value in keys.items():
        found = _judged(key, value, role, keys, has_script=bool(script))
        if isinstance(found, Problem):
            problems.append(found)
        elif found:
            (chosen if is_choice(key) else single).append(found)
    if problems:
        raise Unfit(*problems)
    words = [*([f"+jobs={job}"] if job else []), *chosen, *single, *last]
    return Submission(job, dict(keys), minutes, script, words)


def _script_words(script: str) -> tuple[list[str], str]:
    """Returns the words of a script's line, with ``--`` before them, or why it is refused."""
    if not script:
        return [], ""
    if not script.isprintable() or _INTERPOLATION in script:
        return [], "must not contain control characters or ${"
    try:
        words = shlex.split(script)
    except ValueError as error:
        return [], f"cannot be read as words of a shell: {error}"
    words = words[1:] if words[:1] == ["--"] else words
    if without_secrets_in_words(words) != words:
        return [], "has a secret among its arguments: let the script read it from a file"
    return (["--", *words], "") if words else ([], "names no script: train.py ARGUMENTS")


def word_of(key: str, value: Scalar, *, is_text: bool) -> str:
    """Returns KEY=VALUE as Hydra reads it.

    Args:
        key: the key.
        value: the value.
        is_text: whether the value is any text; it is quoted then.
    """
    if value is None:
        return f"{key}=null"
    if isinstance(value, bool):
        return f"{key}={'true' if value else 'false'}"
    if isinstance(value, int | float):
        return f"{key}={value!r}"
    return f"{key}={quoted(value)}" if is_text else f"{key}={value}"


def _of_job(job: str) -> list[Problem]:
    if any(one["name"] == job for one in jobs_to_choose()):
        return []
    return [Problem("job", "there is no such ready job, or it is a sweep")]


def _judged(key: str, value: Any, role: Role, keys: Mapping[str, Any], *, has_script: bool) -> str | Problem:
    """Returns the word of a key, or why it is refused; an empty text for a choice that chooses nothing."""
    fields = catalogue().get(key) or _free(key, value, keys, has_script=has_script)
    if not fields:
        meant = meant_key(key) if re.fullmatch(r"[\w./]{1,80}", key) else None
        hint = f"; did you mean {meant}?" if meant in catalogue() else ""
        return Problem(key[:100], f"there is no such key to set here{hint}")
    if all(role < one.role for one in fields):
        return Problem(key, f"setting this key needs the role {min(one.role for one in fields).name}")
    allowed = [one for one in fields if role >= one.role]
    reasons = [_why_not(one, value) for one in allowed]
    if all(reasons):
        return Problem(key, next(reason for reason in reasons if reason))
    one = allowed[reasons.index("")]
    if one.group == CHOICES:
        return _choice(one, value, role)
    if one.kind == "lines":
        return f"{key}=[{','.join(quoted(line) for line in _lines(value))}]"
    if one.kind == "integer" and isinstance(value, float):
        value = int(value)
    return word_of(key, value, is_text=one.kind == "text")


def _free(key: str, value: Any, keys: Mapping[str, Any], *, has_script: bool) -> tuple[Field, ...]:
    """A parameter that no file lists, for scripts and for models that take any."""
    # Whoever lets a run go on names no model, and may have to give a secret of it once more.
    is_open = keys.get("model") in OPEN_MODELS or is_secret(key)
    is_open = has_script if key.startswith(OF_SCRIPT) else is_open and key.startswith(PARAMS)
    if not is_open or not _PARAMETER.fullmatch(key):
        return ()
    kind: Any = {bool: "flag", int: "integer", float: "number", str: "text"}.get(type(value), "text")
    return (Field(key, "model", kind, None, "", Role.author, nullable=True),)


def _choice(one: Field, value: Any, role: Role) -> str | Problem:
    if value is None:
        return ""
    if not may_choose(one.key, value, role):
        return Problem(one.key, f"choosing {value} needs the role {Role.author.name}")
    return f"{'+' if one.nullable else ''}{one.key}={value}"


def _why_not(one: Field, value: Any) -> str:
    """Why a value is refused; empty if it is taken."""
    if value is None:
        return "" if one.nullable else "must have a value"
    if one.kind == "flag":
        return "" if isinstance(value, bool) else "must be true or false"
    if one.kind in ("integer", "number"):
        return _why_no_number(one, value)
    if not isinstance(value, str):
        return "must be a text"
    if one.kind == "choice":
        return "" if value in one.choices else f"must be one of {', '.join(one.choices)}"
    return _why_no_text(one, value)


def _why_no_number(one: Field, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "must be a whole number" if one.kind == "integer" else "must be a number"
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    if one.kind == "integer" and isinstance(value, float) and not value.is_integer():
        return "must be a whole number"
    if not one.bounds.holds(value):
        hint = f"; {one.bounds.hint}" if one.bounds.hint else ""
        return f"must be {one.bounds}{hint}" if is_usable(value) and str(one.bounds) else "is too large"
    return ""


def _why_no_text(one: Field, value: str) -> str:
    if len(value) > _LONGEST_TEXT:
        return f"must have at most {_LONGEST_TEXT} characters"
    # OmegaConf resolves this also where a text is quoted.
    if _INTERPOLATION in value:
        return "must not contain ${"
    if any(line.strip() == _MISSING for line in value.splitlines()):
        return "must be given"
    plain = value.replace("\n", "") if one.kind == "lines" else value
    if not plain.isprintable():
        return "must not contain control characters"
    if len(_lines(value)) > _MOST_LINES:
        return f"must have at most {_MOST_LINES} lines"
    if one.group == "launcher" and one.kind == "text" and not _SLURM_TEXT.fullmatch(value):
        return "has signs that SLURM does not take here"
    return ""


def _lines(value: str) -> list[str]:
    return [line for line in value.split("\n") if line.strip()]
