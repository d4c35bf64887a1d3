"""The typed shape of a run's configuration.

Each class is one node of the tree that Hydra composes; `register_schemas` puts them into Hydra's ConfigStore so
that a misspelt key or a value of the wrong type fails while composing. Workers load the same classes from the run
folder's ``config.yaml``. Data sources, optimizers and schedules are modules of their own (`ortlaunch.config.options`);
here is what all of a group have. Defaults live in these dataclasses; the YAML files under ``conf/`` only choose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from omegaconf import MISSING, DictConfig, OmegaConf

from ortlaunch.base.errors import RequestError
from ortlaunch.config.options import MODULE_GROUPS, TRAPS, Options
from ortlaunch.config.trainers import TRAINERS
from ortlaunch.config.trainers.base import TrainerConfig
from ortlaunch.run.roots import RUN_ROOT

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ortlaunch.data.source import Share, Source


class Device(Enum):
    """Where workers compute: `auto` takes CUDA where this machine shows a GPU and the CPU elsewhere."""

    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


class Precision(Enum):
    """Number format of forward and backward; the weights that the optimizer updates, and its state, are in fp32."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Fallback(Enum):
    """What happens when ONNX Runtime cannot run the model: stop the run, or go on in PyTorch and say so."""

    error = "error"
    warn = "warn"


class OrtZero3(Enum):
    """How ONNX Runtime's backward gets parameters that ZeRO 3 frees after the forward: see `OrtConfig.zero3`."""

    recompute = "recompute"
    hold = "hold"


if TYPE_CHECKING:

    class Allow(Enum):
        """Ways in which a model computes something else under ONNX Runtime, that stop a run unless they are allowed."""
else:
    # A member for each module of `ort/verify/traps/`.
    Allow = Enum("Allow", {name: name for name in TRAPS}, module=__name__)


class OrtLogLevel(Enum):
    """ORTModule's own log levels."""

    verbose = "verbose"
    info = "info"
    warning = "warning"
    error = "error"
    fatal = "fatal"


@dataclass
class TrainConfig:
    """The training loop."""

    steps: int = 100
    """Optimizer steps to run."""
    batch_size: int = 4
    """Samples per worker and micro-batch."""
    grad_accumulation: int = 1
    """Micro-batches per optimizer step; gradients are averaged over them."""
    precision: Precision = Precision.fp32
    clip_grad_norm: float | None = 1.0
    """Largest total gradient norm; larger ones are scaled down to it. null switches clipping off."""
    log_every: int = 10
    """Steps between two log steps. The first, the last and the `steady_after` step are always logged."""
    steady_after: int = 3
    """Steps not counted in the throughput summary: export, compilation and cold caches end within them."""
    eval_every: int | None = None
    """Steps between two evaluations on the held-out samples, the last step included; null evaluates never."""
    eval_samples: int = 256
    """Samples of an evaluation over all workers, at most; always the same ones."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward instead of keeping them: less memory, a slower step."""
    deterministic: bool = False
    """Only algorithms that give the same bits each time; two runs of one configuration are then equal."""
    tf32: bool = False
    """On CUDA, let fp32 matrix products round their factors to TF32: faster, about three decimal digits."""
    gc_every: int = 100
    """Steps between two of Python's garbage collections, which every worker then makes at the same time instead of
    at random; 0 leaves it to Python."""
    checkpoint_every: int | None = 1000
    """Steps between two checkpoints, with one of the last step; null writes one only when the run is asked to stop."""
    keep_checkpoints: int = 2
    """How many of the newest complete checkpoints stay in the run folder, beside the best one; at least 2."""
    checkpoint_async: bool = True
    """Train on while a checkpoint is written; false waits for it."""
    resume: str = "auto"
    """auto goes on from the newest complete checkpoint of the run folder, never begins anew, and a path goes on from
    that checkpoint, or from the newest one in that run folder."""
    save_weights: bool = True
    """Leave the trained weights in the run folder under weights/ at the end."""


@dataclass
class ModelConfig:
    """Which model to build; `params` go to its builder by name."""

    name: str = MISSING
    target: str | None = None
    """`package.module:callable` of a model class or function of your own (model=factory)."""
    imports: list[str] = field(default_factory=list)
    """Python modules to import before the registry is asked, for models registered by a decorator."""
    params: dict[str, Any] = field(default_factory=dict)
    """Arguments of the builder by name; an unknown one is refused with the nearest right one."""
    weights: str | None = None
    """Folder of safetensors files, or one file, with the weights to start from, by the model's own names."""


