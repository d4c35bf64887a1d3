"""Trains one drawn model in eager PyTorch and through the start of a run with ``backend=ort``, and judges the second.

The judge is the same model in fp64: ONNX Runtime may be as far from it as a few times what eager fp32 is.
"""

from __future__ import annotations

import importlib.util
import math
import re
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from ortlaunch.base.errors import RequestError, TrainingError
from ortlaunch.config.schema import Allow, BackendConfig, Config, EagerConfig, ModelConfig, OrtConfig, TrainConfig
from ortlaunch.config.trainers.single import SingleConfig
from ortlaunch.models.checks import check_model
from ortlaunch.models.task import Batch, make_task
from ortlaunch.ort import session
from ortlaunch.ort.module import cache
from ortlaunch.trainer.backend_run import backend_run
from ortlaunch.trainer.optimizers import SgdConfig
from ortlaunch.trainer.schedules import ConstantConfig
from ortlaunch.trainer.seeds import seed_everything
from ortlaunch.trainer.workers import Workers
from ortlaunch.trainer.wrapping import wrap
from tests.drawn.piece import BATCH, LENGTH, TOKENS, WIDTH
from tests.drawn.verdict import Verdict

STEPS = 5
_FLOOR = {"bfloat16": 5e-2, "half": 1e-2, "": 2e-4}
"""Relative error that counts as noise in any case, by the narrowest type that the source names: fp32's is that of
`ortlaunch check`."""
_NOISE = 8.0
"""How many times eager's own error ONNX Runtime's may be."""
_LAST_BIT = 2.0**-23
"""What rounding to fp32 changes at most."""

_CHAOS = 5.0
"""How many times the floor eager's own error may be; a model with more amplifies rounding and shows nothing."""
_LONGEST = 300
"""Characters of a reason."""


@dataclass
class Course:
    """Five steps of training."""

    losses: list[torch.Tensor]
    gradients: list[dict[str, torch.Tensor]]
    """Of each step, by the parameter's name; one without a gradient has none here either."""
    state: dict[str, torch.Tensor]
    """Parameters and buffers at the end."""


def judge(source: str, folder: Path, *, seed: int, is_random: bool) -> Verdict:
    """Trains a model in eager and under ONNX Runtime.

    Args:
        source: of a module with the class ``Net``.
        folder: takes the modules and the exports.
        seed: of the data.
        is_random: whether two passes over a batch differ; then only errors are judged.
    """
    cache.folder = lambda: folder / "exports"  # type: ignore[assignment]
    try:
        eager = _train(source, folder, seed, EagerConfig())
        exact = eager if is_random else _train(_in_fp64(source), folder, seed, EagerConfig(), torch.float64)
    except Exception as error:
        return Verdict("invalid", _gist(error))
    kind = next((kind for kind in _FLOOR if kind in source), "")
    noise = _errors(eager, exact)
    if not is_random:
        # One order of operations can be lucky where a result is what large values leave of each other.
        moved = _errors(_train(source, folder, seed, EagerConfig(), moved_by=_LAST_BIT), exact)
        noise = [max(pair) for pair in zip(noise, moved, strict=True)]
    if not all(math.isfinite(error) and error <= _CHAOS * _FLOOR[kind] for error, _ in noise):
        return Verdict("invalid", f"eager itself is {max(noise)[0]:.1e} from fp64")
    bounds = [max(_FLOOR[kind], _NOISE * max(noise[: step + 1])[0]) for step in range(len(noise))]
    try:
        course = _train(source, folder, seed, OrtConfig())
    except (RequestError, TrainingError) as error:
        return _refused(error, source, folder, seed, exact, bounds)
    except Exception as error:
        return Verdict("traceback", _gist(error))
    if is_random:
        finite = all(bool(torch.isfinite(loss)) for loss in course.losses)
        return Verdict("same", "random") if finite else Verdict("wrong", "a loss is not finite")
    difference = _difference(course, exact, bounds)
    return Verdict("wrong", difference) if difference else Verdict("same")


def _refused(error: Exception, source: str, folder: Path, seed: int, exact: Course, bounds: list[float]) -> Verdict:
    """A refusal; needless if the same training with the finding allowed is right."""
    if "backend.allow=" in str(error):
        try:
            allowed = _train(source, folder, seed, OrtConfig(allow=list(Allow)))
        except Exception:
            return Verdict("refused", _gist(error))
        if not _difference(allowed, exact, bounds):
            return Verdict("needless", _gist(error))
    return Verdict("refused", _gist(error))


