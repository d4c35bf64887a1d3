"""The compiled extension is built once per user and stack, under a lock."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.ort import extension

BUILD = "from ortlaunch.ort import extension; print(extension.build('aten_op_executor'))"


def test_the_cache_is_keyed_by_python_torch_and_ort(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path))
    name = extension.cache_dir().name
    assert torch.__version__ in name
    assert "1.19.2" in name
    assert sys.implementation.cache_tag in name


def test_the_cache_lies_in_the_users_cache_folder(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ORTLAUNCH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert extension.cache_dir().parent == tmp_path / "ortlaunch"


def test_a_library_that_others_may_write_is_not_loaded(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path))
    library = extension.cache_dir() / "aten_op_executor.so"
    library.parent.mkdir()
    library.write_bytes(b"")
    library.chmod(0o666)
    with pytest.raises(RequestError, match=r"ORTLAUNCH_CACHE.*aten_op_executor.so can be written by every user"):
        extension.build("aten_op_executor")


@pytest.mark.nightly
def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    """The second waits for the lock and finds the library; nothing is written into site-packages.

    ninja is found where its package lies, in an environment that nobody activated on a machine without another.
    """
    programs, cache = tmp_path / "programs", tmp_path / "cache"
    programs.mkdir()
    for name in ("as", "c++", "ld", "which"):
        (programs / name).symlink_to(str(shutil.which(name)))
    environment = {**os.environ, "ORTLAUNCH_CACHE": str(cache), "PYTHONPATH": ":".join(sys.path), "PATH": str(programs)}
    started = [
        subprocess.Popen([sys.executable, "-c", BUILD], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=280)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert sum("compiling aten_op_executor" in output for output in outputs) == 1
    libraries = list(cache.rglob("*.so"))
    assert [path.name for path in libraries] == ["aten_op_executor.so"]
    assert {output.strip().splitlines()[-1] for output in outputs} == {str(libraries[0])}
    # What the compiler left behind is gone.
    assert {path.name for path in libraries[0].parent.iterdir()} <= {"aten_op_executor.so", "aten_op_executor.lock"}


def test_building_ahead_says_in_one_message_what_is_missing(tmp_path: Path) -> None:
    environment = {**os.environ, "ORTLAUNCH_CACHE": str(tmp_path), "PYTHONPATH": ":".join(sys.path), "PATH": ""}
    environment.pop("CXX", None)
    command = [sys.executable, "-m", "ortlaunch.ort.extension"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert [line.split(":")[0] for line in ended.stderr.splitlines() if line] == ["ortlaunch"], ended.stderr
    assert "compiler" in ended.stderr


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch (no GPU)")
def test_the_gpu_allocator_compiles_without_a_toolkit(monkeypatch, tmp_path: Path) -> None:
    """torch's own wheels bring the headers; nvcc is not needed."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path))
    module = extension.load("torch_gpu_allocator")
    addresses = {getattr(module, name)() for name in dir(module) if name.startswith("gpu_caching_allocator")}
    assert len(addresses) == 3
    assert all(addresses)


USE_KERNELS = (
    "import torch; from ortlaunch.ort import extension; extension.load_kernels(); extension.load_kernels(); "
    "print(torch.ops.ortlaunch.gelu_tanh(torch.ones(3)).tolist())"
)


@pytest.mark.nightly
def test_our_kernels_are_built_at_first_use_and_found_after(tmp_path: Path) -> None:
    environment = {**os.environ, "ORTLAUNCH_CACHE": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", USE_KERNELS]
    outputs = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=280).stdout
        for _ in range(2)
    ]
    assert ["compiling ortlaunch_kernels" in output for output in outputs] == [True, False]
    expected = torch.nn.functional.gelu(torch.ones(3), approximate="tanh")
    assert json.loads(outputs[1]) == pytest.approx(expected.tolist())


def test_our_kernels_are_kept_for_each_version_and_processor(monkeypatch, tmp_path: Path) -> None:
    sources = tmp_path / "native"
    sources.mkdir()
    (sources / "a.cpp").write_text("one")
    monkeypatch.setattr(extension, "_OUR_SOURCES", sources)
    first = extension._library(extension.KERNELS)
    assert extension._library(extension.KERNELS) == first
    (sources / "a.cpp").write_text("two")
    second = extension._library(extension.KERNELS)
    monkeypatch.setattr(extension, "_CPU_INFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text("model name: other\nflags: sse2\n")
    assert len({first, second, extension._library(extension.KERNELS)}) == 3


def test_an_image_names_the_processor_instead(monkeypatch, tmp_path: Path) -> None:
    """What was compiled where the image was built is found on another machine, which may have no compiler."""
    monkeypatch.setenv("ORTLAUNCH_MARCH", "x86-64-v3")
    built = extension._library(extension.KERNELS)
    monkeypatch.setattr(extension, "_CPU_INFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text("flags: sse2\n")
    assert extension._library(extension.KERNELS) == built
    monkeypatch.delenv("ORTLAUNCH_MARCH")
    assert extension._library(extension.KERNELS) != built
