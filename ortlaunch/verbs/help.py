"""``ortlaunch --help``, made from the configuration tree without composing it."""

from __future__ import annotations

import textwrap

from ortlaunch.base import exit_codes
from ortlaunch.base.errors import RequestError
from ortlaunch.config.options import Options
from ortlaunch.config.paths import group_options, ready_jobs
from ortlaunch.config.schema import GROUPS
from ortlaunch.models.registry import available
from ortlaunch.tracking import trackers

_GROUPS = (
    *("model", "adapter", "data", "backend", "trainer", "optimizer", "scheduler"),
    *("launcher", "tracking", "profile"),
)

_TEMPLATE = """\
ortlaunch: distributed PyTorch training under ORTModule, DeepSpeed and DDP, recorded in MLflow

Usage:
  ortlaunch [run] [KEY=VALUE ...]     train what the composed configuration says
  ortlaunch [KEY=VALUE ...] -- SCRIPT [ARGUMENTS]   launch a Python script of your own, or -- -m MODULE, unchanged
  ortlaunch check [KEY=VALUE ...]     find out whether the model is fit for ONNX Runtime, before a run
  ortlaunch estimate [KEY=VALUE ...]  how much memory a run needs, and whether it fits, before a run
  ortlaunch tune [KEY=VALUE ...]      find the fastest configuration that fits, by trials (--minutes 10)
  ortlaunch jobs                      list runs: their state, step, throughput, loss, time left
  ortlaunch jobs --available          list the ready jobs, which ortlaunch +jobs=NAME runs
  ortlaunch status RUN                all about one run
  ortlaunch logs RUN [-f]             what its workers printed, over all attempts
  ortlaunch cancel RUN [--now]        end it, with a checkpoint unless --now is given
  ortlaunch resume RUN [KEY=VALUE ...]   continue a run that was stopped or has failed, in its folder
  ortlaunch export weights RUN [--best]   its weights as safetensors, in the model's own names
  ortlaunch export onnx|artifacts|inference [KEY=VALUE ...] out=DIR   ONNX: as it trains, to train on a device, to serve
  ortlaunch export verify DIR         compare a device's artifacts with PyTorch (ortlaunch export --help)
  ortlaunch compare [RUN ...]         put runs side by side; which ones and where to: --sweep SWEEP
                                      --tag KEY=VALUE  --metric NAME:max  --html FILE
  ortlaunch bench KEY=A,B ... [repeat=3]   run a grid on this machine, round by round, and compare it
  ortlaunch sync RUN ...              send to MLflow what an outage or a kill has left unsent
  ortlaunch models                    list the models
  ortlaunch doctor [--json] [--fix]   what this environment and machine have, what is missing, how to get it
  ortlaunch serve                     a page and an API for a team: submit, queue, follow, stop, compare
  ortlaunch --server URL VERB ...     jobs, status, logs, cancel, resume, compare and run, by a service
RUN is a run folder, its short id, its name, or a job id. Every command has a --help of its own.

Examples:
  ortlaunch +jobs=gpt2_zero2_ort
  ortlaunch model=gpt2 trainer=deepspeed
  ortlaunch model=gpt2 trainer=deepspeed launcher=slurm launcher/slurm_profile=mycluster launcher.nodes=2
  ortlaunch model=gpt2_nano backend=eager,ort trainer=ddp,deepspeed --multirun
  ortlaunch model=factory model.target=mypackage.nets:build data=text data.path='corpus/*.txt'
  ortlaunch model=gpt2 launcher=slurm optimizer.lr=1e-4,3e-4,1e-3 launcher.array_limit=2 --multirun
  ortlaunch model=gpt2 +after=1a2b3c
  ortlaunch -m script.params.lr=1e-4,3e-4 -- train.py --lr '{{lr}}'
  ortlaunch compare --baseline gpt2-eager-ddp --html comparison.html
  ortlaunch bench model=gpt2_nano backend=eager,compile,ort trainer=ddp,deepspeed

Config groups (GROUP=OPTION):
{groups}
Ready jobs (+jobs=NAME, and KEY=VALUE to change them):
{jobs}

Keys used most (all of them: ortlaunch --cfg job):
  train.steps  train.batch_size (per worker)  train.precision=fp32|bf16|fp16  train.log_every
  train.checkpoint_every  train.resume=auto|never|PATH  model.weights=FOLDER  launcher.max_restarts
  data.seq_len  optimizer.lr  trainer.zero_stage  backend.fallback=error|warn  backend.threads
  device=auto|cuda|cpu  launcher.workers_per_node  launcher.dry_run=true  experiment  name  seed
  tracking.uri=http://HOST:PORT  with launcher=slurm: launcher.nodes  launcher.partition  launcher.gpus_per_node

Options:
  -h, --help                this page            --version             the version
  -c, --cfg job             print the composed configuration and stop (--resolve resolves it)
  -m, --multirun            run every combination of comma-separated values: here one after the other, with
                            launcher=slurm as one array of jobs
      +after=RUN            start when that run has finished
  -cd, --config-dir DIR     add a folder of your own configuration files
  -sc, --shell-completion   install=bash|zsh|fish, for example: eval "$(ortlaunch -sc install=bash)"
  --hydra-help              Hydra's other options

Exit codes: 0 done, 1 the training failed, 2 the request is wrong, 130 interrupted (143 by SIGTERM)"""


MODELS_HELP = """\
usage: ortlaunch models [--available]

List the models that model=NAME takes, those of installed packages among them: name, inputs, and a line about each."""


def help_text() -> str:
    """Returns the page that ``--help`` prints."""
    groups = "\n".join(f"  {group:<10} {', '.join(_options(group))}" for group in _GROUPS)
    jobs = textwrap.fill(", ".join(ready_jobs()), 110, initial_indent="  ", subsequent_indent="  ")
    return _TEMPLATE.format(groups=groups, jobs=jobs)


def models(arguments: list[str]) -> int:
    """Runs `ortlaunch models`.

    Args:
        arguments: the command line after the verb.

    Raises:
        RequestError: it has an argument that the verb does not take.
    """
    if {"-h", "--help"} & set(arguments):
        print(MODELS_HELP)
        return exit_codes.DONE
    if arguments and arguments != ["--available"]:
        raise RequestError(f"ortlaunch models takes no {arguments[0]}")
    print(models_text())
    return exit_codes.DONE


def models_text() -> str:
    """Returns one line per model that ``model=NAME`` takes."""
    entries = available()
    width = max(len(name) for name in entries)
    return "\n".join(f"{name:<{width}}  {entry.inputs:<7} {entry.summary}" for name, entry in sorted(entries.items()))


def _options(group: str) -> list[str]:
    if group == "model":
        return sorted({*group_options(group), *available()})
    options = GROUPS[group]
    names = {*options, *(options.installed() if isinstance(options, Options) else ())}
    if group == "tracking":
        names |= set(trackers.names())
    return sorted(names)
