"""A scheduler with PBS's programs for one machine that runs one job at a time; its spool is the folder ``$PBS_SPOOL``.

`qsub` starts a process for each job that waits, runs the script and ends by itself, at the latest after
`_LONGEST_SECONDS`; so nothing goes on beside the tests.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

_LONGEST_SECONDS = 240.0
_POLL_SECONDS = 0.1
_SPOOL = Path(os.environ["PBS_SPOOL"])


@contextmanager
def locked(name):
    with open(_SPOOL / f"{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def path_of(job_id):
    return _SPOOL / f"{job_id}.json"


def read(job_id):
    return json.loads(path_of(job_id).read_text())


def change(job_id, **values):
    """Changes what is known of a job, in one step for those who read it."""
    with locked("spool"):
        known = read(job_id) if path_of(job_id).exists() else {}
        part = _SPOOL / f".{job_id}.{os.getpid()}"
        part.write_text(json.dumps(known | values))
        part.rename(path_of(job_id))


def qsub(arguments):
    text = Path(arguments[-1]).read_text()
    options = dict(re.findall(r"^#PBS (-\S+) (.*)$", text, re.MULTILINE))
    with locked("number"):
        job_id = f"{len(list(_SPOOL.glob('*.pbs.json'))) + 1}.pbs"
        after = re.findall(r"\d+\.pbs", options.get("-W", ""))
        change(
            job_id,
            job_state="H" if after else "Q",
            after=after,
            run_count=0,
            deleted=False,
            rerun=False,
            exec_host="",
            stime=0.0,
            exit_code=None,
            pid=None,
        )
    script = _SPOOL / f"{job_id}.sh"
    script.write_text(text)
    with open(_SPOOL / f"{job_id}.log", "ab") as log:
        subprocess.Popen(
            [sys.executable, __file__, "serve", job_id], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    print(job_id)


def serve(job_id):
    """One job from the queue to its end."""
    deadline = time.monotonic() + _LONGEST_SECONDS
    while time.monotonic() < deadline and not read(job_id)["deleted"]:
        before = [read(other) for other in read(job_id)["after"]]
        if any(one["job_state"] == "F" and one["exit_code"] for one in before):
            change(job_id, deleted=True)
        elif all(one["job_state"] == "F" for one in before):
            with locked("machine"):
                change(job_id, rerun=False)
                code = run(job_id, deadline)
            if not read(job_id)["rerun"]:
                change(job_id, job_state="F", exit_code=code)
                return
            change(job_id, job_state="Q")
        time.sleep(_POLL_SECONDS)
    change(job_id, job_state="F", exit_code=1)


def run(job_id, deadline):
    """Runs the script once; returns its exit code."""
    if read(job_id)["deleted"]:
        return 1
    count = read(job_id)["run_count"] + 1
    node_file = _SPOOL / f"{job_id}.nodes"
    node_file.write_text("localhost\n")
    variables = {"PBS_JOBID": job_id, "PBS_NODEFILE": str(node_file), "PBS_RUN_COUNT": str(count)}
    child = subprocess.Popen(
        ["bash", str(_SPOOL / f"{job_id}.sh")], env={**os.environ, **variables}, start_new_session=True
    )
    change(job_id, job_state="R", run_count=count, exec_host="localhost", stime=time.time(), pid=child.pid)
    asked = None
    while child.poll() is None:
        if asked is None and (read(job_id)["deleted"] or time.monotonic() > deadline):
            asked = time.monotonic()
            child.send_signal(signal.SIGTERM)
        if asked is not None and time.monotonic() > asked + 20:
            child.kill()
        time.sleep(_POLL_SECONDS)
    return child.returncode


def qstat(_arguments):
    jobs = {path.name.removesuffix(".json"): json.loads(path.read_text()) for path in _SPOOL.glob("*.pbs.json")}
    print(json.dumps({"Jobs": jobs}))


def qdel(arguments):
    for job_id in arguments:
        if read(job_id)["job_state"] == "F":
            sys.exit(f"qdel: Job has finished {job_id}")
        change(job_id, deleted=True)


def qrerun(arguments):
    change(arguments[0], rerun=True)


def qsig(arguments):
    """``-s SIGNAL JOB``, as the scheduler's own warning comes."""
    os.kill(read(arguments[2])["pid"], signal.Signals[f"SIG{arguments[1]}"])


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:] if sys.argv[1] == "serve" else [sys.argv[2:]])
