"""`ortlaunch export WHAT`: chooses the export, shows its help page and prints its result."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ortlaunch.base.errors import RequestError
from ortlaunch.config.backends import require_ort

if TYPE_CHECKING:
    from ortlaunch.export.record import ExportRecord
    from ortlaunch.export.request import Request


@dataclass(frozen=True)
class _Verb:
    summary: str
    help: str
    run: Callable[[list[str]], int]


_CONFIGURED = """\
  model=… data=…         as for a run (ortlaunch --help); with from_run they are the run's
  from_run=RUN           a run, or the folder of a checkpoint in it: its model and data, and its newest weights
  from_weights=DIR       safetensors in the model's own names; with neither key the weights are freshly initialized
  out=DIR                the folder to write; one that holds files is not changed
  --force                replace the export that out=DIR holds"""

_ONNX = f"""\
ortlaunch export onnx: the forward of a model in train mode as one ONNX file, parameters under their own names

Usage:
  ortlaunch export onnx [model=…] [from_run=RUN | from_weights=DIR] out=DIR [KEY=VALUE ...]

{_CONFIGURED}
  loss=own               labels are inputs, too, and the model's own loss is an output
  --external-data        write the weights to a file next to the graph; above 1 GB this is always so

Nothing is folded, dropout and BatchNorm stay in train mode. Before the folder appears, the graph is checked by
onnx.checker and compared with PyTorch on batches of several sizes, and with other weights under the same names.
Exit codes: 0 done, 2 the request is wrong or the model cannot be exported"""

_ARTIFACTS = f"""\
ortlaunch export artifacts: the forward, and the training, eval and optimizer models and the checkpoint with which
ONNX Runtime trains it on a phone or an edge box

Usage:
  ortlaunch export artifacts [model=…] [from_run=RUN | from_weights=DIR] out=DIR [KEY=VALUE ...]

{_CONFIGURED}
  loss=NAME              own (the model's), cross_entropy, mse or bce; by default the loss of a run
  optimizer=adamw|sgd    and optimizer.weight_decay …; sgd needs optimizer.momentum=0, as there is none on a device
  trainable='GLOB,…'     parameters to train, such as 'classifier.*'; the others are frozen
  frozen='GLOB,…'        parameters among these to freeze
  --prefix NAME          prefix of the file names
  --nominal-checkpoint   also write a checkpoint of names and shapes only, for devices that get their weights elsewhere
  --external-data        as for export onnx

The weight decay of adamw is on every trainable parameter, as optimizer.decay_bias_and_norm=true has it in a run.
Exit codes: 0 done, 2 the request is wrong or the model cannot be exported"""

_INFERENCE = f"""\
ortlaunch export inference: the model in eval mode as one ONNX file, with constants folded

Usage:
  ortlaunch export inference [model=…] [from_run=RUN | from_weights=DIR] out=DIR [KEY=VALUE ...]

{_CONFIGURED}
  --quantize             also write model.int8.onnx, with 8-bit weights and dynamically quantized activations
  --external-data        as for export onnx

Before the folder appears, the file is run in ONNX Runtime and compared with PyTorch on batches of several sizes.
Exit codes: 0 done, 2 the request is wrong or the model cannot be exported"""


def main(arguments: list[str]) -> int:
    """Runs `ortlaunch export`.

    Args:
        arguments: the command line after ``export``.

    Raises:
        RequestError: the request is wrong, or what is asked for cannot be exported.
    """
    if arguments and arguments[0] in ("-h", "--help"):
        print(_page())
        return 0
    if not arguments or arguments[0] not in _VERBS:
        what = f"{arguments[0]}: no such export; there are" if arguments else "say what to export"
        raise RequestError(
            f"export: {what}: ortlaunch export {' | '.join(_VERBS)} (ortlaunch export --help); "
            "a run's weights: ortlaunch export weights RUN [--best] [--out FOLDER]"
        )
    verb = _VERBS[arguments[0]]
    if verb.help and {"-h", "--help"} & set(arguments[1:]):
        print(verb.help)
        return 0
    with _libraries_quiet():
        return verb.run(arguments[1:])


@contextlib.contextmanager
def _libraries_quiet() -> Iterator[None]:
    """Keeps messages of libraries, from their import or about a model's configuration, off the terminal."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # onnxruntime-training imports DeepSpeed if it is installed, which would look for GPUs and print messages about it.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # The weights of a checkpoint are read in one process, of which torch warns.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    yield


def _page() -> str:
    width = max(map(len, _VERBS))
    lines = [f"  ortlaunch export {name:<{width}}  {verb.summary}" for name, verb in _VERBS.items()]
    return "\n".join(["ortlaunch export: what a run has trained, for others to use", "", *lines, "", _EACH])


_EACH = "Each has a page of its own: ortlaunch export NAME --help"


def _onnx(arguments: list[str]) -> int:
    return _export("onnx", arguments, ("from_run", "from_weights", "out", "loss"), {"external-data": False})


def _artifacts(arguments: list[str]) -> int:
    keys = ("from_run", "from_weights", "out", "loss", "trainable", "frozen")
    flags = {"external-data": False, "prefix": True, "nominal-checkpoint": False}
    return _export("artifacts", arguments, keys, flags)


def _inference(arguments: list[str]) -> int:
    return _export(
        "inference", arguments, ("from_run", "from_weights", "out"), {"external-data": False, "quantize": False}
    )


def _export(verb: str, arguments: list[str], keys: tuple[str, ...], flags: dict[str, bool]) -> int:
    """Writes one export into a folder, and logs it to the run that the weights come from."""
    from ortlaunch.export.folder import check_free
    from ortlaunch.export.request import parse

    request = parse(verb, arguments, keys, {**flags, "force": False})
    require_ort(f"export {verb}", otherwise="")
    # This check comes before the import of the libraries, which takes seconds.
    check_free(request.out, force=request.has("force"))
    from ortlaunch.export.summary import summary
    from ortlaunch.export.tracking import log_to_run

    with contextlib.redirect_stdout(sys.stderr):
        record = _maker(verb)(request)
    print(summary(request.out, record))
    if request.from_run is not None:
        print(log_to_run(request.from_run, request.out, "export"))
    return 0


def _maker(verb: str) -> Callable[[Request], ExportRecord]:
    if verb == "onnx":
        from ortlaunch.export.onnx_file import export_onnx as make
    elif verb == "artifacts":
        from ortlaunch.export.artifacts import export_artifacts as make
    else:
        from ortlaunch.export.inference import export_for_inference as make
    return make


def _verify(arguments: list[str]) -> int:
    from ortlaunch.export.verify_command import main as verify

    return verify(arguments)


def _weights(arguments: list[str]) -> int:
    from ortlaunch.export.weights import FLAG
    from ortlaunch.export.weights import main as from_artifacts

    if any(word == FLAG or word.startswith(f"{FLAG}=") for word in arguments):
        return from_artifacts(arguments)
    from ortlaunch.export.run_weights import export_weights

    return export_weights(arguments)


_VERBS: dict[str, _Verb] = {
    "weights": _Verb("its weights as safetensors, in the model's own names", "", _weights),
    "onnx": _Verb("the forward as it trains, one ONNX file", _ONNX, _onnx),
    "artifacts": _Verb("the files with which ONNX Runtime trains it on a device", _ARTIFACTS, _artifacts),
    "verify": _Verb("train such artifacts and the PyTorch model, and compare", "", _verify),
    "inference": _Verb("the model in eval mode for servers, plain and quantized", _INFERENCE, _inference),
}
