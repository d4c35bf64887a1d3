"""What the tests on a GPU share: the reason why they skip, and whole runs on CUDA."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.gpu.proof.budget import Budget
from tests.gpu.proof.numbers import SMALL
from tests.gpu.proof.proof import RUNS, Proof, Training

Train = Callable[..., Training]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips all of this folder where there is no GPU, with the reason."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=f"torch {torch.__version__} sees no CUDA device"))


@pytest.fixture(scope="session")
def ort_on_cuda() -> None:
    """Skips where ONNX Runtime cannot run on this machine's GPU."""
    from ortlaunch.base.errors import RequestError
    from ortlaunch.ort import cuda_libs

    try:
        cuda_libs.require()
    except RequestError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Trains on CUDA with these keys, once however many tests ask for it; takes the run of a proof that has it."""
    folder = Path(os.environ.get(RUNS) or tmp_path_factory.mktemp("runs"))
    return Proof("cuda", torch.cuda.device_count(), 1, folder, Budget(3600)).train


@pytest.fixture(scope="session")
def train_small(train: Train) -> Train:
    """Trains the small model without dropout of the proof's rows about numbers."""
    return partial(train, *SMALL)