@dataclass
class DataConfig:
    """What every data source has."""

    name: str = MISSING
    workers: int = 0
    """Loader processes per worker; 0 reads in the worker itself."""
    eval_fraction: float = 0.02
    """Share of the samples that is held out for evaluation and never trained on, whether a run evaluates or not."""

    def check(self) -> None:
        """Checks what can be known before a run begins, without torch and without reading the data.

        Raises:
            RequestError: a key of this source has a value that cannot work.
        """

    def open(self, share: Share) -> Source:
        """Opens the source on a worker.

        Args:
            share: which part of the data this worker reads.

        Raises:
            RequestError: the data is not there, or is not what the keys say.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how it is opened")


@dataclass
class TokenDataConfig(DataConfig):
    """Sources that yield token sequences."""

    seq_len: int = 128
    """Tokens per sample."""


@dataclass
class BackendConfig:
    """What executes forward and backward."""

    name: str = MISSING


@dataclass
class EagerConfig(BackendConfig):
    """Plain PyTorch."""

    name: str = "eager"


@dataclass
class CompileConfig(BackendConfig):
    """torch.compile."""

    name: str = "compile"
    mode: str = "default"
    """torch.compile's mode: default, reduce-overhead or max-autotune."""
    fullgraph: bool = False
    """Fail where the model cannot be captured as one graph."""


@dataclass
class OrtDebugConfig:
    """ORTModule's DebugOptions."""

    save_onnx: bool = False
    """Leave the exported and optimized graphs in the run folder under onnx/."""
    log_level: OrtLogLevel = OrtLogLevel.warning
    onnx_prefix: str = "model"
    """Begins the names of these files."""


@dataclass
class OrtConfig(BackendConfig):
    """ONNX Runtime through ORTModule."""

    name: str = "ort"
    fallback: Fallback = Fallback.error
    threads: int | None = None
    """Threads of ONNX Runtime's pool in each worker; null takes the worker's share of the cores."""
    spinning: bool = False
    """Let idle threads of the pool spin instead of sleep."""
    torch_kernels: bool = True
    """On the CPU, let kernels of PyTorch and our own execute the nodes for which ONNX Runtime's are slow."""
    blocks: str | None = None
    """With trainer.zero_stage=3: class name, or glob of module paths (model.layers.*), of the blocks that run on ONNX
    Runtime, the rest of the model in PyTorch; null finds the repeated blocks of transformers and similar models."""
    zero3: OrtZero3 = OrtZero3.recompute
    """With trainer.zero_stage=3: recompute each block's forward in the backward (least memory), or hold the gathered
    parameters from forward to backward (no second forward)."""
    export_cache: bool = True
    """Keep exported graphs in the user's cache, so that the same run starts faster the second time."""
    allow: list[Allow] = field(default_factory=list)
    """Findings of the check at start that do not stop the run; it then carries them as the tag ortlaunch.allowed."""
    debug: OrtDebugConfig = field(default_factory=OrtDebugConfig)


ParameterGroups = list[dict[str, Any]]
"""Parameters as torch's optimizers take them."""


@dataclass(frozen=True)
class DeviceOptimizer:
    """An optimizer of ONNX Runtime's training on a device."""

    block: str
    """Its class in `onnxruntime.training.onnxblock.optim`."""
    arguments: dict[str, Any]
    """What the class is built with."""
    keys: tuple[str, ...]
    """The keys of the configuration that have an effect on it; they are written into the record of the export."""


@dataclass
class OptimizerConfig:
    """What every optimizer has."""

    name: str = MISSING
    lr: float = 3e-4
    """Peak learning rate; the scheduler multiplies it."""
    weight_decay: float = 0.0
    """How far weights are drawn to zero in each step, times the learning rate."""
    decay_bias_and_norm: bool = False
    """Apply weight decay to biases, normalization weights and other one-dimensional parameters as well."""

    whole_matrices: ClassVar[str | None] = None
    """Why it cannot work on flat pieces of the parameters, as DeepSpeed's ZeRO gives them; None where it can."""
    can_be_resharded: ClassVar[bool] = False
    """Whether DeepSpeed can give the state of n workers to another number of workers."""

    def build(self, groups: ParameterGroups) -> Optimizer:
        """The optimizer over these parameters.

        Args:
            groups: dictionaries with ``params`` and their ``weight_decay``, as torch's optimizers take them.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how it is built")

    def on_device(self) -> DeviceOptimizer:
        """The same in ONNX Runtime's training on a device (``ortlaunch export artifacts``).

        Raises:
            RequestError: there is no such optimizer, or not with these keys.
        """
        nodes = GROUPS["optimizer"].items()
        there = [f"optimizer={name}" for name, node in nodes if node.on_device is not OptimizerConfig.on_device]
        raise RequestError(f"optimizer={self.name}: on a device there are {' and '.join(there)}")


@dataclass
class SchedulerConfig:
    """Learning rate over the steps: linear warm-up, then the named shape."""

    name: str = MISSING
    warmup_steps: int = 0
    """Steps in which the learning rate rises in a straight line to its peak."""

    def ratio(self, progress: float) -> float:
        """Share of the peak learning rate after the warm-up.

        Args:
            progress: 0 for the first step after the warm-up, 1 for the last step of the run.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what its shape is")


