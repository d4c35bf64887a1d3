"""Workers that stay, as whole runs' tests have them."""

from tests.integration.conftest import pools, train

__all__ = ["pools", "train"]
