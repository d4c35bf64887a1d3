"""scikit-learn's images of handwritten digits."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortlaunch.base.errors import RequestError
from ortlaunch.config.bounds import number
from ortlaunch.config.options import option
from ortlaunch.config.schema import DataConfig

if TYPE_CHECKING:
    import numpy as np

    from ortlaunch.data.source import Share, Source

_CLASSES = 10


@option("data")
@dataclass
class DigitsConfig(DataConfig):
    """scikit-learn's 1,797 real images of handwritten digits, 10 classes."""

    name: str = "digits"
    image_size: int = number(8, least=1)
    """Height and width in pixels. For other sizes than the original 8, images are resampled bilinearly."""

    def classes(self) -> int:
        return _CLASSES

    def open(self, share: Share) -> Source:
        """Loads 1,797 grey images as float32 [1, H, W], scaled to mean 0 and standard deviation 1 over the set.

        Raises:
            RequestError: scikit-learn is missing.
        """
        import torch
        from torch.nn import functional
        from torch.utils.data import StackDataset

        from ortlaunch.data.source import Source, digest

        grey, target = _load()
        pixels = torch.from_numpy(grey).float().unsqueeze(1)
        pixels = (pixels - pixels.mean()) / pixels.std()
        if self.image_size != pixels.shape[-1]:
            size = (self.image_size, self.image_size)
            pixels = functional.interpolate(pixels, size=size, mode="bilinear", align_corners=False)
        labels = torch.from_numpy(target).long()
        fingerprint = digest(str(self.image_size), grey, target)
        columns: dict[str, Any] = {"pixel_values": pixels, "labels": labels}
        images: Any = StackDataset(**columns)
        return Source(images, "images", "data=digits", fingerprint, num_classes=_CLASSES, labels_vary=False)


def _load() -> tuple[np.ndarray, np.ndarray]:
    """Returns scikit-learn's images (float64 [1797, 8, 8], 0 to 16) and their digits (int64 [1797]).

    The package holds them as one compressed table of 64 grey values and the digit in each line. The table is read
    without an import of scikit-learn, which takes 1.7 s of each worker's start. A release that keeps the table
    elsewhere is imported.
    """
    import numpy as np

    spec = find_spec("sklearn")
    if spec is None:
        raise RequestError("data=digits needs scikit-learn: pip install 'ortlaunch[digits]'")
    for folder in spec.submodule_search_locations or ():
        file = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            with gzip.open(file, "rt") as text:
                table = np.loadtxt(text, delimiter=",")
            return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return bunch.images, bunch.target