def _train(
    source: str,
    folder: Path,
    seed: int,
    backend: BackendConfig,
    dtype: torch.dtype = torch.float32,
    moved_by: float = 0.0,
) -> Course:
    """Trains a model as a worker of a run does, from the check of the plain model to the last step.

    Args:
        source: of a module with the class ``Net``.
        folder: takes the module.
        seed: of the data.
        backend: what the model runs under.
        dtype: of the model and its inputs.
        moved_by: relative change of every parameter before the first step, up or down by chance.
    """
    module = _module(source, folder)
    config = _config(backend)
    workers = Workers(0, 1, torch.device("cpu"), 1)
    batches = _batches(seed, dtype)
    seed_everything(config.seed)
    model = module.Net()
    check_model(model)
    model.to(dtype)
    model.train()
    torch.set_default_dtype(dtype)
    if moved_by:
        chance = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                up_or_down = torch.randint(2, parameter.shape, generator=chance) * 2 - 1
                parameter.mul_(1 + moved_by * up_or_down.to(parameter.dtype))
    try:
        task = make_task(model, batches[0])
        engine = wrap(model, config, workers, task, folder)
        run = backend_run(engine, config, workers, folder, None)
        run.check(task, batches[: 1 + run.check_batches])
        seed_everything(config.seed + 1)
        course = Course([], [], {})
        for step, batch in enumerate(batches, 1):
            engine.guard.step = step
            run.micro_batch_begins(step, 0, batch)
            course.losses.append(engine.micro_step(batch, last=True).loss.clone())
            course.gradients.append(
                {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            )
            run.micro_batch_ends(batch)
            engine.step()
        if isinstance(backend, OrtConfig) and not session.is_active(engine.inner):
            raise AssertionError("ONNX Runtime did not run the model")
        # Not its state_dict, which leaves out buffers that are not persistent.
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        course.state = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        run.close()
        return course
    finally:
        torch.set_default_dtype(torch.float32)


def _config(backend: BackendConfig) -> Config:
    return Config(
        model=ModelConfig(name="factory"),
        backend=backend,
        trainer=SingleConfig(),
        train=TrainConfig(steps=STEPS, batch_size=BATCH, clip_grad_norm=None),
        optimizer=SgdConfig(lr=0.05, momentum=0.0),
        scheduler=ConstantConfig(),
    )


def _module(source: str, folder: Path) -> ModuleType:
    """A new module of this source, so that its globals are as in a new process."""
    # tempfile draws names from a generator of its own, which no seed here touches.
    path = Path(tempfile.mkdtemp(prefix="net_", dir=folder)) / "net.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("net", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["net"] = module
    spec.loader.exec_module(module)
    return module


def _in_fp64(source: str) -> str:
    return source.replace("torch.float32", "torch.float64").replace(".float()", ".double()")


def _batches(seed: int, dtype: torch.dtype) -> list[Batch]:
    numbers = torch.Generator().manual_seed(seed)
    return [
        {
            "x": torch.randn(BATCH, LENGTH, WIDTH, generator=numbers).to(dtype),
            "ids": torch.randint(TOKENS, (BATCH, LENGTH), generator=numbers),
            "labels": torch.randint(WIDTH, (BATCH, LENGTH), generator=numbers),
        }
        for _ in range(STEPS)
    ]


def _difference(course: Course, exact: Course, bounds: list[float]) -> str:
    """Where the training leaves the bounds first; empty if it does not."""
    for step, ((error, name), bound) in enumerate(zip(_errors(course, exact), bounds, strict=True), 1):
        if not error <= bound:
            when = f"step {step}" if step <= STEPS else "at the end"
            losses = f"last loss {float(course.losses[-1]):.5g}, eager {float(exact.losses[-1]):.5g}"
            return f"{when}: {name} is {error:.1e} from fp64, allowed {bound:.1e} ({losses})"
    return ""


def _errors(course: Course, exact: Course) -> list[tuple[float, str]]:
    """Of each step, and of the state at the end, the largest relative error and whose it is."""
    steps = zip(course.losses, course.gradients, exact.losses, exact.gradients, strict=True)
    found = []
    for loss, gradients, true_loss, true_gradients in steps:
        found.append(
            max(_worst({"loss": loss}, {"loss": true_loss}), _worst(gradients, true_gradients, "gradient of "))
        )
    return [*found, _worst(course.state, exact.state)]


def _worst(tensors: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], what: str = "") -> tuple[float, str]:
    """The largest error relative to a tensor's largest value, or to a hundredth of the largest of all.

    A gradient that is zero but for rounding has no error of its own.
    """
    largest = max((float(t.abs().max()) for t in exact.values() if t.is_floating_point() and t.numel()), default=0.0)
    worst = (0.0, "")
    for name in sorted({*tensors, *exact}):
        # A parameter that is not used has no gradient in one of them and zeros in the other.
        mine, true = tensors.get(name), exact.get(name)
        mine = torch.zeros_like(true) if mine is None and true is not None else mine  # type: ignore[arg-type]
        true = torch.zeros_like(mine) if true is None and mine is not None else true  # type: ignore[arg-type]
        assert mine is not None
        assert true is not None
        worst = max(worst, (_error(mine, true, 1e-2 * largest), what + name))
    return worst


def _error(mine: torch.Tensor, true: torch.Tensor, floor: float) -> float:
    if mine.shape != true.shape:
        return math.inf
    if mine.numel() == 0:
        return 0.0
    difference = float((mine.double() - true.double()).abs().max())
    if not math.isfinite(difference):
        return math.inf
    return difference / max(float(true.double().abs().max()), floor, 1e-12)


def _gist(error: Exception) -> str:
    """One line of an error: a refusal's own, otherwise what a quoted traceback ends with."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if isinstance(error, RequestError | TrainingError):
        return (lines or [""])[0][:_LONGEST]
    causes = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    line = (causes or lines or [""])[-1]
    if "onnxruntime_src" in line:
        # Its C++ errors begin with a file and a signature, and end with what is the matter.
        line = re.sub(r"/onnxruntime_src/\S*/(\S+:\d+) .*\) (?=\S)", r"\1 ", line)[-_LONGEST:]
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {place.name} ({Path(place.filename).name}:{place.lineno}): {line[:_LONGEST]}"


# Before the fork: the libraries, which take seconds, but no session, whose threads a fork would lose.
session.import_ortmodule()
