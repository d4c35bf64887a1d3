"""`ortlaunch doctor` on this environment, and on broken ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.ort import extension


def doctor(*arguments: str, site: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([*([str(site)] if site else []), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-m", "ortlaunch", "doctor", *arguments],
        env={**os.environ, "PYTHONPATH": paths, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def lines(*, site: Path | None = None, **variables: str) -> dict[str, dict[str, Any]]:
    result = doctor("--json", site=site, **variables)
    report = json.loads(result.stdout)
    assert report["healthy"] == (result.returncode == 0)
    assert report["healthy"] == all(line["level"] != "error" for line in report["lines"])
    return {line["name"]: line for line in report["lines"]}


def pretend(site: Path, package: str) -> None:
    """An installed package, as far as its metadata goes."""
    folder = site / f"{package.replace('-', '_')}-1.19.2.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.19.2\n")


def test_this_environment_is_healthy() -> None:
    for name in extension.needed():
        extension.build(name)
    result = doctor()
    assert result.returncode == 0, result.stdout
    # The report alone; what libraries say while they are imported is not in it.
    assert {line.split()[0] for line in result.stdout.splitlines()} <= {"ok", "warning", "mend:"}
    for name in ("python", "torch", "driver", "onnxruntime-training", "aten_op_executor is built", "ortmodule"):
        assert name in result.stdout


@pytest.mark.parametrize("other", ["onnxruntime", "onnxruntime-gpu", "onnxruntime-training"])
def test_two_onnxruntimes_at_once_are_an_error_with_the_way_out(tmp_path: Path, other: str) -> None:
    pretend(tmp_path, other)
    line = lines(site=tmp_path)["onnxruntime"]
    assert line["level"] == "error"
    assert other in line["text"]
    assert line["mend"].startswith("pip uninstall -y onnxruntime")
    assert "&& pip install 'ortlaunch[cpu]'" in line["mend"]


def test_an_extension_that_is_not_built_is_a_warning_with_its_command(tmp_path: Path) -> None:
    line = lines(ORTLAUNCH_CACHE=str(tmp_path))["extension"]
    assert line["level"] == "warning"
    assert "aten_op_executor" in line["text"]
    assert line["mend"] == f"{sys.executable} -m ortlaunch.ort.extension"
    # It looks; it does not build.
    assert not list(tmp_path.rglob("*.so"))


def test_each_cuda_library_is_shown_and_a_missing_one_mended(copied_site) -> None:
    pretend(copied_site.path, "onnxruntime-training")
    shutil.rmtree(copied_site.path / "nvidia" / "cufft")
    with_driver = lines(site=copied_site.path, LD_LIBRARY_PATH=str(copied_site.driver_folder))
    assert with_driver["driver"]["text"].endswith("CUDA up to 12.4")
    assert with_driver["libcudnn.so.8"]["level"] == "ok"
    assert str(copied_site.path) in with_driver["libcudnn.so.8"]["text"]
    missing = with_driver["libcufft.so.10"]
    assert missing["level"] == "error"
    assert missing["mend"] == "pip install --force-reinstall --no-deps nvidia-cufft-cu11==10.9.0.58"
    # Where there is no driver nothing can use it yet.
    assert lines(site=copied_site.path)["libcufft.so.10"]["level"] == "warning"


def test_the_cpu_package_on_a_machine_with_a_driver_is_a_warning(cuda_site) -> None:
    driver = str(cuda_site.driver_folder)
    line = lines(LD_LIBRARY_PATH=driver)["onnxruntime"]
    assert line["level"] == "warning"
    assert "ortlaunch[cuda]" in line["mend"]
