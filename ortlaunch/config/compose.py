"""Public name of composing a configuration, for programs: see `ortlaunch.compose.hydra_tree`."""

from ortlaunch.compose.hydra_tree import (
    compose,
)

__all__ = [
    "compose",
]
