"""The script of a job, letter by letter, and what bash and sbatch make of nasty names in it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ortlaunch.config.schema import ContainerConfig, ContainerRuntime, GpuRequest, SlurmConfig
from ortlaunch.launch.slurm.request import JobRequest
from tests.support.needs import needs

GOLDEN = Path(__file__).parent / "golden"
NASTY = "a b'c\"d$(touch pwned)`e`\n# $HOME ü%j\\n;*"

PLAIN = JobRequest(
    name="gpt2-ort-ddp",
    run_dir=Path("/data/runs/default/20260101-120000-gpt2-ort-ddp-abc123"),
    working_dir=Path("/home/ada/project"),
    python="/home/ada/venv/bin/python",
    resources=SlurmConfig(nodes=2, partition="gpu", gpus_per_node=4, time="1:00:00"),
    gpu_request=GpuRequest.gpus_per_node,
    environment={"PATH": "/home/ada/venv/bin:/usr/bin:/bin"},
)
EVERYTHING = replace(
    PLAIN,
    resources=SlurmConfig(
        nodes=16,
        partition="gpu,long",
        account="physics",
        qos="high",
        reservation="winter school",
        constraint="a100&nvlink",
        time="2-12",
        gpus_per_node=8,
        gpu_type="a100",
        gres="nvme:1",
        cpus_per_node=64,
        memory="0",
        exclusive=True,
        array_limit=4,
        dependency="afterok:1:2",
        mail_user="ada@example.org",
        mail_type="END,FAIL",
        extra=["--nice=100", "--comment='a # comment'"],
        srun_extra=["--network=sn_single"],
        setup=["module purge", "module load cuda/12.4  # the driver's"],
        grace_seconds=300,
        preflight_seconds=90,
    ),
    gpu_request=GpuRequest.gres,
)
NASTY_NAMES = replace(
    PLAIN,
    name=NASTY,
    run_dir=Path(f"/data/{NASTY}/run"),
    working_dir=Path(f"/home/{NASTY}"),
    python=f"/opt/{NASTY}/python",
    environment={"NASTY": NASTY, "EMPTY": ""},
)
BOX = ContainerConfig(image="nvcr.io#nvidia/pytorch:24.05", mounts=["/scratch:/scratch"])
REQUESTS = {
    "plain": PLAIN,
    "everything": EVERYTHING,
    "nasty": NASTY_NAMES,
    "sweep": replace(EVERYTHING, run_dir=Path("/data/my sweeps/one"), tasks=20),
    "pyxis": replace(PLAIN, resources=replace(PLAIN.resources, container=BOX, preflight=False)),
    "apptainer": replace(
        PLAIN,
        resources=replace(
            PLAIN.resources, container=replace(BOX, image="/images/a b.sif", runtime=ContainerRuntime.apptainer)
        ),
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_golden(name):
    """``UPDATE_GOLDEN=1`` writes the files anew; look at the difference before it is committed."""
    script = REQUESTS[name].script()
    file = GOLDEN / f"{name}.sh"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        file.write_text(script, encoding="utf-8")
    assert script == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", REQUESTS)
def test_bash_understands_it(name, tmp_path):
    script = tmp_path / "script.sh"
    script.write_text(REQUESTS[name].script())
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_placeholder_is_left():
    for request in REQUESTS.values():
        assert not re.search(r"@[A-Z_]+@", request.script().replace("@grace", ""))


def test_nasty_names_arrive_as_they_are(tmp_path):
    """The script up to its first command of SLURM's, run by a real bash in a real folder of that name."""
    run_dir, home = tmp_path / "runs" / NASTY.replace("/", "_") / "run", tmp_path / NASTY.replace("/", "_")
    (run_dir / "logs").mkdir(parents=True)
    home.mkdir()
    request = replace(NASTY_NAMES, run_dir=run_dir, working_dir=home, environment={"NASTY": NASTY, "EMPTY": ""})
    head = request.script().partition("hosts=$(")[0]
    report = 'printf "%s\\0" "$PWD" "$NASTY" "${EMPTY-unset}" "$run_dir" "$python" >"$REPORT"'
    script = tmp_path / "script.sh"
    script.write_text(head + report)
    variables = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1", "REPORT": str(tmp_path / "report")}
    subprocess.run(["bash", script], env={**os.environ, **variables}, check=True, cwd="/")
    assert (tmp_path / "report").read_text().split("\0")[:-1] == [
        str(home),
        NASTY,
        "",
        str(run_dir),
        f"/opt/{NASTY}/python",
    ]
    assert not list(tmp_path.rglob("pwned"))
    assert "--- job 1" in (run_dir / "logs" / "slurm.log").read_text()


def test_its_size_does_not_grow_with_the_nodes():
    sizes = {
        nodes: len(replace(PLAIN, resources=replace(PLAIN.resources, nodes=nodes)).script())
        for nodes in (2, 1000, 10000)
    }
    # The number itself, three times.
    assert sizes[10000] - sizes[2] == 3 * (len("10000") - len("2"))


