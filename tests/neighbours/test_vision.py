"""Images in folders and the models of timm and torchvision, against plain torch in one process."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from ortlaunch.base.errors import RequestError
from ortlaunch.data.loader import Loader, build_loader
from ortlaunch.data.position import Position
from ortlaunch.data.source import mix
from ortlaunch.data.sources.images import ImagesConfig
from tests.integration.test_documentation import commands, files
from tests.neighbours.conftest import FOLDER
from tests.support.environment import environment
from tests.support.runs import Recorded

pytestmark = pytest.mark.skipif(not FOLDER, reason="make test-neighbours installs the packages")

CLASSES, EACH = 3, 11
DRAWN = [{"name": "RandomResizedCrop", "size": 32, "antialias": True}, "RandomHorizontalFlip"]
TYPED = "[{name: RandomResizedCrop, size: 32, antialias: true}, RandomHorizontalFlip]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of three classes, each of another colour, of different sizes."""
    from PIL import Image

    path = tmp_path_factory.mktemp("images")
    draw = np.random.default_rng(0)
    for label in range(CLASSES):
        (path / f"class{label}").mkdir()
        for number in range(EACH):
            pixels = draw.integers(0, 120, (36 + number, 40, 3), dtype=np.uint8)
            pixels[..., label] += 8
            Image.fromarray(pixels).save(path / f"class{label}" / f"{number:02}.png")
    return path


def loader(path: Path, rank: int = 0, world_size: int = 1, *, size: int = 4, at: Position | None = None, **keys: Any):
    keys = {"train_transform": DRAWN, "eval_fraction": 0.2, "image_size": 32} | keys
    config = ImagesConfig(path=str(path), **keys)
    return build_loader(config, batch_size=size, rank=rank, world_size=world_size, seed=5, start=at)


def rows(source: Loader, batches: int) -> list[bytes]:
    """The pixels of each sample that counts."""
    with source:
        return [row.numpy().tobytes() for _ in range(batches) for row in next(source)["pixel_values"][: source.counted]]


def test_what_is_drawn_is_of_the_sample_whoever_reads_it(folder: Path) -> None:
    """27 images in 7 steps of an epoch, the last of which is short: with workers, processes and after a resume."""
    alone = rows(loader(folder), 14)
    assert len(set(alone)) == 54, "other pieces in the second epoch"
    assert rows(loader(folder, workers=2), 14) == alone
    assert rows(loader(folder, size=27), 2) == alone
    apart = [rows(loader(folder, rank, 3, workers=rank), 6) for rank in range(3)]
    assert sorted(row for one in apart for row in one) == sorted(alone)
    with loader(folder) as first:
        for _ in range(9):
            next(first)
    assert rows(loader(folder, at=first.position), 5) == alone[27 + 8 :]


def test_held_out_images_are_of_all_classes_and_never_trained_on(folder: Path) -> None:
    """Each comes once, unchanged by chance."""
    held_out = [one for rank in range(2) for one in loader(folder, rank, 2).held_out(100)]
    labels = torch.cat([one.batch["labels"][: one.samples] for one in held_out])
    assert labels.bincount().tolist() == [2, 2, 2]
    again = [one for rank in range(2) for one in loader(folder, rank, 2).held_out(100)]
    assert all(
        torch.equal(a.batch["pixel_values"], b.batch["pixel_values"]) for a, b in zip(held_out, again, strict=True)
    )
    still = [{"name": "Resize", "size": [8, 8]}]
    plain = rows(loader(folder, train_transform=still, eval_transform=still), 7)
    kept = [one.batch["pixel_values"] for one in loader(folder, eval_transform=still).held_out(100)]
    assert len({*plain, *(row.numpy().tobytes() for row in torch.cat(kept))}) == 33


