"""scikit-learn's images of handwritten digits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ortlaunch.base.errors import RequestError
from ortlaunch.base.modules import is_missing
from ortlaunch.config.bounds import number
from ortlaunch.config.options import option
from ortlaunch.config.schema import DataConfig

if TYPE_CHECKING:
    from ortlaunch.data.source import Share, Source


@option("data")
@dataclass
class DigitsConfig(DataConfig):
    """scikit-learn's 1,797 real images of handwritten digits, 10 classes."""

    name: str = "digits"
    image_size: int = number(8, least=1)
    """Height and width in pixels. For other sizes than the original 8, images are resampled bilinearly."""

    def open(self, share: Share) -> Source:
        """Loads 1,797 grey images as float32 [1, H, W], scaled to mean 0 and standard deviation 1 over the set.

        Raises:
            RequestError: scikit-learn is missing.
        """
        import torch
        from torch.nn import functional
        from torch.utils.data import StackDataset

        from ortlaunch.data.source import Source, digest

        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            if not is_missing("sklearn", error):
                raise
            raise RequestError("data=digits needs scikit-learn: pip install 'ortlaunch[digits]'") from error
        bunch = load_digits()
        pixels = torch.from_numpy(bunch.images).float().unsqueeze(1)
        pixels = (pixels - pixels.mean()) / pixels.std()
        if self.image_size != pixels.shape[-1]:
            size = (self.image_size, self.image_size)
            pixels = functional.interpolate(pixels, size=size, mode="bilinear", align_corners=False)
        labels = torch.from_numpy(bunch.target).long()
        fingerprint = digest(str(self.image_size), bunch.images, bunch.target)
        columns: dict[str, Any] = {"pixel_values": pixels, "labels": labels}
        images: Any = StackDataset(**columns)
        return Source(images, "images", "data=digits", fingerprint, num_classes=len(bunch.target_names))
