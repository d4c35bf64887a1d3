"""A SLURM job as a typed request, and the batch script made from it.

The script depends only on the request, so ``launcher.dry_run=true`` shows exactly what is submitted. Its size does not
depend on the number of nodes.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from ortlaunch.config.paths import slurm_template
from ortlaunch.config.schema import ContainerConfig, ContainerRuntime, GpuRequest, SlurmConfig, key_facts
from ortlaunch.launch.slurm.options import parse
from ortlaunch.run.run import Run

WARNING_SIGNAL = "USR2"
"""Signal that SLURM sends to the batch shell before it ends the job. USR1 is not free, because NCCL uses it."""

_PATIENCE = 0.8
"""Share of the grace period after which the job is queued again, even if the checkpoint is not complete."""

_PREFLIGHT = '    roll_call\n    [ "$code" = 0 ] || signals+=" UNFIT"'

_PLACEHOLDER = re.compile(r"@([A-Z_]+)@")
_PLAIN = re.compile(r"[\w./:=,+%@^-]+", re.ASCII)


@dataclass(frozen=True)
class JobRequest:
    """Everything that the script of a job depends on."""

    name: str
    run_dir: Path
    """The run folder; for a sweep its folder, where ``tasks/N`` names the run folder of task N."""
    working_dir: Path
    """The folder where Python finds the user's own modules."""
    python: str
    """The interpreter on the nodes, outside of any container."""
    resources: SlurmConfig
    gpu_request: GpuRequest
    """How this cluster takes requests for GPUs; not `auto`."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables for the whole job, by name."""
    tasks: int | None = None
    """Number of runs of a sweep; None for one run."""

    def script(self) -> str:
        """Returns the script for sbatch."""
        cfg = self.resources
        values = {
            "DIRECTIVES": "\n".join(f"#SBATCH {line}" for line in self._directives()),
            "RUN_DIR": self._run_dir(),
            "WORKING_DIR": shlex.quote(str(self.working_dir)),
            "ENVIRONMENT": "\n".join(_export(name, value) for name, value in self.environment.items()),
            # Modules and activation scripts read variables that nobody has set, which would end the script.
            "SETUP": "\n".join(["set +u", *cfg.setup, "set -u"] if cfg.setup else []),
            "PYTHON": shlex.quote(self.python),
            "SRUN": self._srun(),
            "NODE": self._node(),
            "PATIENCE": str(int(cfg.grace_seconds * _PATIENCE)),
            "SIGNAL": WARNING_SIGNAL,
            "PREFLIGHT": _PREFLIGHT if cfg.preflight else "",
            "ROLL_CALL_SECONDS": str(cfg.preflight_seconds),
            # srun waits this long for the other nodes after the first has ended, because one may take longer to write.
            "WAIT": str(cfg.timeout_seconds),
        }
        text = _PLACEHOLDER.sub(lambda found: values[found[1]], slurm_template().read_text(encoding="utf-8"))
        # Placeholders without a value leave empty lines.
        return re.sub(r"\n{3,}", "\n\n", text)

    def _directives(self) -> list[str]:
        cfg = self.resources
        options: dict[str, str | int | bool | None] = {
            "--job-name": _one_line(self.name),
            "--output": self._output(),
            "--open-mode": "append",
            "--nodes": cfg.nodes,
            "--ntasks-per-node": 1,
            **{facts.sbatch: getattr(cfg, key) for key, facts in key_facts(cfg).items() if facts.sbatch},
            **self._gpus(),
            "--signal": f"B:{WARNING_SIGNAL}@{cfg.grace_seconds}",
            "--requeue": True,
            # Without this, a job waits for ever if a job that it depends on has failed.
            "--kill-on-invalid-dep": "yes" if cfg.dependency is not None else None,
        }
        if self.tasks is not None:
            limit = f"%{cfg.array_limit}" if cfg.array_limit else ""
            options["--array"] = f"0-{self.tasks - 1}{limit}"
        # They come last: what they say of an option is what sbatch takes.
        extra = [option for text in cfg.extra for option in parse("extra", text)]
        own = [line for name, value in options.items() for line in _directive(name, value)]
        return [*own, *(line for name, value in extra for line in _directive(name, True if value is None else value))]

    def _gpus(self) -> dict[str, str | None]:
        """Returns the options for GPUs and other resources, in the form that this cluster takes."""
        cfg = self.resources
        kind = f"{cfg.gpu_type}:" if cfg.gpu_type else ""
        gpus = f"{kind}{cfg.gpus_per_node}" if cfg.gpus_per_node else None
        if self.gpu_request is GpuRequest.gres:
            both = [part for part in (f"gpu:{gpus}" if gpus else None, cfg.gres) if part]
            return {"--gpus-per-node": None, "--gres": ",".join(both) or None}
        return {"--gpus-per-node": gpus, "--gres": cfg.gres}

    def _run_dir(self) -> str:
        if self.tasks is None:
            return shlex.quote(str(self.run_dir))
        return f'$(cat {shlex.quote(str(self.run_dir / "tasks"))}/"$SLURM_ARRAY_TASK_ID")'

    def _output(self) -> str:
        """Returns the file for the script's first output. All later output goes to the run folder."""
        path = str(Run(self.run_dir).scheduler_log("slurm") if self.tasks is None else self.run_dir / "slurm-%a.log")
        # SLURM cannot express these characters in a file pattern.
        return "/dev/null" if re.search(r"[\n\r\\]|%(?!a\.log$)", path) else path

    def _srun(self) -> str:
        cfg = self.resources
        # srun takes none of these from the job. Without --cpus-per-task, each task would have a single core.
        words = [f"--nodes={cfg.nodes}", f"--ntasks={cfg.nodes}", "--ntasks-per-node=1"]
        words += [f"--cpus-per-task={cfg.cpus_per_node}"] if cfg.cpus_per_node else []
        words += ["--cpu-bind=none", "--mpi=none", "--export=ALL"]
        if cfg.container.image is not None and cfg.container.runtime is ContainerRuntime.pyxis:
            words += [f"--container-image={cfg.container.image}", f"--container-workdir={self.working_dir}"]
            words.append(f"--container-mounts={','.join(self._mounts(cfg.container))}")
        extra = [option for text in cfg.srun_extra for option in parse("srun_extra", text)]
        return shlex.join([*words, *(name if value is None else f"{name}={value}" for name, value in extra)])

    def _node(self) -> str:
        container = self.resources.container
        module = ["-P", "-m", "ortlaunch.launch.slurm.node"]
        if container.image is None:
            return shlex.join([self.python, *module])
        if container.runtime is ContainerRuntime.pyxis:
            return shlex.join([container.python, *module])
        binds = ["--bind", ",".join(self._mounts(container)), "--pwd", str(self.working_dir)]
        nv = ["--nv"] if self.resources.gpus_per_node else []
        return shlex.join(["apptainer", "exec", *nv, *binds, container.image, container.python, *module])

    def _mounts(self, container: ContainerConfig) -> list[str]:
        # The runs of a sweep are not in its folder, but beside it in that of their experiment.
        runs = self.run_dir if self.tasks is None else self.run_dir.parent
        folders = dict.fromkeys(str(folder) for folder in (self.working_dir, runs))
        return [*(f"{folder}:{folder}" for folder in folders), *container.mounts]


def _export(name: str, value: str) -> str:
    return f"export {name}={shlex.quote(value)}"


def _directive(option: str, value: str | int | bool | None) -> list[str]:
    """Returns the directive of an option; none if the option is not set."""
    if value is None or value is False:
        return []
    return [option if value is True else f"{option}={_directive_value(str(value))}"]


def _directive_value(value: str) -> str:
    """Returns a value as sbatch reads it in an ``#SBATCH`` line: in double quotes, with inner ones escaped."""
    if _PLAIN.fullmatch(value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _one_line(text: str) -> str:
    """Returns a text on one line, because a directive ends with its line."""
    return re.sub(r"[\x00-\x1f\x7f]+", " ", text)
