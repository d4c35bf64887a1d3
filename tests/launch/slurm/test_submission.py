"""launcher=slurm on the command line: dry runs, profiles, and keys that cannot work; no cluster needed."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import time

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.compose.rules import check
from ortlaunch.config.load import load_config, save_config, to_config
from ortlaunch.config.schema import Device, SlurmConfig
from ortlaunch.launch.planning import make_plan, plan_in
from ortlaunch.launch.queue import history, node
from ortlaunch.launch.queue import launcher as queue_launcher
from ortlaunch.launch.queue.node import command_of, environment_of, torchrun_source
from ortlaunch.launch.slurm import programs
from ortlaunch.launch.slurm.launcher import SlurmLauncher
from ortlaunch.launch.slurm.plan import request_for, settled
from ortlaunch.launch.slurm.refusal import in_plain_words
from ortlaunch.launch.slurm.rules import slurm_seconds
from ortlaunch.launch.slurm.submit import submission_environment
from tests.support.cli import ortlaunch


def config(*overrides):
    return settled(to_config(compose(["launcher=slurm", *overrides])))


def test_a_dry_run_prints_the_script_and_writes_nothing(tmp_path):
    # No SLURM on this PATH.
    words = ("backend=eager", "launcher=slurm", "launcher.nodes=3", "launcher.dry_run=true")
    done = ortlaunch(tmp_path, *words, PATH="/usr/bin/nowhere")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=gpt2_nano-eager-ddp\n")
    assert "#SBATCH --nodes=3\n" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_job_of_a_run_that_chooses_its_backend_is_that_of_any_other(tmp_path):
    """The nodes choose: their packages and their speed count, not those of the machine that submits."""
    words = ("launcher=slurm", "launcher.nodes=2", "launcher.dry_run=true", "run_root=/r", "name=n")
    auto, eager = (ortlaunch(tmp_path, f"backend={one}", *words) for one in ("auto", "eager"))
    assert auto.returncode == 0, auto.stderr
    folders = re.compile(r"\d{8}-\d{6}-n-\w{6}")
    assert folders.sub("RUN", auto.stdout) == folders.sub("RUN", eager.stdout)
    assert "ortlaunch" in auto.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["launcher.nodes=2", "launcher.partition=debug", "launcher.time=30"],
            {
                "job": "gpt2_nano-eager-ddp",
                "nodes": "2, each with 2 workers on cpu",
                "time": "30 minutes",
                "partition": "debug",
                "run folder": "/runs/default/",
            },
        ),
        (
            ["launcher.gpus_per_node=1", "launcher.time=4:00:00"],
            {
                "nodes": "1, each with 1 worker on cuda",
                "time": "4:00:00",
                "partition": "the default (launcher.partition is not set)",
            },
        ),
        (
            ["optimizer.lr=0.1,0.2", "launcher.array_limit=1", "--multirun"],
            {
                "job": "sweep-optimizer.lr",
                "time": "the default (launcher.time is not set)",
                "runs": "2, 1 at once",
                "sweep": "/multirun-",
            },
        ),
    ],
)
def test_a_dry_run_says_below_the_script_what_it_asks_for(tmp_path, words, said):
    done = ortlaunch(tmp_path, "launcher=slurm", "backend=eager", "launcher.dry_run=true", *words)
    assert done.returncode == 0, done.stderr
    first, *lines = done.stderr.splitlines()
    assert first == "ortlaunch: a dry run: nothing was written or submitted"
    shown = {label: text.strip() for label, _, text in (line.partition(":") for line in lines)}
    assert shown.pop("to submit") == "the same command without launcher.dry_run=true"
    for label, text in said.items():
        assert text in shown[label]
    # The script alone can go into a file.
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=False).returncode == 0
    assert "dry run" not in done.stdout


def test_without_slurm_the_way_out_is_named(tmp_path):
    done = ortlaunch(tmp_path, "launcher=slurm", PATH="/usr/bin/nowhere")
    assert done.returncode == 2
    assert "there is no sbatch on the PATH" in done.stderr
    assert "launcher.dry_run=true" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_profile_gives_keys_and_the_command_line_has_the_last_word(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text(
        "partition: fast\naccount: physics\ngpus_per_node: 4\nenv: {NCCL_DEBUG: INFO}\n"
    )
    monkeypatch.setenv("ORTLAUNCH_SLURM_PROFILES", str(tmp_path))
    cfg = config("launcher/slurm_profile=mine", "launcher.partition=slow").launcher
    assert isinstance(cfg, SlurmConfig)
    assert (cfg.partition, cfg.account, cfg.gpus_per_node, cfg.env) == ("slow", "physics", 4, {"NCCL_DEBUG": "INFO"})


def test_a_profile_of_the_users_own_folder(tmp_path, monkeypatch):
    folder = tmp_path / "ortlaunch" / "slurm" / "profiles"
    folder.mkdir(parents=True)
    (folder / "example.yaml").write_text("partition: own\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert config("launcher/slurm_profile=example").launcher.partition == "own"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["launcher=slurm", "launcher/slurm_profile=nowhere"], "there are .*example.*none"),
        (["launcher/slurm_profile=lab"], "profiles belong to launcher=slurm"),
        (["launcher=slurm", "launcher/slurm_profile=misspelt"], "partion"),
        (["launcher=slurm", "launcher/slurm_profile=broken"], "broken.yaml cannot be read"),
    ],
)
def test_profiles_that_do_not_work(tmp_path, monkeypatch, overrides, words):
    (tmp_path / "misspelt.yaml").write_text("partion: gpu\n")
    (tmp_path / "broken.yaml").write_text("partition: [gpu\n")
    monkeypatch.setenv("ORTLAUNCH_SLURM_PROFILES", str(tmp_path))
    if "misspelt" not in overrides[-1]:
        (tmp_path / "misspelt.yaml").unlink()
    if "broken" not in overrides[-1]:
        (tmp_path / "broken.yaml").unlink()
    with pytest.raises(RequestError, match=words):
        compose(overrides)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["launcher.nodes=0"], r"launcher\.nodes=0: must be at least 1"),
        (["trainer=single", "launcher.nodes=2"], "trainer=single runs one worker"),
        (["device=cuda"], r"give launcher\.gpus_per_node=N"),
        (["launcher.gpus_per_node=2", "launcher.workers_per_node=4"], "more than launcher.gpus_per_node=2"),
        (["launcher.gpus_per_node=2", "launcher.gres='gpu:2'"], "give only one"),
        (["launcher.time=soon"], "must be as SLURM writes it"),
        (["launcher.memory=8GiB"], "must be as SLURM writes it: 200G"),
        (["launcher.memory=1.5G"], "must be as SLURM writes it: 200G"),
        (["launcher.memory=8X"], "must be as SLURM writes it: 200G"),
        (["launcher.memory=8"], "a number without a unit is in MiB"),
        (["launcher.memory=8M"], "more than 200 MiB in each worker"),
        (["launcher.time=3"], "last launcher.grace_seconds=120"),
        (['launcher.extra=["--array=1-3"]'], "--array would be in ortlaunch's way"),
        (['launcher.extra=["-N4"]'], "--nodes would be in ortlaunch's way: set launcher.nodes"),
        (['launcher.srun_extra=["-o x.log"]'], "--output would be in ortlaunch's way"),
        (['launcher.extra=["--outp=/x"]'], "--outp would be in ortlaunch's way"),
        (['launcher.extra=["--wra echo"]'], "--wra would be in ortlaunch's way"),
        (['launcher.srun_extra=["--err=/x"]'], "--err would be in ortlaunch's way"),
        (['launcher.extra=["--comment=x --output=/tmp/y"]'], "--output would be in ortlaunch's way"),
        (['launcher.extra=["--comment x -o/tmp/y"]'], "--output would be in ortlaunch's way"),
        (['launcher.extra=["--hold --test"]'], "--test would be in ortlaunch's way"),
        (['launcher.extra=["-Ho/tmp/y"]'], "give each option by itself and by its long name"),
        (['launcher.extra=["-A physics"]'], "give each option by itself and by its long name"),
        (['launcher.extra=["-vW"]'], "give each option by itself and by its long name"),
        (['launcher.extra=["--nice=1 /bin/sh"]'], "'/bin/sh' is no option"),
        (['launcher.extra=["--comment=\\"x"]'], "No closing quotation"),
        (['launcher.extra=["--nice=1\n#SBATCH --output=/x"]'], "is no option on one line"),
        (["launcher.time='1:00:00\n#SBATCH --output=/tmp/y'"], r"launcher\.time=.*one line"),
        (["launcher.time='1:00:00\n'"], r"launcher\.time=.*one line"),
        (["launcher.time='1:00:00\u2028'"], r"launcher\.time=.*one line"),
        (["launcher.gpu_type='a100\nx'"], r"launcher\.gpu_type=.*one line"),
        (["device=cuda", "launcher.gres='gpupower:1'"], r"give launcher\.gpus_per_node=N"),
        (["launcher.gres='gpu:2'"], r"give launcher\.workers_per_node=N"),
        (['launcher.extra=["nice"]'], "no option on one line"),
        (["+launcher.env.HF_TOKEN=x"], r"launcher\.env\.HF_TOKEN: .* export HF_TOKEN in the shell"),
        (["+launcher.env.A-B=1"], r"launcher\.env\.A-B: not the name of a variable"),
        (["launcher.partition=''"], "must be one line and not empty"),
        (["launcher.preflight_seconds=0"], "must be at least 1"),
        (["backend=auto", "launcher.container.image=x"], r"backend=auto does not go with launcher\.container\.image"),
    ],
)
def test_keys_that_cannot_work(overrides, words):
    with pytest.raises(RequestError, match=words):
        check(config(*overrides))


def test_one_worker_needs_no_number_of_workers():
    check(config("trainer=single", "launcher.gres='gpu:1'"))


@pytest.mark.parametrize("text", ["time: 24:00:00", "env:\n  LIMIT: 12:30", "extra: [4:00:00]"])
def test_a_time_that_yaml_takes_for_a_number_is_refused(tmp_path, monkeypatch, text):
    """Otherwise SLURM would be asked for 86400 minutes."""
    (tmp_path / "mine.yaml").write_text(f"# Mine.\n{text}\n")
    monkeypatch.setenv("ORTLAUNCH_SLURM_PROFILES", str(tmp_path))
    compose(["launcher=slurm"])
    time = text.split()[-1].strip("[]")
    with pytest.raises(RequestError, match=rf'mine\.yaml, line {1 + len(text.splitlines())}: YAML .*: write "{time}"'):
        compose(["launcher=slurm", "launcher/slurm_profile=mine"])
    (tmp_path / "mine.yaml").write_text('time: "24:00:00"\nnodes: 2\n')
    assert config("launcher/slurm_profile=mine").launcher.time == "24:00:00"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("1:00:00", 3600),
        ("2-0", 172800),
        ("1-2:30", 95400),
        ("1-0:0:5", 86405),
        ("x", None),
    ],
)
def test_time_limits(text, seconds):
    assert slurm_seconds(text) == seconds


def test_the_device_is_what_the_job_asks_for():
    assert config().device is Device.cpu
    assert config("launcher.gpus_per_node=4").device is Device.cuda
    assert config("launcher.gres='gpu:a100:4'").device is Device.cuda
    assert config("launcher.gpus_per_node=4", "device=cpu").device is Device.cpu


def test_workers_are_those_of_all_nodes():
    assert make_plan(config("launcher.nodes=4", "launcher.gpus_per_node=8")).world_size == 32
    assert make_plan(config("launcher.nodes=4")).world_size == 8
    assert make_plan(config("launcher.nodes=1", "trainer=single")).world_size == 1


def test_a_stored_configuration_is_read_back(tmp_path):
    made = config("launcher/slurm_profile=example", "launcher.container.image=x")
    save_config(made, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == made


def test_torchrun_on_each_node(monkeypatch):
    made = make_plan(config("launcher.nodes=3", "launcher.workers_per_node=2"))
    job = {"SLURM_NODEID": "0", "SLURM_JOB_ID": "7", "ORTLAUNCH_ATTEMPT": "1", "SLURM_RESTART_COUNT": "2"}
    job |= {"ORTLAUNCH_HEAD": "n1", "ORTLAUNCH_PORT": "15007", "SLURMD_NODENAME": "localhost"}

    def torchrun(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return command_of(made, SlurmLauncher().place(made.config))

    words = torchrun(job)
    expected = {"--nnodes=3", "--nproc-per-node=2", "--rdzv-endpoint=n1:15007", "--rdzv-id=7-2-1", "--max-restarts=0"}
    assert expected | {"--rdzv-conf=is_host=true", "--local-addr=localhost"} <= set(words)
    assert "--rdzv-conf=is_host=false" in torchrun(job | {"SLURM_NODEID": "1"})


def test_a_full_disk_at_the_submission_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    def full(plan, *_):
        plan.files.config_file.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(plan.files.config_file))

    monkeypatch.setattr(queue_launcher, "write_run_folder", full)
    made = config(f"run_root={tmp_path}")
    plan = make_plan(made)
    with pytest.raises(RequestError, match="cannot be written: No space left on device"):
        SlurmLauncher().prepare(plan)
    assert not plan.run_dir.exists()


@pytest.mark.parametrize(
    ("stored", "given", "has_begun", "expected"),
    [
        ("afterok:120", "afterok:120", True, None),
        ("singleton,afterok:120:121_3", "singleton,afterok:120:121_3", True, "singleton"),
        ("afterok:120", "afterok:130", True, "afterok:130"),
        ("afterok:120", "afterok:120", False, "afterok:120"),
        (None, None, True, None),
    ],
    ids=["met", "partly of jobs", "given anew", "cancelled in the queue", "none"],
)
def test_a_resumed_run_waits_for_no_job_that_it_has_waited_for(tmp_path, stored, given, has_begun, expected):
    """SLURM forgets jobs after minutes, and refuses a job that waits for an unknown one."""

    def waiting_for(jobs):
        return config(*([f"launcher.dependency='{jobs}'"] if jobs is not None else []))

    save_config(waiting_for(stored), tmp_path / "config.yaml")
    past = history.History()
    past.begin("7", 0, "n1")
    history.save(tmp_path, past)
    # An attempt from before its submission is that of an earlier job.
    job = {"scheduler": "slurm", "job_id": "7", "submitted": time.time() + (-60.0 if has_begun else 60.0)}
    (tmp_path / "job.json").write_text(json.dumps(job))
    assert SlurmLauncher().resumed(waiting_for(given), tmp_path).launcher.dependency == expected


@pytest.mark.parametrize(("job_id", "restarts"), [("7", "1"), ("8", "0")], ids=["queued again", "resumed"])
def test_the_workers_know_how_often_their_own_job_has_started_them(tmp_path, monkeypatch, job_id, restarts):
    """Of all jobs of the run it is the second attempt: only that of a new job follows train.resume=PATH."""
    past = history.History()
    for job in ("7", job_id):
        past.begin(job, 0, "n1")
    history.save(tmp_path, past)
    job = {"SLURM_NODEID": "0", "SLURM_JOB_ID": job_id, "ORTLAUNCH_ATTEMPT": "1", "SLURM_JOB_NODELIST": "n1"}
    for name, value in (job | {"ORTLAUNCH_HEAD": "n1", "ORTLAUNCH_PORT": "15007"}).items():
        monkeypatch.setenv(name, value)
    started = []
    monkeypatch.setattr(node, "_LEFT_TO_WORKERS", ())
    monkeypatch.setattr(node.output, "append_to", lambda *_: None)
    monkeypatch.setattr(node.os, "execvpe", lambda *words: started.append(words[2]))
    node.train(SlurmLauncher(), plan_in(config(), tmp_path, "aaaaaa", "n"))
    (environment,) = started
    assert (environment["ORTLAUNCH_ATTEMPT"], environment["ORTLAUNCH_RESTARTS"]) == ("1", restarts)
    assert float(environment["ORTLAUNCH_STARTED"]) > 0


def test_torchruns_options_are_those_of_its_own_help():
    help_text = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--help"], capture_output=True, text=True, timeout=120
    ).stdout
    for option in ("--signals-to-handle", "--shutdown-timeout"):
        assert (option in torchrun_source()) == (option in help_text)


def test_the_loopback_card_is_named_on_one_machine_only():
    assert environment_of(SlurmLauncher(), make_plan(config("launcher.nodes=1")))["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in environment_of(SlurmLauncher(), make_plan(config("launcher.nodes=2")))
    own = make_plan(config("launcher.nodes=1", "+launcher.env.GLOO_SOCKET_IFNAME=ib0"))
    assert environment_of(SlurmLauncher(), own)["GLOO_SOCKET_IFNAME"] == "ib0"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            "sbatch: error: invalid partition specified: x\nallocation failure: Invalid partition name specified",
            "launcher.partition=p",
        ),
        ("allocation failure: Invalid account or account/partition combination specified", "launcher.account=a"),
        ("allocation failure: Invalid qos specification", "launcher.qos=q"),
        ("allocation failure: Requested node configuration is not available", "launcher.nodes=2"),
        ("allocation failure: Invalid feature specification", "launcher.constraint"),
        ("sbatch: error: Invalid generic resource (gres) specification", "launcher.gpu_request=gres"),
        ("allocation failure: Job dependency problem", "launcher.dependency"),
        ("allocation failure: Requested reservation is invalid", "launcher.reservation"),
        ("allocation failure: Requested time limit is invalid (missing or exceeds some limit)", "launcher.time"),
        (
            "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
            "does not answer",
        ),
        ("sbatch: fatal: Could not establish a configuration source", "submit from a login node"),
        ("sbatch: error: something new", "SLURM does not take the job: something new"),
    ],
)
def test_refusals(said, words):
    made = config("launcher.nodes=2", "launcher.partition=p", "launcher.account=a", "launcher.qos=q")
    assert words in in_plain_words(said, made)


def test_the_shells_own_variables_do_not_change_the_job(monkeypatch):
    """sbatch takes its variables before the script's lines, and a shell inside a job has that job's."""
    shell = {"SLURM_JOB_ID": "1", "SLURM_MEM_PER_CPU": "1", "SLURM_CONF": "/c", "SBATCH_NO_REQUEUE": "1"}
    shell |= {"SBATCH_PARTITION": "slow", "SBATCH_ACCOUNT": "physics", "MINE": "x"}
    for name, value in shell.items():
        monkeypatch.setenv(name, value)
    given = submission_environment(config("launcher.partition=fast"))
    assert {name: given.get(name) for name in shell} == {
        "SLURM_JOB_ID": None,
        "SLURM_MEM_PER_CPU": None,
        "SLURM_CONF": "/c",
        "SBATCH_NO_REQUEUE": None,
        "SBATCH_PARTITION": None,
        # A default that no key replaces.
        "SBATCH_ACCOUNT": "physics",
        "MINE": "x",
    }


def test_a_password_travels_in_the_environment_alone():
    made = config("tracking.uri=https://ada:secret@example.org")
    assert submission_environment(made)["ORTLAUNCH_TRACKING_URI"] == "https://ada:secret@example.org"
    assert "ORTLAUNCH_TRACKING_URI" not in submission_environment(config())
    assert "secret" not in request_for(make_plan(made)).script()


@pytest.mark.ort
def test_the_check_looks_on_this_machine(tmp_path):
    """What it asks for of the nodes does not matter there; what this machine lacks is one line."""
    words = ("launcher=slurm", "launcher.gpus_per_node=4", "device=cuda", "model=mlp")
    done = ortlaunch(tmp_path, "check", *words, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    first, last = done.stderr.splitlines()
    assert first == "ortlaunch: launcher=slurm: the check looks on this machine, not on the nodes"
    assert "device=cuda and this machine shows no GPU" in last


def test_a_sweep_has_one_launcher(tmp_path):
    done = ortlaunch(tmp_path, "launcher=slurm,local", "launcher.dry_run=true", "--multirun")
    assert done.returncode == 2
    assert "launcher=slurm,local: a sweep has one launcher" in done.stderr


def test_a_submission_without_an_answer_may_be_one_all_the_same(tmp_path, monkeypatch):
    """Else a user submits again, and two jobs train the same."""
    silent = programs.Answer(problem="sbatch gave no answer within 120 s")
    monkeypatch.setattr(programs, "is_here", lambda program: True)
    monkeypatch.setattr(programs, "call", lambda *_, **__: silent)
    with pytest.raises(RequestError, match=r"no answer within 120 s: .* may have taken the job .*squeue --me"):
        SlurmLauncher().enqueue(tmp_path / "sbatch.sh", config())
    with pytest.raises(RequestError, match=r"does not work properly$"):
        SlurmLauncher().ask("#!/bin/bash", config())
