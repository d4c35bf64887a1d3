"""Which backends a run with ``backend=auto`` may have, found without importing torch."""

from __future__ import annotations

import dataclasses

from ortlaunch.config.backends import why_no_ort
from ortlaunch.config.devices import resolve_device
from ortlaunch.config.precisions import BACKENDS, Cell, cell_name
from ortlaunch.config.schema import (
    AutoConfig,
    BackendConfig,
    CompileConfig,
    Config,
    EagerConfig,
    LocalConfig,
    OrtConfig,
)

_PLAIN: dict[str, type[BackendConfig]] = {"eager": EagerConfig, "compile": CompileConfig, "ort": OrtConfig}


def plain_backend(name: str) -> BackendConfig:
    """The configuration of a backend with its default keys, as ``backend=auto`` takes it."""
    return _PLAIN[name]()


def is_plain(backend: BackendConfig) -> bool:
    """Whether a configured backend has its default keys."""
    return backend.name in _PLAIN and backend == plain_backend(backend.name)


def refused(config: Config, *, has_packages: bool = True) -> dict[str, str]:
    """The backends that cannot run a configuration by the rules or for want of a package, with the reason.

    Args:
        config: the run's configuration.
        has_packages: whether the workers find the packages that this Python finds. Otherwise none counts as missing.
    """
    device, trainer = resolve_device(config.device), cell_name(config.trainer)
    found = {}
    for name in BACKENDS:
        refusal = Cell(name, trainer, config.train.precision, device).refusal
        if refusal is not None:
            found[name] = refusal.partition(":")[0].partition(". ")[0]
    if has_packages and "ort" not in found and (why := why_no_ort("it")) is not None:
        found["ort"] = why
    return found


def possible(config: Config) -> tuple[Config, ...]:
    """The configurations that a run may turn out to have: one for each candidate of ``backend=auto``, else its own."""
    if not isinstance(config.backend, AutoConfig):
        return (config,)
    without = refused(config, has_packages=isinstance(config.launcher, LocalConfig))
    names = [name for name in BACKENDS if name not in without]
    return tuple(dataclasses.replace(config, backend=plain_backend(name)) for name in names)