@dataclass(frozen=True)
class KeyFacts:
    """What else there is to say of a launcher's key, beside its type and its text."""

    sbatch: str = ""
    """The option of sbatch that it becomes; empty for none."""
    variable: str = ""
    """The environment variable by which a person has a default for that option; empty for none."""
    same_work: bool = False
    """It changes nothing that a step does: runs that differ in it alone may be repeats of each other."""


def launcher_key(default: Any, *, sbatch: str = "", variable: str = "", same_work: bool = False) -> Any:
    """A field of a launcher's dataclass with its `KeyFacts`, which are stated here alone."""
    return field(default=default, metadata={"facts": KeyFacts(sbatch, variable, same_work)})


def key_facts(node: Any) -> dict[str, KeyFacts]:
    """What a launcher's dataclass, or an object of it, says of its keys, by their names and in their order."""
    return {one.name: one.metadata["facts"] for one in fields(node) if "facts" in one.metadata}


@dataclass
class LauncherConfig:
    """What every launcher has."""

    name: str = MISSING
    nodes: int = 1
    """Machines that the run is spread over."""
    workers_per_node: int | None = None
    """Worker processes on each machine; null (auto): one per GPU, or two on a machine without GPU."""
    dry_run: bool = launcher_key(False, same_work=True)
    """Print what would be started, write and start nothing."""
    max_restarts: int = launcher_key(0, same_work=True)
    """How often the workers may be started again after one has died; they go on from the last checkpoint."""
    timeout_seconds: int = launcher_key(600, same_work=True)
    """After the first step: longest time in which a worker may make no progress before the run fails."""
    grace_seconds: int = launcher_key(120, same_work=True)
    """Longest wait for the workers to finish their step and write a checkpoint when the run is asked to stop."""

    @property
    def tries_connections(self) -> bool:
        """Whether the workers try the connections between them before anything heavy starts."""
        return False


@dataclass
class LocalConfig(LauncherConfig):
    """torchrun on this machine, or by hand on several that share the run folder."""

    name: str = "local"
    node_rank: int = launcher_key(0, same_work=True)
    """Which of the `nodes` machines this is, counted from 0; the first one keeps the record."""
    master_addr: str | None = launcher_key(None, same_work=True)
    """Name or address of the first machine, as the others reach it."""
    master_port: int = launcher_key(29500, same_work=True)
    """A free port of the first machine."""
    run: str | None = launcher_key(None, same_work=True)
    """Names the same run on all machines, <date>-<time>-<id>; the first machine chooses it and says it."""


class GpuRequest(Enum):
    """How GPUs are asked for: `auto` takes --gpus-per-node where the cluster's SLURM knows it (19.05 and later)."""

    auto = "auto"
    gpus_per_node = "gpus_per_node"
    gres = "gres"


class ContainerRuntime(Enum):
    """What runs containers on the nodes."""

    pyxis = "pyxis"
    apptainer = "apptainer"


@dataclass
class ContainerConfig:
    """A container for the workers, with Python and ortlaunch inside."""

    image: str | None = None
    """Image as the runtime takes it; null runs on the nodes' own system."""
    runtime: ContainerRuntime = ContainerRuntime.pyxis
    mounts: list[str] = field(default_factory=list)
    """HOST:CONTAINER paths; the working folder and the run folder are mounted under their own names anyway."""
    python: str = "python3"
    """The interpreter inside."""


