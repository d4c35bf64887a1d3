"""Sources that need no files of the user's: pysource, synthetic and digits."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import DigitsConfig, PysourceConfig, SyntheticConfig
from ortlaunch.data.loader import Loader
from ortlaunch.data.source import Share
from ortlaunch.data.sources import digits
from ortlaunch.data.sources.pysource import MAX_BYTES

Load = Callable[..., Loader]


def test_pysource_is_the_librarys_text_from_its_beginning() -> None:
    source = PysourceConfig(seq_len=4000).open(Share(0, 1, 0))
    text = bytes(source.dataset[0]["input_ids"].tolist())
    first = Path(sysconfig.get_paths()["stdlib"], "__future__.py").read_bytes()
    assert text.startswith(first[:4000])
    assert source.samples is not None
    assert 500 <= source.samples <= MAX_BYTES // 4000


def test_pysource_is_alike_on_all_ranks(load: Load) -> None:
    loaders = [load(PysourceConfig(), rank=rank, world_size=2) for rank in range(2)]
    assert loaders[0].fingerprint == loaders[1].fingerprint
    assert (loaders[0].kind, loaders[0].vocab_size, loaders[0].num_classes) == ("tokens", 256, None)


def test_synthetic_samples_are_a_function_of_seed_and_number(load: Load) -> None:
    cfg = SyntheticConfig(samples=6, vocab_size=11, seq_len=50)
    ids, again, other = (next(load(cfg, batch_size=6, seed=seed))["input_ids"] for seed in (3, 3, 4))
    assert torch.equal(ids, again)
    assert {tuple(row) for row in ids.tolist()}.isdisjoint(tuple(row) for row in other.tolist())
    assert len({tuple(row) for row in ids.tolist()}) == 6
    assert set(ids.flatten().tolist()) == set(range(11))
    assert load(cfg, seed=3).fingerprint != load(cfg, seed=4).fingerprint


def test_digits_are_standardised_images_with_labels(load: Load) -> None:
    loader = load(DigitsConfig(), batch_size=1797)
    batch = next(loader)
    assert batch["pixel_values"].shape == (1797, 1, 8, 8)
    assert batch["pixel_values"].dtype == torch.float32
    assert batch["pixel_values"].mean().abs() < 1e-4
    assert (batch["pixel_values"].std() - 1).abs() < 1e-4
    assert batch["labels"].dtype == torch.int64
    assert set(batch["labels"].tolist()) == set(range(10))
    assert (loader.kind, loader.vocab_size, loader.num_classes, loader.samples) == ("images", None, 10, 1797)


def test_digits_keep_image_and_label_together(load: Load) -> None:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    batch = next(load(DigitsConfig(), batch_size=20))
    for image, label in zip(batch["pixel_values"], batch["labels"], strict=True):
        levels = ((image[0] - image.min()) / (image.max() - image.min()) * 16).round().double().numpy()
        matches = (bunch.images == levels).all(axis=(1, 2))
        assert int(label) in bunch.target[matches]


def test_digits_are_resampled_to_the_size_asked_for(load: Load) -> None:
    small, large = (next(load(DigitsConfig(image_size=size))) for size in (8, 32))
    assert large["pixel_values"].shape == (2, 1, 32, 32)
    assert torch.equal(small["labels"], large["labels"])
    assert (large["pixel_values"].mean() - small["pixel_values"].mean()).abs() < 0.02


def test_digits_come_from_scikit_learns_table_or_from_its_own_loader(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    grey, target = digits._load()
    assert (grey.dtype, target.dtype) == (bunch.images.dtype, bunch.target.dtype)
    assert (grey == bunch.images).all() and (target == bunch.target).all()
    known = load(DigitsConfig()).fingerprint
    monkeypatch.setattr(digits, "find_spec", lambda name: ModuleSpec(name, None))
    assert load(DigitsConfig()).fingerprint == known


def test_digits_do_not_import_scikit_learn() -> None:
    """The import would take 1.7 s of each worker's start."""
    script = (
        "import sys; from ortlaunch.data.sources import digits; digits._load(); assert 'sklearn' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=200)


def test_digits_without_scikit_learn_name_the_extra(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(RequestError, match=r"pip install 'ortlaunch\[digits\]'"):
        load(DigitsConfig())


def test_a_broken_scikit_learn_is_not_called_missing(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """With too little address space (ulimit -v), the import of an installed package fails like this."""
    broken = ModuleType("sklearn")

    def absent(name: str) -> None:
        raise ImportError(f"{name}.so: failed to map segment from shared object")

    broken.__getattr__ = absent  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "sklearn.datasets", broken)
    monkeypatch.setattr(digits, "find_spec", lambda name: ModuleSpec(name, None))
    with pytest.raises(ImportError, match="failed to map segment"):
        load(DigitsConfig())
