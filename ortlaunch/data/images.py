"""Reads images by PIL, and changes them by torchvision's transforms, drawn for each epoch and sample alike anywhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ortlaunch.base.errors import RequestError
from ortlaunch.base.modules import add_working_folder
from ortlaunch.base.nearest import nearest
from ortlaunch.base.targets import check_arguments, load_target, with_arguments
from ortlaunch.data.batch import LABELS, PROBABILITIES, Batch
from ortlaunch.data.image_files import Images, find_images
from ortlaunch.data.source import Source, digest

if TYPE_CHECKING:
    from ortlaunch.data.sources.images import ImagesConfig

PIXELS = "pixel_values"
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's pixels; what pretrained models of timm and torchvision take as a rule."""
_MARGIN = 1.14
"""How much larger than its middle an image of an evaluation is made, as for ImageNet: 256 for 224."""
_OF_BATCHES = {"MixUp": "data.mixup", "CutMix": "data.cutmix"}

Transform = Callable[[Any], Any]


@dataclass(frozen=True)
class _Image:
    """A sample, with its file for messages."""

    pixels: torch.Tensor
    label: int
    path: str


class ImageFiles(Dataset[_Image]):
    """Images in files, changed by a transform, which may draw random numbers."""

    def __init__(self, images: Images, transform: Transform) -> None:
        self._folder = str(images.folder)
        # Loader processes share an array, and would each copy a list.
        self._paths = np.array([os.fsencode(path) for path in images.paths])
        self._labels = np.array(images.labels)
        self._transform = transform

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> _Image:
        path = os.path.join(self._folder, os.fsdecode(self._paths[index]))
        return _Image(self._transform(_read(path)), int(self._labels[index]), path)


def open_images(cfg: ImagesConfig) -> Source:
    """Lists the images of a path; they are read during training.

    Raises:
        RequestError: torchvision is missing, there are no images, or a transform is unknown.
    """
    v2 = _transforms()
    found = find_images(cfg.path)
    origin = f"data.path={cfg.path}"
    training = _transform(v2, cfg.train_transform or _default(v2, cfg.image_size), "data.train_transform")
    evaluating = _transform(v2, cfg.eval_transform or _still(v2, cfg.image_size), "data.eval_transform")
    trained, held_out = found.train, found.held_out
    if held_out is None:
        trained, held_out = _divided(trained, cfg.eval_fraction)
    else:
        held_out = _shuffled(held_out)
    if not trained.paths:
        raise RequestError(f"{origin}: data.eval_fraction={cfg.eval_fraction} leaves no image to train on: lower it")
    names = "\0".join(found.train.paths + (found.held_out.paths if found.held_out is not None else []))
    return Source(
        ImageFiles(trained, training),
        "images",
        origin,
        digest("images", names, np.array(found.train.labels), "\0".join(found.classes), str(len(trained.paths))),
        num_classes=len(found.classes),
        labels_vary=False,
        held_out=ImageFiles(held_out, evaluating),
        collate=_collate,
        metrics=("accuracy",),
        draws=True,
        mixing=_mixing(v2, cfg, len(found.classes)),
    )


def _transforms() -> ModuleType:
    try:
        import PIL  # noqa: F401
        from torchvision.transforms import v2
    except ImportError as error:
        raise RequestError(f"data=images needs pillow and torchvision ({error}): {_INSTALL}") from error
    except RuntimeError as error:
        # The build of another torch: "operator torchvision::nms does not exist".
        raise RequestError(
            f"data=images: torchvision does not fit the installed torch ({error}): {_INSTALL}"
        ) from error
    module: ModuleType = v2
    return module


_INSTALL = "pip install 'ortlaunch[vision]', torchvision from the index that torch came from"


def _default(v2: ModuleType, size: int) -> list[Any]:
    """A random piece of the image, perhaps mirrored."""
    return [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), *_normalized(v2)]


def _still(v2: ModuleType, size: int) -> list[Any]:
    """The middle of the image."""
    return [v2.Resize(round(size * _MARGIN)), v2.CenterCrop(size), *_normalized(v2)]


def _normalized(v2: ModuleType) -> list[Any]:
    return [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, DEVIATION)]


