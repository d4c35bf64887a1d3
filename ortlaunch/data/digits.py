"""scikit-learn's images of handwritten digits."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import Dataset

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import DigitsConfig
from ortlaunch.data.source import Share, Source, digest


class Images(Dataset[dict[str, Any]]):
    """Images [N, C, H, W] and their labels [N], both in memory."""

    def __init__(self, pixels: torch.Tensor, labels: torch.Tensor) -> None:
        self._pixels = pixels
        self._labels = labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixel_values": self._pixels[index], "labels": self._labels[index]}


def open_digits(cfg: DigitsConfig, share: Share) -> Source:
    """Loads 1,797 grey images, scaled to mean 0 and standard deviation 1 over the set, as [1, H, W] float32.

    Raises:
        RequestError: scikit-learn is missing, or data.image_size is below 1.
    """
    if cfg.image_size < 1:
        raise RequestError(f"data.image_size={cfg.image_size}: must be at least 1 pixel")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise RequestError("data=digits needs scikit-learn: pip install 'ortlaunch[digits]'") from error
    bunch = load_digits()
    pixels = torch.from_numpy(bunch.images).float().unsqueeze(1)
    pixels = (pixels - pixels.mean()) / pixels.std()
    if cfg.image_size != pixels.shape[-1]:
        size = (cfg.image_size, cfg.image_size)
        pixels = functional.interpolate(pixels, size=size, mode="bilinear", align_corners=False)
    labels = torch.from_numpy(bunch.target).long()
    fingerprint = digest(str(cfg.image_size), bunch.images, bunch.target)
    classes = len(bunch.target_names)
    return Source(Images(pixels, labels), "images", "data=digits", fingerprint, num_classes=classes)
