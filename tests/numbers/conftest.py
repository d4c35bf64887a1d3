"""Workers that stay, as whole runs' tests have them."""

from tests.integration.conftest import pools

__all__ = ["pools"]