@dataclass
class SlurmConfig(LauncherConfig):
    """A job on a SLURM cluster: one task per node, each of them torchrun for the node's workers."""

    name: str = "slurm"
    partition: str | None = launcher_key(None, sbatch="--partition", variable="SBATCH_PARTITION")
    """As SLURM's --partition, and so the next three; null leaves each to the cluster."""
    account: str | None = launcher_key(None, sbatch="--account", variable="SBATCH_ACCOUNT", same_work=True)
    """What is charged."""
    qos: str | None = launcher_key(None, sbatch="--qos", variable="SBATCH_QOS", same_work=True)
    """Quality of service."""
    reservation: str | None = launcher_key(None, sbatch="--reservation", variable="SBATCH_RESERVATION", same_work=True)
    """Nodes that were set aside."""
    constraint: str | None = launcher_key(None, sbatch="--constraint", variable="SBATCH_CONSTRAINT")
    """Features that every node must have, as SLURM writes them: a100&nvlink."""
    time: str | None = launcher_key(None, sbatch="--time", variable="SBATCH_TIMELIMIT", same_work=True)
    """Time limit as SLURM writes it: minutes, hours:minutes:seconds or days-hours. Before it ends the run writes a
    checkpoint and queues again, so it limits a stay on the nodes and not the run."""
    gpus_per_node: int | None = launcher_key(None, sbatch="--gpus-per-node", variable="SBATCH_GPUS_PER_NODE")
    """GPUs of each node; null asks for none, and the workers train on the CPU."""
    gpu_type: str | None = None
    """Type of the GPUs, where a cluster has several: h100."""
    gpu_request: GpuRequest = GpuRequest.auto
    gres: str | None = launcher_key(None, sbatch="--gres", variable="SBATCH_GRES")
    """Other generic resources of each node, as SLURM writes them."""
    cpus_per_node: int | None = launcher_key(None, sbatch="--cpus-per-task")
    """Cores on each node, shared out to its workers."""
    memory: str | None = launcher_key(None, sbatch="--mem")
    """Memory of each node: 200G; 0 asks for all of it."""
    exclusive: bool = launcher_key(False, sbatch="--exclusive")
    """Share the nodes with no other job."""
    array_limit: int | None = launcher_key(None, same_work=True)
    """How many runs of a sweep may go on at once; null leaves it to the cluster."""
    dependency: str | None = launcher_key(None, sbatch="--dependency", same_work=True)
    """What to wait for, as SLURM writes it: afterok:1234."""
    mail_user: str | None = launcher_key(None, sbatch="--mail-user", same_work=True)
    """Who gets the mail."""
    mail_type: str | None = launcher_key(None, sbatch="--mail-type", same_work=True)
    """When to send mail, as SLURM writes it: END,FAIL."""
    extra: list[str] = field(default_factory=list)
    """Further options of sbatch, one each: --nice=100."""
    srun_extra: list[str] = field(default_factory=list)
    """Further options of srun, one each: --network=sn_single."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before the run on its first node: module load cuda/12.4."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables for the workers, on top of those of the shell that submits."""
    python: str | None = None
    """The interpreter on the nodes; null takes the one that submits."""
    container: ContainerConfig = field(default_factory=ContainerConfig)
    preflight: bool = launcher_key(True, same_work=True)
    """Before each attempt, let every node say within seconds whether it is fit for the run."""
    preflight_seconds: int = launcher_key(60, same_work=True)
    """How long a node may take for that before it is called dead."""
    requeue_limit: int = launcher_key(3, same_work=True)
    """How often in a row the run may come back from the queue without a new checkpoint before it gives up."""

    @property
    def tries_connections(self) -> bool:
        """As `preflight` says."""
        return self.preflight


@dataclass
class TrackingConfig:
    """Where the run's record goes."""

    name: str = "none"


@dataclass
class MlflowConfig(TrackingConfig):
    """MLflow, embedded or a server."""

    name: str = "mlflow"
    uri: str = "sqlite:///mlruns.db"
    """Any MLflow tracking URI; a relative sqlite path is taken from the folder where ortlaunch is started. Where this
    key is not set, the environment's MLFLOW_TRACKING_URI comes before the default."""
    artifacts: str = "mlartifacts"
    """Artifact folder of an embedded (sqlite) store; a server has its own."""
    timeout_seconds: int = 5
    """Longest wait for one answer of a tracking server."""
    flush_seconds: int = 60
    """Longest wait at the end of a run for a server to take what is left; `ortlaunch sync` sends the rest."""


@dataclass
class NoTrackingConfig(TrackingConfig):
    """The journal in the run folder and nothing else; `ortlaunch sync` can send it later."""

    name: str = "none"


