"""The real wheels of the extra `cuda`: about 2 GB, so only where asked for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from ortlaunch.ort import cuda_libs

pytestmark = [
    pytest.mark.wheels,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        os.environ.get("ORTLAUNCH_TEST_WHEELS") != "1", reason="installs 2 GB of wheels: set ORTLAUNCH_TEST_WHEELS=1"
    ),
]

LOAD = "from ortlaunch.ort import cuda_libs; assert all(found.origin for found in cuda_libs.load()), cuda_libs.load()"

OPEN_SESSION = """
import onnxruntime
from onnx import TensorProto, helper
assert "CUDAExecutionProvider" in onnxruntime.get_available_providers()
values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "graph", values[:1], values[1:])
model = helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", 17)])
onnxruntime.InferenceSession(model.SerializeToString(), providers=["CUDAExecutionProvider"])
"""

TRAIN = """
import copy, pathlib, torch
from ortlaunch.config.schema import ModelConfig, OrtConfig
from ortlaunch.ort import cuda_libs, session
from ortlaunch.models.registry import build_model
assert cuda_libs.has_cuda_provider()
torch.manual_seed(0)
eager = build_model(ModelConfig(name="mlp"))
ort = session.wrap(copy.deepcopy(eager), OrtConfig(), threads=2, onnx_dir=pathlib.Path("."))
optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (eager, ort)]
for _ in range(3):
    x = torch.rand(4, 64)
    losses = [model(x).square().mean() for model in (eager, ort)]
    torch.testing.assert_close(*losses)
    for loss, optimizer in zip(losses, optimizers):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
assert session.is_active(ort)
"""


class Environment:
    """A virtual environment with the wheels, in front of the packages that these tests run with."""

    def __init__(self, folder: Path) -> None:
        self.python = folder / "bin" / "python"
        self.site = next((folder / "lib").glob("python3*/site-packages"))

    @property
    def provider(self) -> Path:
        return self.site / "onnxruntime" / "capi" / "libonnxruntime_providers_cuda.so"

    def run(self, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
        package = str(Path(cuda_libs.__file__).parents[2])
        return subprocess.run(
            [self.python, "-c", textwrap.dedent(code)],
            env={**os.environ, "PYTHONPATH": package, **variables},
            capture_output=True,
            text=True,
            timeout=300,
        )


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    folder = tmp_path_factory.mktemp("wheels") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    environment = Environment(folder)
    pins = ["onnxruntime-training==1.19.2", *dict.fromkeys(library.requirement for library in cuda_libs.LIBRARIES)]
    pip = [environment.python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-deps"]
    subprocess.run([*pip, *pins], check=True, timeout=1200)
    (environment.site / "zz_base.pth").write_text(sysconfig.get_paths()["purelib"])
    yield environment
    # pytest keeps temporary folders, and these are large.
    subprocess.run(["rm", "-rf", folder], check=True)


def unresolved(provider: Path) -> set[str]:
    """Names that the dynamic loader does not find by itself."""
    listing = subprocess.run(["ldd", provider], capture_output=True, text=True, check=True, timeout=200).stdout
    return set(re.findall(r"(\S+) => not found", listing))


def never_found(loader_log: str) -> set[str]:
    """Names that a process asked the dynamic loader for, in vain."""
    asked = set(re.findall(r"find library=(\S+)", loader_log))
    found = {Path(path).name for path in re.findall(r"calling init: (\S+)", loader_log)}
    return asked - found


def test_all_that_the_provider_links_is_loaded_by_us(environment: Environment) -> None:
    missing = unresolved(environment.provider)
    assert missing == {
        *("libcudart.so.11.0", "libcublasLt.so.11", "libcublas.so.11", "libcufft.so.10"),
        *("libcurand.so.10", "libcudnn.so.8"),
    }
    ask = f"import ctypes, os\nfor name in {sorted(missing)}: ctypes.CDLL(name, mode=os.RTLD_NOLOAD)"
    assert environment.run(ask).returncode != 0
    result = environment.run(f"{LOAD}\n{ask}")
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(cuda_libs.driver_error() is None, reason="this machine has a driver: tests/gpu runs the provider")
def test_only_the_driver_is_missing_when_the_provider_starts(environment: Environment) -> None:
    without = environment.run(OPEN_SESSION)
    assert "libcublasLt.so.11: cannot open shared object file" in without.stderr
    loaded = environment.run(LOAD + OPEN_SESSION, LD_DEBUG="libs")
    assert "cannot open shared object file: No such file" not in re.sub(r"\n\s*\d+:.*", "", loaded.stderr)
    # Its own code has run, and stops where it opens the driver.
    assert "cudaDriverWrapper" in loaded.stderr
    # NVRTC is looked for at every start, by cuBLAS, which does without.
    assert never_found(loaded.stderr) - {"libnvrtc.so"} == {"libcuda.so.1"}


def test_beside_torch_they_change_nothing(environment: Environment) -> None:
    """torch is imported first, and its own CUDA libraries, where it has some, stay in use."""
    code = f"import torch\n{LOAD}\nprint(torch.ones(3).sum().item())"
    result = environment.run(code)
    assert result.stdout.strip() == "3.0", result.stderr


def test_ortmodule_of_the_cuda_wheel_trains_on_the_cpu(environment: Environment) -> None:
    result = environment.run(TRAIN)
    assert result.returncode == 0, result.stderr