def test_train_and_val_and_a_csv_give_the_same_images(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "train")
    shutil.copytree(folder / "class1", tmp_path / "val" / "class1")
    paths = sorted(folder.rglob("*.png"))
    table = tmp_path / "all.csv"
    table.write_text("path,label\n" + "".join(f"{one},{one.parent.name}\n" for one in paths))
    whole = rows(loader(tmp_path), 9)
    assert rows(loader(table, eval_fraction=0.0), 9) == whole and len(whole) == 33
    labels = torch.cat([one.batch["labels"] for one in loader(tmp_path).held_out(100)])
    assert labels.tolist() == [1] * EACH


def test_mixed_batches_are_drawn_alike_and_their_labels_are_shares(folder: Path) -> None:
    keys: dict[str, Any] = {"mixup": 0.4, "cutmix": 1.0, "label_smoothing": 0.1}

    def shares(batches: int, **more: Any) -> torch.Tensor:
        with loader(folder, **keys, **more) as source:
            return torch.cat([next(source)["label_probabilities"] for _ in range(batches)])

    first = shares(14)
    assert torch.equal(shares(14, workers=2), first)
    assert torch.allclose(first.sum(1), torch.ones(54)) and first.min() >= 0.1 / CLASSES - 1e-6
    assert ((first > 0.1).sum(1) > 1).any(), "some are of two classes"
    with loader(folder, **keys) as source:
        for _ in range(3):
            next(source)
    assert torch.equal(shares(11, at=source.position), first[12:])
    assert "labels" in loader(folder, **keys).held_out(4)[0].batch


def test_smoothed_labels_give_the_loss_that_torch_has_for_them(folder: Path) -> None:
    from ortlaunch.models.task import loss_of

    logits = torch.randn(4, CLASSES, generator=torch.Generator().manual_seed(0))
    with loader(folder) as plain, loader(folder, label_smoothing=0.2) as smooth:
        expected = functional.cross_entropy(logits, next(plain)["labels"], label_smoothing=0.2)
        assert loss_of(logits, next(smooth)).item() == pytest.approx(expected.item(), rel=1e-6)


def broken(kind: str, folder: Path, path: Path) -> dict[str, Any]:
    """Copies the images, and damages the copy; returns further keys."""
    shutil.copytree(folder, path, dirs_exist_ok=True)
    still = ["ToImage"]
    if kind == "not an image":
        (path / "class0" / "00.png").write_text("no picture")
    elif kind == "empty class":
        (path / "nothing").mkdir()
    elif kind == "column":
        (path / "all.csv").write_text("paths,label\na.png,1\n")
    elif kind == "missing":
        (path / "all.csv").write_text("path,label\na.png,1\n")
    return {
        "sizes": {"train_transform": still},
        "name": {"train_transform": ["RandomResizeCrop"]},
        "argument": {"train_transform": [{"name": "Resize", "sise": 3}]},
        "batch": {"train_transform": ["MixUp"]},
        "class": {"train_transform": ["math:pi"]},
    }.get(kind, {})


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ("not an image", r"class0/00\.png: no image that can be read"),
        ("empty class", r"/nothing holds no image .*remove the folder"),
        ("column", r"all\.csv: has no column path \(is it paths\?\).*let it name path and label"),
        ("missing", r"/a\.png: no such file, which data\.path lists"),
        ("sizes", r"class\d/\d+\.png is an image of shape \(3, \d+, 40\).*bring them to one size"),
        ("name", r"data\.train_transform=RandomResizeCrop: .*Did you mean RandomResizedCrop\?"),
        ("argument", r"data\.train_transform\.sise: Resize has no parameter.*Did you mean data\.train_transform\.size"),
        ("batch", r"data\.train_transform=MixUp: takes a batch.*data\.mixup=ALPHA"),
        ("class", r"data\.train_transform=math:pi: .*"),
    ],
)
def test_what_is_wrong_is_said_with_its_file(folder: Path, tmp_path: Path, kind: str, pattern: str) -> None:
    keys = broken(kind, folder, tmp_path)
    path = tmp_path / "all.csv" if kind in ("column", "missing") else tmp_path
    keys = {"train_transform": [{"name": "Resize", "size": [8, 8]}]} | keys
    with pytest.raises(RequestError, match=pattern):
        rows(loader(path, eval_fraction=0.0, **keys), 9)


