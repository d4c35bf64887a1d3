"""What several parts' tests need: exports kept per test, no store of the user's, stand-ins for the CUDA libraries.

The stand-ins are small, but real for the dynamic loader.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ortlaunch.base.user import user_cache
from ortlaunch.ort import cuda_libs
from tests.support.needs import needs
from tests.support.ort import MISSING, WithoutOrt

# Before any test file imports MLflow.
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell lets what it starts in the background ignore Ctrl-C, and processes that tests start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # nohup does the same to SIGHUP.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
OF_THE_USERS = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
OF_THE_USERS += ("ORTLAUNCH_JOBS", "ORTLAUNCH_SLURM_PROFILES")
OF_ORT = ("ort/", "drawn/")
OF_ORT += tuple(f"export/test_{name}.py" for name in ("artifacts", "chance", "exporting", "families", "verify"))
"""Files and folders whose tests are about ONNX Runtime alone."""
# As in the real ones, what a library needs is found by name alone.
NEEDS = {"libcublas.so.11": ["libcublasLt.so.11"], "libcudnn_cnn_infer.so.8": ["libcudnn_ops_infer.so.8"]}
FOR_PROVIDER = ["libcudart.so.11.0", "libcublasLt.so.11", "libcublas.so.11", "libcufft.so.10"]
FOR_PROVIDER += ["libcurand.so.10", "libcudnn.so.8"]


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test notes its runs where `ortlaunch jobs` of the developer looks, nor takes what their shell names; what is
    compiled is shared."""
    folder = tmp_path_factory.mktemp("cache")
    for built in user_cache().glob("cpython-*"):
        (folder / built.name).symlink_to(built)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORTLAUNCH_CACHE", str(folder))
        for name in OF_THE_USERS:
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(autouse=True)
def exports_of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test takes an export that another has left, nor one of the user's."""
    from ortlaunch.ort.module import cache

    monkeypatch.setattr(cache, "folder", lambda: tmp_path / "exports")


@pytest.fixture(autouse=True)
def no_worker_after_this_test() -> Iterator[None]:
    """What a test that plays a worker leaves in the environment is no fact for the next one: DeepSpeed reads it."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    before = {name: os.environ[name] for name in names if name in os.environ}
    yield
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(before)


@pytest.fixture(autouse=True)
def no_store_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test writes to a server that the shell it is started in names."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skips whole files whose imports need onnxruntime-training, where it is not installed."""
    place = module_path.relative_to(Path(__file__).parent).as_posix()
    if MISSING is None or not place.startswith(OF_ORT):
        return None
    return WithoutOrt.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what ``make test-nightly`` runs, unless it is asked for by name, and what this Python cannot run."""
    for item in items:
        if MISSING is not None and item.get_closest_marker("ort"):
            item.add_marker(pytest.mark.skip(reason=MISSING))
    if os.environ.get("ORTLAUNCH_NIGHTLY") or any("::" in word for word in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker("nightly")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]


_SECONDS: Counter[str] = Counter()
"""Seconds of each file, its fixtures included; whoever waits for a run that others share has its seconds."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds up, where the reports of all processes arrive."""
    _SECONDS[report.nodeid.partition("::")[0]] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """In CI each file that takes a second or more, the longest first."""
    if os.environ.get("CI"):
        terminalreporter.section("seconds of each file")
        for file, seconds in _SECONDS.most_common():
            if seconds >= 1:
                terminalreporter.write_line(f"{seconds:7.1f}  {file}")


@dataclass(frozen=True)
class Site:
    """The folder, and how to run Python with it before everything else."""

    path: Path

    @property
    def provider(self) -> Path:
        return self.path / "onnxruntime" / "capi" / "libonnxruntime_providers_cuda.so"

    @property
    def driver_folder(self) -> Path:
        return self.path.parent / "driver"

    def run(self, code: str, *, driver: bool = True) -> str:
        """Standard output of a program that must succeed."""
        result = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=self.environment(driver=driver),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    def environment(self, *, driver: bool) -> dict[str, str]:
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(self.path), *filter(None, sys.path)])}
        variables["LD_LIBRARY_PATH"] = str(self.driver_folder) if driver else ""
        return variables


def compile_library(file: Path, needs: list[Path], source: str = "") -> None:
    """A shared library that asks for others by their sonames and carries no path to them."""
    file.parent.mkdir(parents=True, exist_ok=True)
    code = source or f"int {file.name.replace('.', '_')}(void) {{ return 1; }}"
    (file.parent / "source.c").write_text(code)
    subprocess.run(
        [
            *("cc", "-shared", "-fPIC", f"-Wl,-soname,{file.name}", "-Wl,--no-as-needed", "-o", file),
            *("-x", "c", file.parent / "source.c", "-x", "none", *needs),
        ],
        check=True,
    )
    (file.parent / "source.c").unlink()


@pytest.fixture(scope="session")
def cuda_site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Everything there: the provider, the libraries of all five wheels, and a driver for CUDA 12.4."""
    needs(shutil.which("cc"), "needs a C compiler")
    site = Site(tmp_path_factory.mktemp("cuda") / "site-packages")
    files: dict[str, Path] = {}
    for library in cuda_libs.LIBRARIES:
        file = site.path / "nvidia" / library.folder / "lib" / library.soname
        compile_library(file, [files[name] for name in NEEDS.get(library.soname, [])])
        files[library.soname] = file
    compile_library(site.provider, [files[name] for name in FOR_PROVIDER])
    (site.path / "onnxruntime" / "__init__.py").touch()
    driver = "int cuDriverGetVersion(int *version) { *version = 12040; return 0; }"
    compile_library(site.driver_folder / "libcuda.so.1", [], driver)
    return site


@pytest.fixture
def copied_site(cuda_site: Site, tmp_path: Path) -> Site:
    """One to break."""
    shutil.copytree(cuda_site.path.parent, tmp_path / "cuda")
    return Site(tmp_path / "cuda" / "site-packages")
