"""Peaks of devices by the names that CUDA gives them."""

from __future__ import annotations

import pytest
import torch

from ortlaunch.config.schema import Precision
from ortlaunch.metrics.peaks import peak_flops, peak_of


@pytest.mark.parametrize(
    ("name", "bf16", "fp16", "tf32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312, 312, 156),
        ("NVIDIA A100-PCIE-40GB", 312, 312, 156),
        ("NVIDIA A100 80GB PCIe", 312, 312, 156),
        ("NVIDIA H100 80GB HBM3", 989.4, 989.4, 494.7),
        ("NVIDIA H100 PCIe", 756, 756, 378),
        ("NVIDIA H100 NVL", 835.5, 835.5, 417.5),
        ("NVIDIA H200", 989.4, 989.4, 494.7),
        ("NVIDIA B200", 2250, 2250, 1100),
        ("NVIDIA L4", 121, 121, 60),
        ("NVIDIA L40S", 362.05, 362.05, 183),
        ("NVIDIA A10", 125, 125, 62.5),
        ("NVIDIA GeForce RTX 4090", 165.2, 165.2, 82.6),
        ("Tesla T4", None, 65, None),
        ("Tesla V100-SXM2-32GB", None, 125, None),
        ("NVIDIA Tesla V100-SXM2-16GB", None, 125, None),
        ("Tesla V100-PCIE-16GB", None, 112, None),
        ("Tesla V100S-PCIE-32GB", None, 130, None),
        # Names that look alike, and devices without a figure.
        ("NVIDIA A10G", None, None, None),
        ("Tesla V100-SXM2-32GB-LS", None, None, None),
        ("NVIDIA L40", None, None, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, None, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None, None),
        ("NVIDIA GH200 480GB", None, None, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None, None),
        ("NVIDIA GeForce GTX 1080", None, None, None),
    ],
)
def test_each_device_has_its_own_figure(name: str, bf16: float | None, fp16: float | None, tf32: float | None) -> None:
    def tera(precision: Precision, **options: bool) -> float | None:
        peak = peak_of(name, precision, **options)
        return None if peak is None else pytest.approx(peak / 1e12)

    assert tera(Precision.bf16) == bf16
    assert tera(Precision.fp16) == fp16
    assert tera(Precision.fp32, tf32=True) == tf32
    # Without TF32 such products run elsewhere, at a peak that no figure of ours is about.
    assert tera(Precision.fp32) is None


def test_a_processor_has_none() -> None:
    assert peak_flops(torch.device("cpu"), Precision.bf16) is None