def test_one_line_directives():
    """A line break in a directive would begin another line of the script."""
    directives = [line for line in NASTY_NAMES.script().splitlines() if line.startswith("#SBATCH")]
    assert len(directives) == len([line for line in PLAIN.script().splitlines() if line.startswith("#SBATCH")])
    assert "#SBATCH --output=/dev/null" in directives


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("--nice=100", ["--nice=100"]),
        ("--comment='x --output=/tmp/y'", ['--comment="x --output=/tmp/y"']),
        ('--comment "two words"', ['--comment="two words"']),
        ("--account physics --hold", ["--account=physics", "--hold"]),
        ("--exclusive=user", ["--exclusive=user"]),
        ("--mem 4G --no-kill", ["--mem=4G", "--no-kill"]),
        (r"--comment='a $(touch x) `y` \\ # z'", [r'--comment="a $(touch x) `y` \\\\ # z"']),
        ("--bulletin-of-a-plugin", ["--bulletin-of-a-plugin"]),
    ],
)
def test_further_options_are_written_one_on_a_line_and_quoted(text, lines):
    script = replace(PLAIN, resources=replace(PLAIN.resources, extra=[text], srun_extra=[text])).script()
    directives = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert directives[-len(lines) :] == lines
    (srun,) = [line for line in script.splitlines() if line.startswith("on_each_node=")]
    words = shlex.split(srun.removeprefix("on_each_node=(").removesuffix(")"))
    assert len(words) == len(shlex.split(re.search(r"on_each_node=\((.*)\)", PLAIN.script())[1])) + len(lines)


def test_sbatch_itself_reads_each_option_as_it_is_meant(tmp_path):
    """SLURM's own parser; it says what it has read before it looks for a controller, which is not there."""
    needs(shutil.which("sbatch"), "needs SLURM's sbatch")
    conf = tmp_path / "slurm.conf"
    lines = ["ClusterName=x", "SlurmctldHost=localhost", "SlurmctldPort=1", "AuthType=auth/none", "CredType=cred/none"]
    conf.write_text("\n".join([*lines, "MessageTimeout=1", "NodeName=n1", "PartitionName=p Nodes=ALL", ""]))
    comment = "x --output=/tmp/y # it's $(touch pwned)"
    extra = [f'--comment="{comment}"', "--nice=100 --account physics", "--mcs-label z --hold"]
    script = tmp_path / "script.sh"
    script.write_text(replace(PLAIN, name="a b", resources=replace(PLAIN.resources, extra=extra)).script())
    done = subprocess.run(
        ["sbatch", "-vv", "--test-only", script],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "SLURM_CONF": str(conf)},
    )
    defined = dict(re.findall(r"^sbatch: ([\w-]+) +: (.*)$", done.stderr, re.MULTILINE))
    assert defined["comment"] == comment
    assert (defined["nice"], defined["account"], defined["mcs-label"]) == ("100", "physics", "z")
    assert defined["job-name"] == "a b" and "hold" in defined
    assert defined["output"] == str(PLAIN.run_dir / "logs" / "slurm.log")


def test_the_head_node_is_the_first_of_a_thousand(tmp_path):
    needs(shutil.which("scontrol"), "needs SLURM's scontrol")
    part = PLAIN.script().partition("# The workers of all nodes meet")[2].partition("on_each_node")[0]
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=n[0001-1000]\nPartitionName=p Nodes=ALL\n")
    variables = {"SLURM_JOB_ID": "100123", "SLURM_JOB_NODELIST": "rack[07,3-5]n[0001-1000]", "SLURM_CONF": str(conf)}
    script = "# The workers of all nodes meet" + part + 'echo "$ORTLAUNCH_HEAD $ORTLAUNCH_PORT"'
    done = subprocess.run(
        ["bash", "-uc", f"fail() {{ exit 9; }}; {script}"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["rack07n0001", str(15000 + 100123 % 15000)], done.stderr


@pytest.mark.parametrize("answer", ["exit 1", "exit 0"])
def test_an_unreadable_node_list_ends_the_job(tmp_path, answer):
    """Each node would otherwise make a run of its own."""
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{answer}\n")
    (tmp_path / "scontrol").chmod(0o755)
    run_dir = tmp_path / "run"
    (run_dir / "logs").mkdir(parents=True)
    request = replace(PLAIN, run_dir=run_dir, working_dir=tmp_path, environment={})
    variables = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", request.script()], env={**os.environ, **variables}, timeout=200)
    assert done.returncode == 1
    assert "scontrol does not list the nodes of n[1-2]" in (run_dir / "logs" / "slurm.log").read_text()


def test_setup_may_read_variables_that_nobody_has_set(tmp_path):
    """As activation scripts of conda and /etc/bashrc do. The script itself goes on with `set -u`."""
    (tmp_path / "logs").mkdir()
    setup = ['echo "setup reads <$NOBODY_HAS_SET_THIS>"', "echo before: $-"]
    request = replace(PLAIN, run_dir=tmp_path, working_dir=tmp_path, environment={})
    request = replace(request, resources=replace(PLAIN.resources, setup=setup))
    script = request.script().replace("python=/home", 'echo "after: $-"\npython=/home')
    variables = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", script], env={**os.environ, **variables}, timeout=200, check=False)
    lines = (tmp_path / "logs" / "slurm.log").read_text().splitlines()
    assert "setup reads <>" in lines
    (before,) = (line for line in lines if line.startswith("before: "))
    (after,) = (line for line in lines if line.startswith("after: "))
    assert ("u" in before.partition(": ")[2], "u" in after.partition(": ")[2]) == (False, True)


def test_containers_see_the_folders():
    words = shlex.split(re.search(r"on_each_node=\((.*)\)", REQUESTS["pyxis"].script())[1])
    mounts = next(word for word in words if word.startswith("--container-mounts="))
    assert f"{PLAIN.run_dir}:{PLAIN.run_dir}" in mounts
    assert "/scratch:/scratch" in mounts


@pytest.mark.parametrize("runtime", ContainerRuntime)
def test_containers_of_a_sweep_see_the_folders_of_its_runs(runtime):
    """They are beside the sweep's folder, which may be far from the working folder: run_root=/scratch/runs."""
    box = replace(BOX, image="/images/a.sif", runtime=runtime)
    folder = Path("/data/runs/default/multirun-20260101-120000")
    script = replace(PLAIN, resources=replace(PLAIN.resources, container=box), run_dir=folder, tasks=2).script()
    assert "/data/runs/default:/data/runs/default," in script