def _transform(v2: ModuleType, entries: Sequence[Any], key: str) -> Transform:
    """All transforms in one, whose result is a float32 tensor; pixels as whole numbers become those from 0 to 1."""
    steps = [entry if callable(entry) else _made(v2, entry, key) for entry in entries]

    def changed(image: Any) -> torch.Tensor:
        for step in steps:
            image = step(image)
        if not isinstance(image, torch.Tensor):
            image = v2.functional.to_image(image)
        pixels: torch.Tensor = v2.functional.to_dtype(image, torch.float32, scale=True)
        return pixels.as_subclass(torch.Tensor)

    return changed


def _made(v2: ModuleType, entry: Any, key: str) -> Transform:
    name, arguments = with_arguments(entry, key, "name")
    where = f"{key}={name}"
    if name in _OF_BATCHES:
        raise RequestError(f"{where}: takes a batch, not an image: give {_OF_BATCHES[name]}=ALPHA in its place")
    if ":" in name:
        add_working_folder()
        made = load_target(name, where)
        if not isinstance(made, type) and not arguments:
            return _callable(made, where)
    else:
        known = [known for known, one in vars(v2).items() if isinstance(one, type) and issubclass(one, v2.Transform)]
        if name not in known:
            close = nearest(name, known)
            hint = f" Did you mean {close}?" if close else ""
            raise RequestError(f"{where}: torchvision.transforms.v2 has no transform of this name.{hint}")
        made = getattr(v2, name)
    check_arguments(made, arguments, name, key)
    if isinstance(dtype := arguments.get("dtype"), str):
        arguments["dtype"] = getattr(torch, dtype, dtype)
    try:
        return _callable(made(**arguments), where)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{where}: {error}") from error


def _callable(made: Any, where: str) -> Transform:
    if not callable(made):
        raise RequestError(
            f"{where}: a {type(made).__name__}, which takes no image: give a function or a class of them"
        )
    transform: Transform = made
    return transform


def _read(path: str) -> Any:
    """The image of a file, in colours."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except FileNotFoundError as error:
        raise RequestError(f"{path}: no such file, which data.path lists") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # The file system's.
        said = str(error).replace(f" {path!r}", "")
        raise RequestError(f"{path}: no image that can be read ({said}): mend the file, or take it away") from error


def _collate(samples: list[_Image]) -> Batch:
    """Stacks images of one shape.

    Raises:
        RequestError: two differ.
    """
    first = samples[0]
    for sample in samples:
        if sample.pixels.shape != first.pixels.shape:
            raise RequestError(
                f"{sample.path} is an image of shape {tuple(sample.pixels.shape)} after its transforms, and "
                f"{first.path} one of {tuple(first.pixels.shape)}: let data.train_transform and data.eval_transform "
                "bring them to one size, as by {name: Resize, size: [32, 32]}"
            )
    labels = torch.tensor([sample.label for sample in samples])
    return {PIXELS: torch.stack([sample.pixels for sample in samples]), LABELS: labels}


def _mixing(v2: ModuleType, cfg: ImagesConfig, classes: int) -> Callable[[Batch], Batch] | None:
    """What blends the images of a batch and their labels; None if nothing does."""
    kinds = {v2.MixUp: cfg.mixup, v2.CutMix: cfg.cutmix}
    mixes = [kind(alpha=alpha, num_classes=classes) for kind, alpha in kinds.items() if alpha]
    if not mixes and not cfg.label_smoothing:
        return None
    mix = v2.RandomChoice(mixes) if mixes else None

    def mixed(batch: Batch) -> Batch:
        pixels, labels = batch[PIXELS], batch[LABELS]
        if mix is not None:
            pixels, shares = mix(pixels, labels)
        else:
            shares = torch.nn.functional.one_hot(labels, classes)
        return {PIXELS: pixels, PROBABILITIES: shares.float().lerp(torch.tensor(1 / classes), cfg.label_smoothing)}

    return mixed


def _divided(images: Images, fraction: float) -> tuple[Images, Images]:
    """The images to train on and those held out: of each class the same share, in an order that is always the same."""
    labels = np.array(images.labels)
    order = _order(len(labels))
    held_out = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        of_class = order[labels[order] == label]
        held_out[of_class[: int(len(of_class) * fraction)]] = True
    return _chosen(images, np.flatnonzero(~held_out)), _chosen(images, order[held_out[order]])


def _shuffled(images: Images) -> Images:
    """The first ones of them are of all classes, for an evaluation of a few."""
    return _chosen(images, _order(len(images.labels)))


def _order(count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).permutation(count)


def _chosen(images: Images, numbers: np.ndarray[Any, Any]) -> Images:
    places = numbers.tolist()
    return Images(images.folder, [images.paths[at] for at in places], [images.labels[at] for at in places])
