"""Peak operations per second of devices: dense, from the vendors' data sheets; unknown devices have none."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from ortlaunch.config.schema import Precision

_TERA = 1e12


@dataclass(frozen=True)
class Peak:
    """The peak of one device in 10^12 operations per second, without sparsity and with sums in fp32, as in training.

    None stands for a precision that the device does not have or whose peak is not known.
    """

    fp16: float
    bf16: float | None = None
    tf32: float | None = None


PEAKS: dict[str, Peak] = {
    r"V100S-PCIE-\d+GB": Peak(fp16=130),
    r"V100-PCIE-\d+GB": Peak(fp16=112),
    r"V100-SXM\d-\d+GB": Peak(fp16=125),
    r"T4": Peak(fp16=65),
    r"A100-(SXM4|PCIE)-\d+GB|A100 80GB PCIe": Peak(fp16=312, bf16=312, tf32=156),
    r"A10": Peak(fp16=125, bf16=125, tf32=62.5),
    r"L4": Peak(fp16=121, bf16=121, tf32=60),
    r"L40S": Peak(fp16=362.05, bf16=362.05, tf32=183),
    r"GeForce RTX 4090": Peak(fp16=165.2, bf16=165.2, tf32=82.6),
    r"H100 PCIe": Peak(fp16=756, bf16=756, tf32=378),
    r"H100 NVL": Peak(fp16=835.5, bf16=835.5, tf32=417.5),
    r"H100 80GB HBM3": Peak(fp16=989.4, bf16=989.4, tf32=494.7),
    r"H200": Peak(fp16=989.4, bf16=989.4, tf32=494.7),
    r"B200": Peak(fp16=2250, bf16=2250, tf32=1100),
}
"""The keys match the whole name that CUDA gives the device, without the vendor's. Similar names belong to other devices
(A10G, V100-SXM2-32GB-LS, H100 slices of MIG, RTX 4090 Laptop) and get none. The source is NVIDIA's data sheet
of each, of the GeForce the Ada GPU Architecture white paper (FP32 accumulate); figures with sparsity are halved."""


def peak_flops(device: torch.device, precision: Precision, *, tf32: bool = False) -> float | None:
    """Returns the device's peak in operations per second at this precision; None if it is not known.

    Args:
        device: the device of the model.
        precision: precision of the model's matrix products.
        tf32: whether fp32 products run as TF32.
    """
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device), precision, tf32=tf32)


def peak_of(name: str, precision: Precision, *, tf32: bool = False) -> float | None:
    """Returns the same as `peak_flops`, by the device's name."""
    short = re.sub(r"^(NVIDIA )?(Tesla )?", "", name)
    peak = next((peak for pattern, peak in PEAKS.items() if re.fullmatch(pattern, short)), None)
    if peak is None:
        return None
    of_precision = {Precision.fp16: peak.fp16, Precision.bf16: peak.bf16, Precision.fp32: peak.tf32 if tf32 else None}
    tera = of_precision[precision]
    return tera * _TERA if tera is not None else None
