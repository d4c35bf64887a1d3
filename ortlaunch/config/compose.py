"""The public name of the function that composes a configuration; see `ortlaunch.compose.hydra_tree`."""

from ortlaunch.compose.hydra_tree import (
    compose,
)

__all__ = [
    "compose",
]