@dataclass
class ProfileConfig:
    """What every way to look into some steps has."""

    name: str = MISSING
    start: int = 10
    """Steps of this attempt that pass before the first one that is looked into."""
    steps: int = 3
    """How many are."""


@dataclass
class TorchProfileConfig(ProfileConfig):
    """torch's profiler: a Chrome trace and a table of operators for each profiled worker."""

    name: str = "torch"
    ranks: list[int] = field(default_factory=lambda: [0])
    """Workers that are profiled."""
    operators: int = 40
    """Rows of the table."""
    shapes: bool = False
    """Tell operators apart by the shapes of their inputs."""
    stacks: bool = False
    """Record the lines of Python that called each operator."""


@dataclass
class MemoryProfileConfig(ProfileConfig):
    """Every allocation on the GPU during those steps, to be dropped on pytorch.org/memory_viz."""

    name: str = "memory"


@dataclass
class NsightProfileConfig(ProfileConfig):
    """Named ranges for ``nsys profile --capture-range=cudaProfilerApi``, which then records those steps alone."""

    name: str = "nsight"


@dataclass
class Config:
    """A run."""

    experiment: str = "default"
    """Runs of one experiment are compared with each other; a folder under runs/ and an MLflow experiment."""
    name: str | None = None
    """The run's name; null makes one of model, backend and trainer."""
    seed: int = 0
    """Of weights, data order, dropout and all else that is drawn; each worker's own follows from it."""
    device: Device = Device.auto
    run_root: str = str(RUN_ROOT)
    """Folder that holds the run folders."""
    train: TrainConfig = field(default_factory=TrainConfig)
    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    backend: BackendConfig = MISSING
    trainer: TrainerConfig = MISSING
    optimizer: OptimizerConfig = MISSING
    scheduler: SchedulerConfig = MISSING
    launcher: LauncherConfig = MISSING
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    trackers: dict[str, Any] = field(default_factory=dict)
    """Keys of the trackers beside MLflow, each under its name; chosen by ``tracking=[mlflow,NAME]``."""
    profile: ProfileConfig | None = None
    """Looks into some steps; chosen by ``+profile=torch``, memory or nsight."""


OPTIONAL_GROUPS = {"profile"}
"""Groups of which nothing is chosen unless asked for."""

GROUPS: dict[str, Mapping[str, type[Any]]] = {
    "data": MODULE_GROUPS["data"],
    "backend": {"ort": OrtConfig, "eager": EagerConfig, "compile": CompileConfig},
    "trainer": {name: TRAINERS[name].schema for name in sorted(TRAINERS)},
    "optimizer": MODULE_GROUPS["optimizer"],
    "scheduler": MODULE_GROUPS["scheduler"],
    "launcher": {"local": LocalConfig, "slurm": SlurmConfig},
    "tracking": {"mlflow": MlflowConfig, "none": NoTrackingConfig},
    "profile": {"torch": TorchProfileConfig, "memory": MemoryProfileConfig, "nsight": NsightProfileConfig},
}
"""Schema of each option of each typed config group."""


def register_schemas() -> None:
    """Puts the root schema and each group's schemas (as ``schema/<group>/<option>``) into Hydra's ConfigStore.

    An option that is a module needs no file under ``conf/``: its dataclass is the whole option.
    """
    from hydra.core.config_store import ConfigStore

    from ortlaunch.config.option_nodes import store_option

    store = ConfigStore.instance()
    store.store(name="ortlaunch_schema", node=Config)
    store.store(group="schema/model", name="model", node=ModelConfig)
    store.store(group="schema/model", name="open", node=open_model())
    for group, options in GROUPS.items():
        if isinstance(options, Options):
            for name in options.shipped():
                store_option(group, name)
        else:
            for name, node in options.items():
                store.store(group=f"schema/{group}", name=name, node=node)


def open_model(name: str = MISSING) -> DictConfig:
    """A model node whose `params` take any key, for models whose parameters are not listed under ``conf/model``."""
    node: DictConfig = OmegaConf.structured(ModelConfig(name=name))
    OmegaConf.set_struct(node.params, False)
    return node


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Finds the dataclasses of options that are modules here too, where they stood before."""
        if name.endswith("Config"):
            for trainer in TRAINERS.values():
                if trainer.schema.__name__ == name:
                    return trainer.schema
            for options in MODULE_GROUPS.values():
                for option in options.shipped():
                    if options[option].__name__ == name:
                        return options[option]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
