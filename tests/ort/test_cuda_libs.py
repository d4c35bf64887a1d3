"""The CUDA 11.8 libraries are found in site-packages and loaded so that the dynamic loader is content."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest

from ortlaunch.ort import cuda_libs

LINK_PROVIDER = """
import ctypes, importlib.util, pathlib
from ortlaunch.ort import cuda_libs
print(*(found.library.soname + "=" + str(found.origin) for found in cuda_libs.prepare()))
capi = pathlib.Path(importlib.util.find_spec("onnxruntime").origin).parent / "capi"
try:
    ctypes.CDLL(str(capi / "libonnxruntime_providers_cuda.so"))
    print("linked")
except OSError as error:
    print(error)
"""

REQUIRE = """
from ortlaunch.base.errors import RequestError
from ortlaunch.ort import cuda_libs
try:
    cuda_libs.require()
    print("fine")
except RequestError as error:
    print(error)
"""


def test_the_pins_are_those_of_the_extra() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    extra = set(project["project"]["optional-dependencies"]["cuda"])
    assert {library.requirement for library in cuda_libs.LIBRARIES} == {
        pin.partition(";")[0] for pin in extra if "-cu11" in pin
    }


def test_with_a_driver_all_are_loaded_from_site_packages_and_the_provider_links(cuda_site) -> None:
    loaded, result = cuda_site.run(LINK_PROVIDER).splitlines()
    assert result == "linked"
    origins = dict(pair.split("=", 1) for pair in loaded.split())
    assert list(origins) == [library.soname for library in cuda_libs.LIBRARIES]
    for library in cuda_libs.LIBRARIES:
        assert origins[library.soname] == str(cuda_site.path / "nvidia" / library.folder / "lib" / library.soname)


def test_without_a_driver_nothing_is_loaded(cuda_site) -> None:
    loaded, result = cuda_site.run(LINK_PROVIDER, driver=False).split("\n")[:2]
    assert loaded == ""
    # The stand-in for the provider is real enough to fail.
    assert "cannot open shared object file" in result


def test_with_the_cpu_package_nothing_is_loaded(copied_site) -> None:
    copied_site.provider.unlink()
    assert copied_site.run(LINK_PROVIDER).split("\n")[0] == ""
    message = copied_site.run(REQUIRE)
    assert "pip uninstall onnxruntime-training-cpu" in message
    assert "ortlaunch[cuda]" in message


def test_what_is_missing_is_named_with_the_command_that_brings_it(copied_site) -> None:
    assert copied_site.run(REQUIRE).strip() == "fine"
    shutil.rmtree(copied_site.path / "nvidia" / "cufft")
    (copied_site.path / "nvidia" / "cudnn" / "lib" / "libcudnn_adv_train.so.8").unlink()
    message = copied_site.run(REQUIRE)
    assert "libcufft.so.10" in message
    assert "libcudnn_adv_train.so.8" in message
    assert "libcublas" not in message
    assert "pip install --force-reinstall --no-deps nvidia-cufft-cu11==10.9.0.58 nvidia-cudnn-cu11==8.9.6.50" in message


def test_cuda_without_a_driver_is_refused(cuda_site) -> None:
    message = cuda_site.run(REQUIRE, driver=False)
    assert "no NVIDIA driver" in message
    assert "device=cpu" in message


def test_a_library_that_is_there_already_is_left_alone(cuda_site) -> None:
    """torch built for CUDA 12 or 13 has loaded a libcurand.so.10 of its own."""
    code = f"""
    import ctypes
    ctypes.CDLL({str(cuda_site.path / "nvidia/curand/lib/libcurand.so.10")!r})
    from ortlaunch.ort import cuda_libs
    print({{found.library.soname: found.origin for found in cuda_libs.load()}}["libcurand.so.10"])
    """
    assert cuda_site.run(code).strip() == "this process"


def test_a_toolkit_on_the_loaders_path_will_do(copied_site) -> None:
    lib = copied_site.path / "nvidia" / "cufft" / "lib" / "libcufft.so.10"
    shutil.move(lib, copied_site.driver_folder)
    assert "libcufft.so.10=the system's loader" not in copied_site.run(LINK_PROVIDER, driver=False)
    code = (
        'from ortlaunch.ort import cuda_libs; print([f.origin for f in cuda_libs.load()].count("the system\'s loader"))'
    )
    assert copied_site.run(code).strip() == "1"


@pytest.mark.parametrize("driver", [True, False])
def test_they_are_loaded_before_onnxruntime_is_imported(copied_site, driver: bool) -> None:
    ortmodule = copied_site.path / "onnxruntime" / "training" / "ortmodule"
    ortmodule.mkdir(parents=True)
    # By it the training part is found.
    (ortmodule / "__init__.py").touch()
    (copied_site.path / "onnxruntime" / "__init__.py").write_text(
        "import ctypes, os\n"
        "try:\n"
        "    ctypes.CDLL('libcudnn.so.8', mode=os.RTLD_NOLOAD)\n"
        "    raise ImportError('they are there')\n"
        "except OSError:\n"
        "    raise ImportError('they are not there')\n"
    )
    code = """
    from ortlaunch.ort import session
    try:
        session.import_ortmodule()
    except ImportError as error:
        print(error)
    """
    last = copied_site.run(code, driver=driver).splitlines()[-1]
    assert last == ("they are there" if driver else "they are not there")
