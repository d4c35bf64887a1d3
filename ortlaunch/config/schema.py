"""The typed shape of a run's configuration.

Each class is one node of the tree that Hydra composes. `register_schemas` puts them into Hydra's ConfigStore, so that
a misspelt key or a value of the wrong type fails while Hydra composes. Workers load the same classes from the run
folder's ``config.yaml``. Data sources, optimizers and schedules have their keys beside what these configure
(`ortlaunch.config.options`); this module has only the keys that all options of such a group share. The defaults are in
these dataclasses; the YAML files under ``conf/`` choose options, and list the parameters of models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from omegaconf import MISSING, DictConfig, OmegaConf

from ortlaunch.base.errors import RequestError
from ortlaunch.base.limits import MOST_SECONDS
from ortlaunch.config.backends import DEFAULT, default_backend
from ortlaunch.config.bounds import MOST_NODES, MOST_PROCESSES, Bounds, number, with_bounds
from ortlaunch.config.nodes import Node
from ortlaunch.config.options import MODULE_GROUPS, TRAPS, Options
from ortlaunch.config.trainers import TRAINERS
from ortlaunch.config.trainers.base import TrainerConfig
from ortlaunch.run.roots import RUN_ROOT

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ortlaunch.data.source import Share, Source


class Device(Enum):
    """The device that workers compute on. `auto` means CUDA if this machine has a GPU, else the CPU."""

    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


class Precision(Enum):
    """The number format of forward and backward. The weights that the optimizer updates, and its state, are fp32."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Fallback(Enum):
    """What to do when ONNX Runtime cannot run the model: stop the run, or warn and continue in PyTorch."""

    error = "error"
    warn = "warn"


class OrtZero3(Enum):
    """How ONNX Runtime's backward gets the parameters that ZeRO 3 frees after the forward; see `OrtConfig.zero3`."""

    recompute = "recompute"
    hold = "hold"


if TYPE_CHECKING:

    class Allow(Enum):
        """Findings that stop a run unless they are allowed: the model computes something else under ONNX Runtime."""
else:
    # There is a member for each module of `ort/verify/traps/`.
    Allow = Enum("Allow", {name: name for name in TRAPS}, module=__name__)


class OrtLogLevel(Enum):
    """ORTModule's own log levels."""

    verbose = "verbose"
    info = "info"
    warning = "warning"
    error = "error"
    fatal = "fatal"


class MemoryCheck(Enum):
    """What becomes of a run that does not fit into the memory."""

    warn = "warn"
    error = "error"
    off = "off"


