"""Image files in folders of classes, or listed in a csv."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from ortlaunch.base.targets import with_arguments
from ortlaunch.config.bounds import number
from ortlaunch.config.options import option
from ortlaunch.config.schema import DataConfig
from ortlaunch.data.image_files import class_names

if TYPE_CHECKING:
    from ortlaunch.data.source import Share, Source


@option("data")
@dataclass
class ImagesConfig(DataConfig):
    """Image files in folders of classes, or listed in a csv."""

    name: str = "images"
    path: str = MISSING
    """A folder with `train/` and `val/`, each with a folder for each class; a folder of classes, or a csv with the
    columns path and label, of both of which data.eval_fraction is held out."""
    image_size: int = number(224, least=1)
    """Height and width, in pixels, to which the default transforms bring an image."""
    train_transform: list[Any] = field(default_factory=list)
    """Transforms of torchvision.transforms.v2 by name, with arguments as `{name: RandomResizedCrop, size: 32}`, or
    your own as `module:callable`. [] takes a random crop, flips it and normalizes it."""
    eval_transform: list[Any] = field(default_factory=list)
    """The same for evaluation. [] resizes an image, takes its middle and normalizes it."""
    mixup: float = number(0.0, least=0)
    """Alpha of mixup: each training image is blended with another of its batch, and so are their labels; 0 does not."""
    cutmix: float = number(0.0, least=0)
    """Alpha of CutMix: a rectangle of each training image comes from another of its batch. With mixup, a batch gets
    one of the two by chance."""
    label_smoothing: float = number(0.0, least=0, below=1)
    """Share of each training label that is spread evenly over all classes."""
    drop_last: bool = False

    def check(self) -> None:
        class_names(self.path)
        self.transforms()

    def transforms(self) -> list[tuple[str, str]]:
        """The key and the name of each transform."""
        keys = ("data.train_transform", "data.eval_transform")
        entries = (self.train_transform, self.eval_transform)
        return [(key, with_arguments(one, key, "name")[0]) for key, of in zip(keys, entries, strict=True) for one in of]

    def classes(self) -> int:
        return len(class_names(self.path))

    def open(self, share: Share) -> Source:
        from ortlaunch.data.images import open_images

        return open_images(self)
