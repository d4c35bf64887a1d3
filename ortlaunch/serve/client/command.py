"""`ortlaunch --server URL VERB …`: what the verbs do here, done by a service."""

from __future__ import annotations

import argparse
import json
import shlex
import uuid
from typing import Any

from ortlaunch.base import exit_codes
from ortlaunch.base.arguments import Parser, positive, seconds
from ortlaunch.base.errors import RequestError
from ortlaunch.base.start import split_script
from ortlaunch.base.text import json_text, say
from ortlaunch.serve.client import show
from ortlaunch.serve.client.connection import Connection
from ortlaunch.serve.client.following import OVER, follow, print_log, wait_for_end

_WAIT_SECONDS = 900.0
_MOST_ROWS = 100
"""Rows that the service gives at once."""
_DESCRIPTION = """\
Ask a service (ortlaunch serve) instead of this machine. The token stands in ORTLAUNCH_TOKEN, or in
~/.config/ortlaunch/token with mode 600.

RUN is a run's id in the service, as jobs lists it. run takes +jobs=NAME and KEY=VALUE."""


def main(arguments: list[str]) -> int:
    """Runs `ortlaunch --server URL VERB …`.

    Args:
        arguments: the whole command line.

    Raises:
        RequestError: the service cannot be reached, or refuses.
    """
    arguments, script = split_script(arguments)
    options = _parser().parse_args(arguments)
    if script is not None and options.function is not _run:
        raise RequestError("--: run alone takes a script: ortlaunch --server URL run [KEY=VALUE ...] -- train.py ARGS")
    options.script = script or []
    code: int = options.function(Connection(options.server), options)
    return code


def _jobs(service: Connection, options: argparse.Namespace) -> int:
    states = ",".join(options.state)
    filters = {"state": states or None, "owner": options.owner, "text": options.text}
    # By their ids: a run that comes meanwhile moves another one to the next page.
    found: dict[str, Any] = {}
    number = 0
    while len(found) < options.last:
        number += 1
        page = service.get("runs", **filters, size=min(options.last, _MOST_ROWS), page=number)
        found |= {row["id"]: row for row in page["runs"]}
        if number >= page["pages"]:
            break
    rows = list(found.values())[: options.last]
    if options.json:
        print(json_text(rows))
    else:
        show.rows(rows, page["total"])
    return exit_codes.DONE


def _status(service: Connection, options: argparse.Namespace) -> int:
    detail = service.get("runs", options.run)
    if options.json:
        print(json_text(detail))
    else:
        show.detail(detail)
    return exit_codes.DONE


def _logs(service: Connection, options: argparse.Namespace) -> int:
    if options.follow:
        follow(service, options.run, options.log)
    else:
        print_log(service, options.run, options.log, options.lines)
    return exit_codes.DONE


def _cancel(service: Connection, options: argparse.Namespace) -> int:
    all_ended = True
    for run in options.run:
        service.post("runs", run, "cancel")
        row = wait_for_end(service, run, options.wait)
        show.outcome(row)
        all_ended &= row["state"] in OVER
    return exit_codes.DONE if all_ended else exit_codes.FAILED


def _resume(service: Connection, options: argparse.Namespace) -> int:
    body = {"keys": keys_of(options.keys)[1]}
    show.submitted(service.post("runs", options.run, "resume", body=body, key=str(uuid.uuid4())))
    return exit_codes.DONE


def _run(service: Connection, options: argparse.Namespace) -> int:
    job, keys = keys_of(options.keys)
    body = {"job": job, "keys": keys, "project": options.project, "script": shlex.join(options.script)}
    if options.check:
        answer = service.post("runs", "check", body=body)
        say(json_text(answer) if options.json else str(answer["plan"]))
        return exit_codes.DONE
    answer = service.post("runs", body=body, key=str(uuid.uuid4()))
    if options.json:
        print(json_text(answer))
    else:
        show.submitted(answer)
    return exit_codes.DONE