@dataclass(eq=False, repr=False)
class TrainConfig(Node):
    """The training loop."""

    steps: int = number(100, least=1)
    """Number of optimizer steps of the run, where neither `epochs` nor `tokens` says how long it is."""
    epochs: float | None = number(None, above=0)
    """How often the run goes over its training samples; the workers count the steps of it, and round them up."""
    tokens: int | None = number(None, least=1)
    """How many tokens the run sees, over all workers; likewise."""
    batch_size: int = number(4, least=1)
    """Samples per worker and micro-batch."""
    grad_accumulation: int = number(1, least=1)
    """Micro-batches per optimizer step; gradients are averaged over them."""
    items: str | None = None
    """`module:function`: from a micro-batch to the number of items that its loss is a mean over, such as labelled
    tokens. The loss of a step is the mean over all items of its micro-batches on all workers. null finds out by itself
    whether these are samples or labels other than -100."""
    step: str | None = None
    """`module:function` or `module:Class`: from the (wrapped) model and a batch to the loss, or to the loss and named
    values, which are logged as train/NAME. A class is made once; its `state_dict` is in checkpoints. null calls the
    model with the batch."""
    hooks: list[Any] = field(default_factory=list)
    """Classes as `module:Class`, or `{target: module:Class, ARGUMENT: value}`, that act at the start, after steps,
    evaluations and checkpoints, and at the end of the run."""
    precision: Precision = Precision.fp32
    clip_grad_norm: float | None = number(1.0, above=0, hint="null switches clipping off")
    """Largest total gradient norm. Gradients with a larger norm are scaled down to it; null switches clipping off."""
    log_every: int | str = number(10, least=1)
    """Steps between two log steps, or `epoch`. The first, the last and the `steady_after` step are always logged."""
    steady_after: int = number(3, least=0)
    """Number of first steps that the throughput summary leaves out, because export, compilation and cold caches slow
    them down."""
    eval_every: int | str | None = number(None, least=1)
    """Steps between two evaluations on the held-out samples, or `epoch`. The last step is evaluated too; null never
    evaluates."""
    eval_samples: int = number(256, least=1)
    """Largest number of samples in an evaluation, over all workers. Every evaluation uses the same samples."""
    best: str | None = None
    """A value of the evaluation, such as `eval/accuracy`, or `eval/likeness:max` where its direction is not known. A
    better one writes a checkpoint, to which `checkpoints/best` points. null takes the lowest eval/loss of those
    checkpoints that are due anyway."""
    patience: int | None = number(None, least=1)
    """End the run after so many evaluations without a better value of `best` (eval/loss where that is null)."""
    ema: float | None = number(None, above=0, below=1)
    """Decay of an exponential moving average of the weights, as `torch.optim.swa_utils` computes it after each step.
    Evaluations, weights/ and `ortlaunch export weights` take the average; null keeps none."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward instead of keeping them. This needs less memory and makes steps
    slower."""
    deterministic: bool = False
    """Use only deterministic algorithms, so that two runs of one configuration give the same bits."""
    tf32: bool = False
    """On CUDA, let fp32 matrix products round their factors to TF32, which is faster and keeps about three decimal
    digits."""
    gc_every: int = number(100, least=0)
    """Steps between two of Python's garbage collections, which all workers run at the same step; 0 leaves the time to
    Python, which differs between workers."""
    checkpoint_every: int | str | None = number(1000, least=1)
    """Steps between two checkpoints, or `epoch`. The last step gets one too; null writes one only when the run is asked
    to stop."""
    keep_checkpoints: int = number(2, least=2)
    """How many of the newest complete checkpoints the run folder keeps, beside the best one."""
    checkpoint_async: bool = True
    """Continue training while a checkpoint is written, from a copy of the state, whose memory is kept for the next
    checkpoint. False waits until it is written, without a copy of what is in host memory."""
    resume: str = "auto"
    """`auto` resumes from the newest complete checkpoint of the run folder, and `never` starts from the beginning. A
    path resumes from that checkpoint, or from the newest one in that run folder."""
    save_weights: bool = True
    """Write the trained weights to weights/ in the run folder at the end."""
    memory_check: MemoryCheck = MemoryCheck.warn
    """What becomes of a run whose weights, gradients and optimizer state alone do not fit into the free memory of its
    machine, or of its GPU, when the workers have built the model: `warn` prints a line, `error` refuses the run, and
    `off` does not check. `ortlaunch estimate` knows the activations too."""

    @property
    def counts_steps(self) -> bool:
        """Whether `steps` says how long the run is."""
        return self.epochs is None and self.tokens is None

    def comes_before_end(self, every: int | str | None) -> bool:
        """Whether what is due after so many steps, or each epoch, is due before the last step."""
        return every is not None and (isinstance(every, str) or every < self.steps)

    def copied_checkpoints(self, after: int = 0) -> int:
        """How many checkpoints are due after a step beside which training goes on, so that each is a copy.

        Args:
            after: the number of a step, counted from 1; 0 is the beginning of the run.
        """
        every = self.checkpoint_every
        if not isinstance(every, int) or not self.checkpoint_async:
            return 0
        # The last step's is none of them.
        return max(0, (self.steps - 1) // every - after // every)


@dataclass(eq=False, repr=False)
class EvalConfig(Node):
    """What an evaluation computes; `train.eval_every` says when."""

    step: str | None = None
    """`module:function` or `module:Class`: from model and batch to `(loss, values)`, where the values are numbers by
    name, logged as eval/NAME, or `preds` and `target` for the metrics. null evaluates as the run trains."""
    metrics: list[Any] = field(default_factory=list)
    """torchmetrics by name (`accuracy`), with arguments (`{name: accuracy, top_k: 5}`), or of your own as
    `module:Class` or `module:function`. They are logged as eval/NAME; `as: NAME` gives one another name."""


@dataclass(eq=False, repr=False)
class ModelConfig(Node):
    """The model to build. Its builder gets `params` as keyword arguments."""

    name: str = MISSING
    target: str | None = None
    """`package.module:callable` of a model class or function of your own (model=factory)."""
    imports: list[str] = field(default_factory=list)
    """Python modules to import before the model is looked up, for models that a decorator registers. With
    `model=factory`, `model.name` names such a model."""
    params: dict[str, Any] = field(default_factory=dict)
    """Arguments of the builder by name. An unknown name is refused, and the nearest known one is suggested."""
    weights: str | None = None
    """Folder of safetensors files, or one such file, with initial weights by the model's own names."""


@dataclass(eq=False, repr=False)
class DataConfig(Node):
    """What every data source has."""

    name: str = MISSING
    workers: int = number(0, least=0, most=MOST_PROCESSES)
    """Loader processes per worker; 0 reads in the worker itself."""
    eval_fraction: float = number(0.02, least=0, below=1)
    """Share of the samples that is held out for evaluation. It is never trained on, even if the run never evaluates."""
    drop_last: bool = True
    """Leave out the samples at the end of an epoch that fill no batch on every worker; false makes shorter batches."""

    def check(self) -> None:
        """Checks this source's keys before a run begins, without torch and without reading the data.

        Raises:
            RequestError: a key has a value that cannot work.
        """

    def classes(self) -> int | None:
        """The number of classes of images, found without torch; None if it is not known or there are none."""
        return None

    def open(self, share: Share) -> Source:
        """Opens the source on a worker.

        Args:
            share: the part of the data that this worker reads.

        Raises:
            RequestError: the data is missing, or is not what the keys say.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how it is opened")


@dataclass(eq=False, repr=False)
class TokenDataConfig(DataConfig):
    """Sources that yield token sequences."""

    seq_len: int = number(128, least=2)
    """Tokens per sample."""


@dataclass(eq=False, repr=False)
class AdapterConfig(Node):
    """All weights of the model are trained; other options train something in their place."""

    name: str = "none"

    trains_all: ClassVar[bool] = True
    """Whether all weights are trained; else checkpoints hold the trained ones alone."""

    def facts(self) -> dict[str, Any]:
        """The keys and values by which stored weights of the adapter are read."""
        return {}


@dataclass(eq=False, repr=False)
class LoraConfig(AdapterConfig):
    """Low-rank matrices beside the model's own, which stay as they are (LoRA, by peft)."""

    name: str = "lora"
    rank: int = number(8, least=1)
    """Rows of the matrices."""
    alpha: int = number(16, least=1)
    """What the matrices add is multiplied by alpha / rank."""
    dropout: float = number(0.0, least=0, below=1)
    """Share of the matrices' inputs that is dropped in training."""
    targets: list[str] = field(default_factory=list)
    """Names, or ends of names, of the modules that get matrices; `[all-linear]` means all linear ones but the output.
    An empty list takes those that peft knows for the model's type."""

    trains_all: ClassVar[bool] = False

    def facts(self) -> dict[str, Any]:
        return {"adapter.alpha": self.alpha}


@dataclass(eq=False, repr=False)
class BackendConfig(Node):
    """What executes forward and backward."""

    name: str = MISSING


@dataclass(eq=False, repr=False)
class EagerConfig(BackendConfig):
    """Plain PyTorch."""

    name: str = "eager"


@dataclass(eq=False, repr=False)
class CompileConfig(BackendConfig):
    """torch.compile."""

    name: str = "compile"
    mode: str = "default"
    """torch.compile's mode: default, reduce-overhead, max-autotune or max-autotune-no-cudagraphs."""
    fullgraph: bool = False
    """Fail where the model cannot be captured as one graph."""


@dataclass(eq=False, repr=False)
class OrtDebugConfig(Node):
    """ORTModule's DebugOptions."""

    save_onnx: bool = False
    """Write the exported and optimized graphs to onnx/ in the run folder."""
    log_level: OrtLogLevel = OrtLogLevel.warning
    onnx_prefix: str = "model"
    """Prefix of the names of these files."""


FIRST_RECHECK = 1000
"""A comparison takes as long as some four steps, so that this step and its doubles spend less than 0.5 % on them."""


@dataclass(eq=False, repr=False)
class OrtConfig(BackendConfig):
    """ONNX Runtime through ORTModule."""

    name: str = "ort"
    fallback: Fallback = Fallback.error
    threads: int | None = number(None, least=1, most=MOST_PROCESSES)
    """Threads of ONNX Runtime's pool in each worker; null uses the worker's share of the cores."""
    spinning: bool = False
    """Let idle threads of the pool spin instead of sleep."""
    torch_kernels: bool = True
    """On the CPU, use kernels of PyTorch and of ortlaunch for the nodes whose kernels in ONNX Runtime are slow."""
    blocks: str | None = None
    """With trainer.zero_stage=3: the blocks that run on ONNX Runtime, as a class name or a glob of module paths
    (model.layers.*). The rest of the model runs in PyTorch; null finds the repeated blocks of transformers and similar
    models."""
    zero3: OrtZero3 = OrtZero3.recompute
    """With trainer.zero_stage=3: recompute each block's forward in the backward, which needs the least memory, or hold
    the gathered parameters from forward to backward, which avoids the second forward."""
    export_cache: bool = True
    """Keep exported graphs in the user's cache, so that the same run starts faster the second time."""
    allow: list[Allow] = field(default_factory=list)
    """Findings of the check at the start that do not stop the run. The tag ortlaunch.allowed lists them."""
    recheck_every: int | None = number(None, least=0)
    """Steps between comparisons of the gradients with PyTorch's while the run trains, on its current batch and weights.
    null compares at step 1000, 2000, 4000 and so on, which takes less than 0.5 % of the time; 0 never compares. With
    trainer.zero_stage=3 each block is compared by itself."""
    debug: OrtDebugConfig = field(default_factory=OrtDebugConfig)

    @property
    def first_recheck(self) -> int | None:
        """The first step that compares the gradients again; None if none does."""
        return FIRST_RECHECK if self.recheck_every is None else self.recheck_every or None


@dataclass(eq=False, repr=False)
class AutoConfig(BackendConfig):
    """The fastest of eager, compile and ort for this kind of run, by the rates of earlier ones, else by a trial of each
    before the workers start. Each backend has its default keys."""

    name: str = "auto"


ParameterGroups = list[dict[str, Any]]
"""Parameters as torch's optimizers take them."""


@dataclass(frozen=True, eq=False, repr=False)
class DeviceOptimizer(Node):
    """An optimizer of ONNX Runtime's on-device training."""

    block: str
    """The optimizer's class in `onnxruntime.training.onnxblock.optim`."""
    arguments: dict[str, Any]
    """The keyword arguments of the class."""
    keys: tuple[str, ...]
    """The configuration keys that affect the optimizer. The record of the export lists them."""


@dataclass(eq=False, repr=False)
class GroupConfig(Node):
    """Weights that are trained in another way than the rest."""

    match: str = MISSING
    lr_factor: float = number(1.0, least=0)
    weight_decay: float | None = number(None, least=0)
    frozen: bool = False
    target: str | None = None
    params: dict[str, Any] = field(default_factory=dict)

    def state_facts(self) -> dict[str, Any]:
        """As `OptimizerConfig.state_facts`."""
        facts = {"match": self.match, "frozen": self.frozen, "decays": self.weight_decay is not None}
        return facts | facts_of_target(self.target, self.params)


def facts_of_target(target: str | None, params: dict[str, Any]) -> dict[str, Any]:
    """Of an optimizer that the user names, the keys and values that determine which state it has."""
    # The groups of other classes than torch's hold state beside their arguments, so that both come from a checkpoint.
    of_torch = target is None or target.startswith("torch.optim")
    return {"target": target} if of_torch else {"target": target, "params": params}


@dataclass(eq=False, repr=False)
class OptimizerConfig(Node):
    """What every optimizer has."""

    name: str = MISSING
    lr: float = number(3e-4, above=0)
    """Peak learning rate. The scheduler multiplies it by a factor between 0 and 1."""
    weight_decay: float = number(0.0, least=0)
    """Share of the weights that each step subtracts from them, times the learning rate; sgd adds it to the gradient, so
    that its momentum holds for it, too."""
    decay_bias_and_norm: bool = False
    """Apply weight decay also to biases, normalization weights and other one-dimensional parameters."""
    groups: list[GroupConfig] = field(default_factory=list)
    """Weights that are trained in another way: a list of `{match: PATTERN}` with any of `lr_factor`, `weight_decay` (of
    all that match), `frozen: true`, and `target: package.module:Class` with its `params` for an optimizer of its own.
    PATTERN is a glob of parameter names, whose `*` matches dots too. The first group that matches a weight counts."""

    whole_matrices: ClassVar[str | None] = None
    """Why the optimizer cannot work on the flat pieces of parameters that ZeRO gives it; None if it can."""
    can_be_resharded: ClassVar[bool] = False
    """Whether DeepSpeed can give the state of n workers to another number of workers."""

    def build(self, groups: ParameterGroups) -> Optimizer:
        """Builds the optimizer over these parameters.

        Args:
            groups: dictionaries with ``params`` and their ``weight_decay``, as torch's optimizers take them.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how it is built")

    def state_facts(self) -> dict[str, Any]:
        """The keys and values that determine which state the optimizer has, and for which groups of parameters."""
        return {
            "optimizer": self.name,
            "optimizer.decay_bias_and_norm": self.decay_bias_and_norm,
            "optimizer.groups": [one.state_facts() for one in self.groups],
        }

    def state_elements(self, shape: Sequence[int]) -> int:
        """How many numbers the optimizer keeps for a parameter of this shape; 0 where that is not known."""
        return 0

    def on_device(self) -> DeviceOptimizer:
        """The same optimizer in ONNX Runtime's on-device training (``ortlaunch export artifacts``).

        Raises:
            RequestError: on-device training does not have this optimizer, or not with these keys.
        """
        nodes = GROUPS["optimizer"].items()
        there = [f"optimizer={name}" for name, node in nodes if node.on_device is not OptimizerConfig.on_device]
        raise RequestError(f"optimizer={self.name}: on a device there are {' and '.join(there)}")


@dataclass(eq=False, repr=False)
class SchedulerConfig(Node):
    """The learning rate over the steps: a linear warm-up, then the named shape."""

    name: str = MISSING
    warmup_steps: int = number(0, least=0)
    """Steps in which the learning rate rises linearly to its peak."""

    def factor(self, done: int, total: int) -> float:
        """The learning rate of a step as a share of its peak.

        It rises linearly over the warm-up, from more than 0 at the first step; the decay ends with the last step.

        Args:
            done: the steps before it.
            total: the steps of the run.
        """
        if done < self.warmup_steps:
            return (done + 1) / (self.warmup_steps + 1)
        decay_steps = max(1, total - 1 - self.warmup_steps)
        return self.ratio(min(1.0, (done - self.warmup_steps) / decay_steps))

    def ratio(self, progress: float) -> float:
        """The learning rate after the warm-up, as a share of its peak.

        Args:
            progress: 0 for the first step after the warm-up, 1 for the last step of the run.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what its shape is")


@dataclass(frozen=True, eq=False, repr=False)
class KeyFacts(Node):
    """Further facts about a launcher's key, beside its type and its text."""

    sbatch: str = ""
    """The sbatch option that the key sets; empty for none."""
    variable: str = ""
    """The environment variable with a user's default for that option; empty for none."""
    same_work: bool = False
    """The key does not change what a step does. Runs that differ only in such keys may be repeats of each other."""


def launcher_key(
    default: Any, *, sbatch: str = "", variable: str = "", same_work: bool = False, bounds: Bounds | None = None
) -> Any:
    """A field of a launcher's dataclass with its `KeyFacts` and bounds. No other place states these facts."""
    return field(default=default, metadata=with_bounds({"facts": KeyFacts(sbatch, variable, same_work)}, bounds))


def key_facts(node: Any) -> dict[str, KeyFacts]:
    """The `KeyFacts` of a launcher's dataclass, or of an instance of it, by the keys' names and in their order."""
    return {one.name: one.metadata["facts"] for one in fields(node) if "facts" in one.metadata}


class Allocator(Enum):
    """What glibc does with memory that a worker on the CPU has freed; see `LauncherConfig.allocator`."""

    system = "system"
    keep = "keep"


@dataclass(eq=False, repr=False)
class LauncherConfig(Node):
    """What every launcher has."""

    name: str = MISSING
    nodes: int = number(1, least=1, most=MOST_NODES)
    """Number of machines of the run."""
    workers_per_node: int | None = number(None, least=1, most=MOST_PROCESSES)
    """Worker processes on each machine; null means one per GPU, or two on a machine without a GPU."""
    threads: int | None = number(None, least=1, most=MOST_PROCESSES)
    """CPU threads of each worker; null means its share of the machine's cores."""
    allocator: Allocator = Allocator.system
    """On the CPU: `system` leaves glibc's settings as they are, by which the memory of large tensors goes back to the
    kernel when they are freed. `keep` keeps it for the next step, which is faster for models with tensors of more than
    32 MiB, and may need more memory."""
    dry_run: bool = launcher_key(False, same_work=True)
    """Print what would be started, but write and start nothing."""
    max_restarts: int = launcher_key(0, same_work=True, bounds=Bounds(least=0))
    """How often the workers may be restarted after one has died. They resume from the last checkpoint."""
    timeout_seconds: int = launcher_key(600, same_work=True, bounds=Bounds(least=1, most=MOST_SECONDS))
    """Longest time without progress of a worker before the run fails. It counts after the first step."""
    grace_seconds: int = launcher_key(120, same_work=True, bounds=Bounds(least=1, most=MOST_SECONDS))
    """Longest wait for the workers to finish their step and write a checkpoint when the run is asked to stop."""


@dataclass(eq=False, repr=False)
class LocalConfig(LauncherConfig):
    """torchrun on this machine, or started by hand on several machines that share the run folder."""

    name: str = "local"
    node_rank: int = launcher_key(0, same_work=True, bounds=Bounds(least=0))
    """Number of this machine among the `nodes` machines, counted from 0. The first one writes the run's record."""
    master_addr: str | None = launcher_key(None, same_work=True)
    """Name or address of the first machine, by which the others reach it."""
    master_port: int = launcher_key(29500, same_work=True, bounds=Bounds(least=1, most=65535))
    """A free port of the first machine."""
    run: str | None = launcher_key(None, same_work=True)
    """Identifier of the run, <date>-<time>-<id>, the same on all machines. The first machine chooses and prints it."""
    fail_fast: bool = launcher_key(False, same_work=True)
    """End a sweep at its first run that fails. By default it goes on, as with Hydra, and its end says which failed."""


class GpuRequest(Enum):
    """How GPUs are requested. `auto` uses --gpus-per-node if the cluster's SLURM supports it (19.05 and later)."""

    auto = "auto"
    gpus_per_node = "gpus_per_node"
    gres = "gres"


class ContainerRuntime(Enum):
    """The program that runs containers on the nodes."""

    pyxis = "pyxis"
    apptainer = "apptainer"


@dataclass(eq=False, repr=False)
class ContainerConfig(Node):
    """A container for the workers, with Python and ortlaunch inside."""

    image: str | None = None
    """Image, as the runtime takes it; null runs on the nodes' own system."""
    runtime: ContainerRuntime = ContainerRuntime.pyxis
    mounts: list[str] = field(default_factory=list)
    """Paths to mount, as HOST:CONTAINER. The working folder and the run folder are always mounted under their own
    names."""
    python: str = "python3"
    """The Python interpreter inside the container."""


@dataclass(eq=False, repr=False)
class SlurmConfig(LauncherConfig):
    """A job on a SLURM cluster: one task per node, each of them torchrun for the node's workers."""

    name: str = "slurm"
    partition: str | None = launcher_key(None, sbatch="--partition", variable="SBATCH_PARTITION")
    """Partition of the cluster (SLURM's --partition); null leaves it to SLURM."""
    account: str | None = launcher_key(None, sbatch="--account", variable="SBATCH_ACCOUNT", same_work=True)
    """Account that is charged for the job; null leaves it to SLURM."""
    qos: str | None = launcher_key(None, sbatch="--qos", variable="SBATCH_QOS", same_work=True)
    """Quality of service; null leaves it to SLURM."""
    reservation: str | None = launcher_key(None, sbatch="--reservation", variable="SBATCH_RESERVATION", same_work=True)
    """Reservation whose nodes the job uses; null leaves it to SLURM."""
    constraint: str | None = launcher_key(None, sbatch="--constraint", variable="SBATCH_CONSTRAINT")
    """Features that every node must have, in SLURM's syntax: a100&nvlink."""
    time: str | None = launcher_key(None, sbatch="--time", variable="SBATCH_TIMELIMIT", same_work=True)
    """Time limit of the job, in SLURM's syntax: minutes, hours:minutes:seconds or days-hours. Before the limit the run
    writes a checkpoint and queues again, so the run as a whole may take longer."""
    gpus_per_node: int | None = launcher_key(
        None, sbatch="--gpus-per-node", variable="SBATCH_GPUS_PER_NODE", bounds=Bounds(least=0, most=MOST_PROCESSES)
    )
    """GPUs of each node; null requests none, and the workers train on the CPU."""
    gpu_type: str | None = None
    """Type of the GPUs, if the cluster has several: h100."""
    gpu_request: GpuRequest = GpuRequest.auto
    gres: str | None = launcher_key(None, sbatch="--gres", variable="SBATCH_GRES")
    """Other generic resources of each node, in SLURM's syntax."""
    cpus_per_node: int | None = launcher_key(
        None, sbatch="--cpus-per-task", bounds=Bounds(least=1, most=MOST_PROCESSES)
    )
    """CPU cores on each node, which its workers share."""
    memory: str | None = launcher_key(None, sbatch="--mem")
    """Memory of each node, in whole numbers with K, M, G or T as SLURM takes them: 200G; 0 requests all of it."""
    exclusive: bool = launcher_key(False, sbatch="--exclusive")
    """Request the nodes for this job alone."""
    array_limit: int | None = launcher_key(None, same_work=True, bounds=Bounds(least=1))
    """How many runs of a sweep may run at once; null leaves it to the cluster."""
    dependency: str | None = launcher_key(None, sbatch="--dependency", same_work=True)
    """Jobs that this job waits for, in SLURM's syntax: afterok:1234."""
    mail_user: str | None = launcher_key(None, sbatch="--mail-user", same_work=True)
    """Recipient of the mail."""
    mail_type: str | None = launcher_key(None, sbatch="--mail-type", same_work=True)
    """Events for which SLURM sends mail, in SLURM's syntax: END,FAIL."""
    extra: list[str] = field(default_factory=list)
    """Further sbatch options, one per entry: --nice=100."""
    srun_extra: list[str] = field(default_factory=list)
    """Further srun options, one per entry: --network=sn_single."""
    setup: list[str] = field(default_factory=list)
    """Shell lines that the first node executes before the run: module load cuda/12.4."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the workers, in addition to those of the submitting shell."""
    python: str | None = None
    """The Python interpreter on the nodes; null uses the one that submits the job."""
    container: ContainerConfig = field(default_factory=ContainerConfig)
    preflight: bool = launcher_key(True, same_work=True)
    """Before each attempt, check within seconds that every node is fit for the run."""
    preflight_seconds: int = launcher_key(60, same_work=True, bounds=Bounds(least=1, most=MOST_SECONDS))
    """How long a node may take for this check before it counts as dead."""
    requeue_limit: int = launcher_key(3, same_work=True, bounds=Bounds(least=1))
    """How often in a row the run may be requeued without a new checkpoint before it gives up."""


@dataclass(eq=False, repr=False)
class TrackingConfig(Node):
    """The tracker that records the run."""

    name: str = "none"


@dataclass(eq=False, repr=False)
class MlflowConfig(TrackingConfig):
    """MLflow, embedded or a server."""

    name: str = "mlflow"
    uri: str = "sqlite:///mlruns.db"
    """An MLflow tracking URI. A relative sqlite path starts from the folder where ortlaunch is started. If this key is
    not set, the environment variable MLFLOW_TRACKING_URI replaces the default."""
    experiment_name: str | None = None
    """MLflow's name of the experiment; null takes `experiment`. Databricks names one by a path, /Users/NAME/TITLE."""
    artifacts: str = "mlartifacts"
    """Artifact folder of an embedded (sqlite) store. A server has its own."""
    timeout_seconds: int = number(5, least=1, most=MOST_SECONDS)
    """Longest wait for one answer of a tracking server."""
    flush_seconds: int = number(60, least=0, most=MOST_SECONDS)
    """Longest time at the end of a run for sending the rest of the record. `ortlaunch sync` sends what is then left."""


@dataclass(eq=False, repr=False)
class NoTrackingConfig(TrackingConfig):
    """Only the journal in the run folder. `ortlaunch sync` can send it later."""

    name: str = "none"


@dataclass(eq=False, repr=False)
class ProfileConfig(Node):
    """What every profiler has."""

    name: str = MISSING
    start: int = number(10, least=0)
    """Steps of this attempt before the first profiled one."""
    steps: int = number(3, least=1)
    """Number of profiled steps."""


@dataclass(eq=False, repr=False)
class TorchProfileConfig(ProfileConfig):
    """torch's profiler: a Chrome trace and a table of operators for each profiled worker."""

    name: str = "torch"
    ranks: list[int] = field(default_factory=lambda: [0], metadata=with_bounds({}, Bounds(least=0)))
    """Workers that are profiled."""
    operators: int = number(40, least=1)
    """Rows of the table."""
    shapes: bool = False
    """Distinguish operators by the shapes of their inputs."""
    stacks: bool = False
    """Record the lines of Python that called each operator."""


@dataclass(eq=False, repr=False)
class MemoryProfileConfig(ProfileConfig):
    """A record of every allocation on the GPU during those steps, for pytorch.org/memory_viz."""

    name: str = "memory"


@dataclass(eq=False, repr=False)
class NsightProfileConfig(ProfileConfig):
    """Named ranges for ``nsys profile --capture-range=cudaProfilerApi``, which then records those steps alone."""

    name: str = "nsight"


@dataclass(eq=False, repr=False)
class RunConfig(Node):
    """What every run has, whatever its workers do."""

    experiment: str = "default"
    """Group of runs that are compared with each other. It is a folder under runs/ and an experiment in MLflow."""
    name: str | None = None
    """The run's name; null makes one from model, backend and trainer, or takes that of the script."""
    device: Device = Device.auto
    run_root: str = str(RUN_ROOT)
    """Folder that holds the run folders."""
    objective: str = "eval/loss"
    """The metric whose last value a run returns to a sweeper that chooses by it, such as `hydra/sweeper=optuna`."""
    launcher: LauncherConfig = MISSING
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    trackers: dict[str, Any] = field(default_factory=dict)
    """Keys of the trackers beside MLflow, each under its name. ``tracking=[mlflow,NAME]`` chooses one."""


@dataclass(eq=False, repr=False)
class Config(RunConfig):
    """A run that trains a model in ortlaunch's own loop."""

    seed: int = number(0, least=0)
    """Seed of all random numbers: weights, data order, dropout. Each worker derives its own seed from it."""
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    model: ModelConfig = MISSING
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    data: DataConfig = MISSING
    backend: BackendConfig = MISSING
    trainer: TrainerConfig = MISSING
    optimizer: OptimizerConfig = MISSING
    scheduler: SchedulerConfig = MISSING
    profile: ProfileConfig | None = None
    """Profiler of some steps. ``+profile=torch``, ``memory`` or ``nsight`` chooses one."""


AnyRun = TypeVar("AnyRun", bound=RunConfig)
"""The kind of run that a function takes and returns."""


class StopSignal(Enum):
    """A signal that asks a script to stop."""

    SIGTERM = "SIGTERM"
    SIGINT = "SIGINT"
    SIGHUP = "SIGHUP"
    SIGUSR1 = "SIGUSR1"
    SIGUSR2 = "SIGUSR2"


@dataclass(eq=False, repr=False)
class ScriptConfig(Node):
    """A script of the user's own, which every worker runs."""

    command: list[str] = field(default_factory=list)
    """A Python file, or -m and a module, and its arguments: what stands after -- on the command line."""
    folder: str = ""
    """The folder that the script starts in: that of the command line."""
    params: dict[str, Any] = field(default_factory=dict)
    """Values for arguments by name: ``{lr}`` in an argument becomes the value of `script.params.lr`."""
    attach: dict[str, Any] = field(default_factory=dict)
    """Keys of backend, trainer, train and seed for a script that calls `ortlaunch.attach()`. They may be typed without
    `script.attach`."""
    signal: StopSignal = StopSignal.SIGTERM
    """The signal that each worker gets once when the run is to stop, `launcher.grace_seconds` before it is ended."""


@dataclass(eq=False, repr=False)
class ScriptRun(RunConfig):
    """A run whose workers are a script: ``ortlaunch [KEY=VALUE ...] -- train.py ARGS``."""

    script: ScriptConfig = field(default_factory=ScriptConfig)


OPTIONAL_GROUPS = {"profile"}
"""Groups without a default option."""

GROUPS: dict[str, Mapping[str, type[Any]]] = {
    "adapter": {"none": AdapterConfig, "lora": LoraConfig},
    "data": MODULE_GROUPS["data"],
    "backend": {"ort": OrtConfig, "eager": EagerConfig, "compile": CompileConfig, "auto": AutoConfig},
    "trainer": {name: TRAINERS[name].schema for name in sorted(TRAINERS)},
    "optimizer": MODULE_GROUPS["optimizer"],
    "scheduler": MODULE_GROUPS["scheduler"],
    "launcher": {"local": LocalConfig, "slurm": SlurmConfig},
    "tracking": {"mlflow": MlflowConfig, "none": NoTrackingConfig},
    "profile": {"torch": TorchProfileConfig, "memory": MemoryProfileConfig, "nsight": NsightProfileConfig},
}
"""The schema of each option of each typed config group.

Installed packages add options by entry points. Those of data, optimizer and scheduler are in these tables too
(`ortlaunch.config.options`). Launchers are in `ortlaunch.config.launchers`, trackers in `ortlaunch.tracking.trackers`.
"""


def register_schemas() -> None:
    """Puts the root schema and the options of the typed groups into Hydra's ConfigStore.

    An option needs no file under ``conf/``: its dataclass is the whole option. Each is there as ``<group>/<option>``,
    and as ``schema/<group>/<option>`` for files that build on it.
    """
    from ortlaunch.config.option_nodes import store, store_option

    store(None, "ortlaunch_schema", partial(OmegaConf.structured, Config))
    store(None, "ortlaunch_script_schema", _open_script)
    store("schema/model", "model", partial(OmegaConf.structured, ModelConfig))
    store("schema/model", "open", open_model)
    for group, options in GROUPS.items():
        if isinstance(options, Options):
            for name in options.shipped():
                store_option(group, name)
        else:
            for name, node in options.items():
                store_option(group, name, partial(OmegaConf.structured, node))
    store("backend", DEFAULT, lambda: OmegaConf.structured(GROUPS["backend"][default_backend()]))


def _open_script() -> DictConfig:
    node: DictConfig = OmegaConf.structured(ScriptRun)
    OmegaConf.set_struct(node.script.params, False)
    OmegaConf.set_struct(node.script.attach, False)
    return node


def open_model(name: str = MISSING) -> DictConfig:
    """A model node whose `params` take any key, for models whose parameters are not listed under ``conf/model``."""
    node: DictConfig = OmegaConf.structured(ModelConfig(name=name))
    OmegaConf.set_struct(node.params, False)
    return node


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Finds the dataclasses of options that stand in other modules, for imports from this module."""
        if name.endswith("Config"):
            for trainer in TRAINERS.values():
                if trainer.schema.__name__ == name:
                    return trainer.schema
            for options in MODULE_GROUPS.values():
                for option in options.shipped():
                    if options[option].__name__ == name:
                        return options[option]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
