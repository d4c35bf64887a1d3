"""Makes bad requests and prints how many got a good answer: ``make test-attack``.

``ORTLAUNCH_ATTACK_SEED`` and ``ORTLAUNCH_ATTACK_COUNT`` choose others.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

from tests.attack.attack import attack
from tests.attack.requests import drawn


def main() -> int:
    """Returns the exit code: 1 if a request got a bad answer."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    seed = int(os.environ.get("ORTLAUNCH_ATTACK_SEED", "0"))
    count = int(os.environ.get("ORTLAUNCH_ATTACK_COUNT", "400"))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ortlaunch-attack-") as folder:
        result = attack(islice(drawn(seed), count), Path(folder))
    print(result.report)
    print(f"seed {seed}, {time.monotonic() - began:.0f} s")
    return int(bool(result.failures))


if __name__ == "__main__":
    sys.exit(main())