def _compare(service: Connection, options: argparse.Namespace) -> int:
    answer = service.get("compare", ids=",".join(options.run))
    if options.json:
        print(json_text(answer))
    else:
        show.comparison(answer)
    return exit_codes.DONE


def keys_of(words: list[str]) -> tuple[str | None, dict[str, str | int | float | bool | None]]:
    """Returns the ready job and the keys that words name. The service alone decides what they may be.

    Args:
        words: ``+jobs=NAME`` and ``KEY=VALUE``.

    Raises:
        RequestError: a word is neither.
    """
    job: str | None = None
    keys: dict[str, str | int | float | bool | None] = {}
    for word in words:
        key, sign, value = word.partition("=")
        if key in ("+jobs", "jobs") and sign:
            job = value
        elif not sign or not key or key[0] in "+~-":
            raise RequestError(f"{word}: a service takes +jobs=NAME and KEY=VALUE (ortlaunch --server URL run --help)")
        else:
            keys[key] = _scalar(value)
    return job, keys


def _scalar(text: str) -> str | int | float | bool | None:
    """A value as JSON has it; what is no number, true, false or null there is text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if value is None or isinstance(value, str | int | float | bool) else text


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog="ortlaunch --server URL", usage="%(prog)s VERB ...", description=_DESCRIPTION, formatter_class=raw
    )
    parser.add_argument("--server", metavar="URL", required=True, help=argparse.SUPPRESS)
    verbs = parser.add_subparsers(metavar="VERB", required=True, prog="ortlaunch --server URL")
    jobs = _verb(verbs, "jobs", _jobs, "list runs, the newest first")
    jobs.add_argument(
        "--state", action="append", default=[], metavar="STATE", help="only runs in this state; repeatable"
    )
    jobs.add_argument("--owner", metavar="USER", help="only runs of this user")
    jobs.add_argument("--text", metavar="TEXT", help="only runs whose name, id or experiment contains it")
    jobs.add_argument("--last", type=positive, default=20, metavar="N", help="rows at most (default: 20)")
    status = _verb(verbs, "status", _status, "all about one run")
    status.add_argument("run", metavar="RUN")
    logs = _verb(verbs, "logs", _logs, "what its workers printed", as_json=False)
    logs.add_argument("run", metavar="RUN")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the run is over")
    logs.add_argument("--log", "--rank", default="0", metavar="RANK", help="a rank, or another log such as torchrun")
    logs.add_argument("-n", "--lines", type=positive, metavar="N", help="the last N lines")
    cancel = _verb(verbs, "cancel", _cancel, "end runs, with a checkpoint", as_json=False)
    cancel.add_argument("run", nargs="+", metavar="RUN")
    cancel.add_argument(
        "--wait", type=seconds, default=_WAIT_SECONDS, metavar="SECONDS", help="for the end (default: 900)"
    )
    resume = _verb(verbs, "resume", _resume, "continue a run that was stopped or has failed", as_json=False)
    resume.add_argument("run", metavar="RUN")
    resume.add_argument("keys", nargs="*", metavar="KEY=VALUE")
    compare = _verb(verbs, "compare", _compare, "put runs side by side")
    compare.add_argument("run", nargs="+", metavar="RUN")
    run = _verb(verbs, "run", _run, "submit a run")
    run.add_argument("keys", nargs="*", metavar="KEY=VALUE")
    run.add_argument("--project", default="", metavar="NAME", help="for members of several projects")
    run.add_argument("--check", action="store_true", help="say what would be done, and do nothing")
    return parser


def _verb(
    verbs: argparse._SubParsersAction[Parser], name: str, function: object, text: str, as_json: bool = True
) -> Parser:
    parser = verbs.add_parser(name, help=text, description=text.capitalize() + ".")
    parser.set_defaults(function=function)
    if as_json:
        parser.add_argument("--json", action="store_true", help="for programs: exact values")
    return parser
