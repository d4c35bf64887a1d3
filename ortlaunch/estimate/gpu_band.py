"""From the traced tensors of a worker to the memory of its GPU: a low, a middle and a high figure for each phase.

docs/estimate.md has the measurements that the constants are from.
"""

from __future__ import annotations

from collections.abc import Mapping

from ortlaunch.launch.memory.band import MIB, Band

CONTEXT = Band(350 * MIB, 1330 * MIB, 2048 * MIB)
"""What a process holds on its GPU beside its tensors. On an H200 (torch 2.11, CUDA 13, NCCL 2.28) CUDA's context took
619 MiB, kernels of cuBLAS and cuDNN 84, cuBLAS's workspaces 64, and NCCL 556 for one worker. Other GPUs need less for
their context, and NCCL takes more where it has others to talk to."""
_BELOW, _ABOVE = 0.05, 0.09
"""What torch allocated was at most 3.7 % below the trace's figure. What it reserved was at most 5.6 % above that, or
8.8 % where the optimizer's state is in the host's memory."""
_LEAST = 0.5
"""The least that fused kernels may keep, as a share of what those of eager PyTorch do."""
_MOST = {"compile": 1.6, "ort": 2.0}
"""The most that these backends may reserve, beside what eager PyTorch is estimated to. Under torch.compile BERT in fp32
reserved 1.34 times that (8.7 GiB); of ONNX Runtime nothing was measured."""


def gpu_band(backend: str, use: Mapping[str, int]) -> Band:
    """The memory of a GPU in one phase.

    Args:
        backend: the backend's name.
        use: the phase's ``tensors``, ``process`` and ``most`` in bytes: what eager PyTorch has allocated, what its
            allocator has reserved for that, and the most that it may have reserved.
    """
    tensors, reserved, most = (use[name] for name in ("tensors", "process", "most"))
    # Before it fails, the allocator returns what it has reserved and not given out.
    eager = Band(
        CONTEXT.low + int((1 - _BELOW) * tensors),
        CONTEXT.middle + reserved,
        CONTEXT.high + int((1 + _ABOVE) * most),
    )
    if backend == "eager":
        return eager
    low = CONTEXT.low + int(_LEAST * tensors)
    return Band(low, eager.middle, CONTEXT.high + int(_MOST[backend] * most))