class Launched(Recorded):
    """A run of the command, beside the packages."""

    def __init__(self, folder: Path, *words: str) -> None:
        variables = environment()
        variables["PYTHONPATH"] += os.pathsep + FOLDER
        short = (
            "device=cpu",
            "tracking=none",
            "train.log_every=1",
            "launcher.threads=1",
            f"run_root={folder / 'runs'}",
        )
        command = [sys.executable, "-m", "ortlaunch", *words, *short]
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stdout + done.stderr
        self.stdout = done.stdout

    @property
    def run_dir(self) -> Path:
        return Path(self.stdout.rpartition("run folder: ")[2].split()[0])


def plain_losses(folder: Path, steps: int, size: int) -> list[float]:
    """A loop by hand, with its own reading of the files; each image draws by seed 0, its epoch and its number."""
    import timm
    from PIL import Image
    from torchvision.transforms import v2

    drawn = v2.Compose([v2.RandomResizedCrop(32, antialias=True), v2.RandomHorizontalFlip(), v2.ToImage()])
    files = sorted(folder.rglob("*.png"))
    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=32, num_classes=CLASSES).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses: list[float] = []
    for epoch in count():
        order = torch.randperm(len(files), generator=torch.Generator().manual_seed(mix(0) + epoch)).tolist()
        for begin in range(0, len(order), size):
            pixels, labels = [], []
            for number in order[begin : begin + size]:
                torch.manual_seed(mix(mix(0, epoch), number))
                pixels.append(drawn(Image.open(files[number])) / 255)
                labels.append(int(files[number].parent.name[-1]))
            loss = functional.cross_entropy(model(torch.stack(pixels)), torch.tensor(labels))
            losses.append(loss.item())
            if len(losses) == steps:
                return losses
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    raise AssertionError


TWO, THREE = (
    ("launcher.workers_per_node=2", "train.batch_size=3"),
    ("launcher.workers_per_node=3", "train.batch_size=2"),
)
CURVES: dict[str, tuple[tuple[str, ...], float]] = {
    "eager, two workers": (("backend=eager", *TWO), 1e-6),
    "eager, three workers": (("backend=eager", *THREE), 1e-6),
    "ort, two workers": (("backend=ort", *TWO), 1e-5),
    "ZeRO 2, two workers": (("trainer=deepspeed", "backend=eager", *TWO), 1e-6),
}


@pytest.mark.parametrize(
    "name", [next(iter(CURVES)), *(pytest.param(name, marks=pytest.mark.nightly) for name in list(CURVES)[1:])]
)
def test_curves_are_those_of_a_plain_loop(folder: Path, tmp_path: Path, name: str) -> None:
    """33 images in steps of 6: the last one of an epoch has 3, and is their mean."""
    words, allowed = CURVES[name]
    model = ("model=timm", "model.params.name=test_vit", "model.params.img_size=32")
    data = (f"data.path={folder}", "data.eval_fraction=0", f"data.train_transform={TYPED}", "train.steps=50")
    run = Launched(tmp_path, *model, *data, *words, "optimizer=sgd", "optimizer.lr=0.05")
    assert list(run.losses.values()) == pytest.approx(plain_losses(folder, 50, 6), rel=allowed, abs=1e-7)


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_the_commands_of_the_page_work(tmp_path: Path, number: int) -> None:
    text = files("docs/vision.md")["write.py"]
    subprocess.run([sys.executable, "-c", text], cwd=tmp_path, check=True, timeout=100)
    words = shlex.split(commands("docs/vision.md")[number])[1:]
    run = Launched(tmp_path, *words, "train.steps=2")
    assert "accuracy" in run.stdout
