#!/usr/bin/env python3
"""A SLURM cluster of two nodes on this machine, for tests: its daemons, files and ports in one folder, loopback only.

    lab.py up DIR [--accounting] [--base-port N] [--nodes N] [--gpus N]
    lab.py down DIR          ends what `up` started, and nothing else
    lab.py cut DIR NODE      a power cut: the node and everything on it is gone at once
    lab.py boot DIR NODE     switches it on again

Needs root (a node is a set of namespaces of its own) and Debian's packages: see README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import getpass
import json
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from files import DATABASE_SQL, Lab, gres_conf, hosts, slurm_conf, slurmdbd_conf

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
ACCOUNTING_PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db")
_DAEMONS = ("munged", "slurmctld", "slurmdbd", "mariadbd")
_PATIENCE_SECONDS = 60.0


class LabError(Exception):
    """The cluster cannot be started; the message says why."""


def missing(*, accounting: bool = False) -> str:
    """Why no cluster can be started here; empty if one can."""
    if os.geteuid() != 0:
        return "only root can start the test cluster"
    programs = PROGRAMS + (ACCOUNTING_PROGRAMS if accounting else ())
    absent = [name for name in programs if shutil.which(name) is None]
    return f"not installed: {', '.join(absent)} (slurm/lab/README.md)" if absent else ""


def up(lab: Lab) -> None:
    """Starts the cluster and waits until its nodes are idle; of one that does not start nothing goes on running.

    Raises:
        LabError: something is not installed or does not start, or a cluster runs in the folder already.
    """
    if why := missing(accounting=lab.accounting):
        raise LabError(why)
    # Before anything is written: a new key would lock out the cluster that runs.
    if running := [name for name in (*_DAEMONS, *lab.names) if _is_alive(lab, name)]:
        raise LabError(f"{lab.folder} holds a cluster that runs ({', '.join(running)}): lab.py down {lab.folder}")
    try:
        _bring_up(lab)
    except LabError:
        down(lab)
        raise


def _bring_up(lab: Lab) -> None:
    _write_files(lab)
    _start(lab, "munged", ["munged", "--foreground", *_munge_options(lab)])
    _wait_for(lab, lambda: lab.socket.is_socket(), "munged")
    if lab.accounting:
        _start_accounting(lab)
    # In the foreground, so that the number that we keep is the daemon's.
    _start(lab, "slurmctld", ["slurmctld", "-D", "-f", str(lab.conf)])
    _wait_for(lab, lambda: _answers(lab.base_port), "slurmctld")
    for node in lab.names:
        boot(lab, node)
    _wait_for(lab, lambda: _idle_nodes(lab) == lab.nodes, "node1")


def boot(lab: Lab, node: str) -> None:
    """Starts one node: its own host name, file system view and process numbers."""
    (lab.folder / "spool" / node).mkdir(parents=True, exist_ok=True)
    # The shell stays as the namespace's first process: it reaps what SLURM's own processes leave.
    inside = (
        f"hostname {node}; mount --bind {shlex.quote(str(lab.folder / 'etc' / 'hosts'))} /etc/hosts; "
        f"slurmd -D -N {node} -f {shlex.quote(str(lab.conf))}; :"
    )
    namespaces = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
    _start(lab, node, [*namespaces, "bash", "-c", inside])


def cut(lab: Lab, node: str) -> None:
    """Ends a node as a power cut would."""
    _stop(lab, node, signal.SIGKILL)


def down(lab: Lab) -> None:
    """Ends every process that `up` and `boot` started for this folder; the files stay for a look."""
    # The controller first, so that it does not see its nodes go.
    _stop(lab, "slurmctld", signal.SIGTERM)
    for node in lab.names:
        _stop(lab, node, signal.SIGKILL)
    for name in ("slurmdbd", "mariadbd", "munged"):
        _stop(lab, name, signal.SIGTERM)


def load(folder: Path) -> Lab:
    """The cluster that was started in a folder.

    Raises:
        LabError: none was.
    """
    try:
        stored = json.loads((folder / "lab.json").read_text())
    except OSError as error:
        raise LabError(f"{folder} holds no test cluster") from error
    return Lab(**stored | {"folder": folder})


def _write_files(lab: Lab) -> None:
    for name in ("etc", "munge", "state", "spool", "log", "run", "dev", "database"):
        (lab.folder / name).mkdir(parents=True, exist_ok=True)
    # munged insists on it.
    (lab.folder / "munge").chmod(0o711)
    stored = dataclasses.asdict(lab) | {"folder": str(lab.folder)}
    (lab.folder / "lab.json").write_text(json.dumps(stored) + "\n")
    etc = lab.folder / "etc"
    _write_secret(etc / "munge.key", os.urandom(1024))
    lab.conf.write_text(slurm_conf(lab))
    (etc / "gres.conf").write_text(gres_conf(lab))
    (etc / "hosts").write_text(hosts(lab, socket.gethostname()))
    if lab.accounting:
        _write_secret(etc / "slurmdbd.conf", slurmdbd_conf(lab).encode())
        (etc / "database.sql").write_text(DATABASE_SQL)
    for number in range(lab.gpus):
        device = lab.folder / "dev" / f"nvidia{number}"
        if not device.exists():
            # What /dev/null is: SLURM wants a character device, and hands it out like a GPU.
            os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))


def _write_secret(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)


def _munge_options(lab: Lab) -> list[str]:
    folder = lab.folder
    return [
        f"--key-file={folder}/etc/munge.key",
        f"--socket={lab.socket}",
        f"--pid-file={folder}/run/munged.pid",
        f"--log-file={folder}/log/munged.log",
        f"--seed-file={folder}/munge/seed",
    ]


def _start_accounting(lab: Lab) -> None:
    data = lab.folder / "database" / "data"
    if not data.is_dir():
        _run(
            lab,
            [
                *("mariadb-install-db", "--no-defaults", f"--user={lab.user}", "--basedir=/usr", f"--datadir={data}"),
                *("--auth-root-authentication-method=normal", "--skip-test-db"),
            ],
        )
    database = ["mariadbd", "--no-defaults", f"--user={lab.user}", f"--datadir={data}"]
    database += [f"--socket={lab.folder}/database/socket", "--bind-address=127.0.0.1", f"--port={lab.database_port}"]
    database += [f"--init-file={lab.folder}/etc/database.sql", f"--log-error={lab.folder}/log/mariadbd.log"]
    database += ["--innodb-buffer-pool-size=128M", "--innodb-flush-log-at-trx-commit=0"]
    _start(lab, "mariadbd", database)
    _wait_for(lab, lambda: _answers(lab.database_port), "mariadbd")
    _start(lab, "slurmdbd", ["slurmdbd", "-D"])
    _wait_for(lab, lambda: _answers(lab.accounting_port), "slurmdbd")
    # Before slurmctld starts: it ends at once if the database does not know the cluster.
    if not _output(lab, ["sacctmgr", "--noheader", "--parsable2", "show", "cluster", "lab"]).strip():
        _run(lab, ["sacctmgr", "--quiet", "--immediate", "add", "cluster", "lab"])


def _idle_nodes(lab: Lab) -> int:
    count = _output(lab, ["sinfo", "--noheader", "--partition=debug", "--states=idle", "--format=%D"]).strip()
    return int(count) if count.isdigit() else 0


def _environment(lab: Lab) -> dict[str, str]:
    return {**os.environ, "SLURM_CONF": str(lab.conf)}


def _start(lab: Lab, name: str, command: list[str]) -> None:
    if _is_alive(lab, name):
        raise LabError(f"{name} is already running in {lab.folder}")
    with open(lab.folder / "log" / f"{name}.out", "ab") as log:
        process = subprocess.Popen(
            command,
            env=_environment(lab),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    identity = {"pid": process.pid, "start_ticks": _start_ticks(process.pid)}
    _identity_file(lab, name).write_text(json.dumps(identity) + "\n")


def _stop(lab: Lab, name: str, number: signal.Signals) -> None:
    if _is_alive(lab, name):
        pid = json.loads(_identity_file(lab, name).read_text())["pid"]
        os.kill(pid, number)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while _is_alive(lab, name):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
    _identity_file(lab, name).unlink(missing_ok=True)


def _identity_file(lab: Lab, name: str) -> Path:
    return lab.folder / "run" / f"{name}.json"


def _is_alive(lab: Lab, name: str) -> bool:
    """Whether the very process that we started still runs: its number may have gone to another one."""
    try:
        identity = json.loads(_identity_file(lab, name).read_text())
    except OSError:
        return False
    return _start_ticks(identity["pid"]) == identity["start_ticks"] is not None


def _start_ticks(pid: int) -> int | None:
    try:
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # One that is dead and waits for its parent to notice is gone.
    return None if values[0] in ("Z", "X") else int(values[19])


def _run(lab: Lab, command: list[str]) -> None:
    done = subprocess.run(command, env=_environment(lab), capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise LabError(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def _output(lab: Lab, command: list[str]) -> str:
    return subprocess.run(
        command, env=_environment(lab), capture_output=True, text=True, timeout=30, check=False
    ).stdout


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait_for(lab: Lab, ready: Callable[[], bool], name: str) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not ready():
        if time.monotonic() > deadline:
            out = lab.folder / "log" / f"{name}.out"
            said = out.read_text(errors="replace").strip()[-500:] if out.is_file() else ""
            raise LabError(f"{name}: not ready after {_PATIENCE_SECONDS:g} s; see {lab.folder}/log\n{said}")
        time.sleep(0.02)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("up", "down", "cut", "boot"):
        options = verbs.add_parser(verb)
        options.add_argument("folder", type=Path)
        if verb in ("cut", "boot"):
            options.add_argument("node")
        if verb == "up":
            options.add_argument("--base-port", type=int, default=Lab.base_port)
            options.add_argument("--nodes", type=int, default=Lab.nodes)
            options.add_argument("--cpus", type=int, default=Lab.cpus)
            options.add_argument("--gpus", type=int, default=Lab.gpus)
            options.add_argument("--accounting", action="store_true", help="with slurmdbd and MariaDB, for sacct")
    return parser


def main() -> int:
    """Runs the command line; returns the exit code."""
    options = vars(_parser().parse_args())
    verb, folder = options.pop("verb"), options.pop("folder").absolute()
    try:
        if verb == "up":
            lab = Lab(folder, user=getpass.getuser(), **options)
            up(lab)
            print(f"export SLURM_CONF={lab.conf}")
        elif verb == "down":
            down(load(folder))
        else:
            {"cut": cut, "boot": boot}[verb](load(folder), options["node"])
    except LabError as error:
        print(f"lab.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
