"""The variables by which glibc's allocator of a worker does what `launcher.allocator` asks for."""

from __future__ import annotations

from ortlaunch.config.schema import Allocator, RunConfig

_KEEP = {
    # Else blocks of more than 32 MiB are mappings of their own: the kernel takes them back when they are freed, and
    # clears each page of the next one.
    "MALLOC_MMAP_MAX_": "0",
    # The end of the heap goes back to the kernel when more than this many bytes of it are free.
    "MALLOC_TRIM_THRESHOLD_": str(2**62),
}


def allocator_variables(config: RunConfig) -> dict[str, str]:
    """Returns the variables of a run's workers on the CPU; none where glibc's settings stay as they are.

    Args:
        config: the configuration.
    """
    return dict(_KEEP) if config.launcher.allocator is Allocator.keep else {}
