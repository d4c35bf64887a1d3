"""Judges drawn models and prints the counts, and of each bad one the smallest source found: ``make test-drawn``.

``ORTLAUNCH_DRAWN_SEED`` and ``ORTLAUNCH_DRAWN_COUNT`` choose others. ``ORTLAUNCH_DRAWN_SHRINK=0`` prints no sources.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tests.drawn.runner import judged_all, judged_source
from tests.drawn.shrink import shrunk
from tests.drawn.verdict import Verdict

_OUTCOMES = ("same", "refused", "needless", "wrong", "traceback", "killed", "invalid")


def main() -> int:
    """Returns the exit code: 1 if a model trained wrongly, or failed without a clear message."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    first = int(os.environ.get("ORTLAUNCH_DRAWN_SEED", "0"))
    count = int(os.environ.get("ORTLAUNCH_DRAWN_COUNT", "500"))
    shrinks = os.environ.get("ORTLAUNCH_DRAWN_SHRINK", "1") != "0"
    verdicts: dict[int, Verdict] = {}
    for seed, verdict in judged_all(range(first, first + count)):
        verdicts[seed] = verdict
        if verdict.outcome != "same":
            print(f"{seed:>6} {verdict.outcome:<10} {verdict.reason}  [{', '.join(verdict.kinds)}]", flush=True)
    bad = {seed: verdict for seed, verdict in verdicts.items() if verdict.is_bad and shrinks}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for seed, small in zip(bad, pool.map(_shrunk, bad.items()), strict=True):
            print(f"\nseed {seed}: {small.outcome}: {small.reason}\n{small.source}", flush=True)
    counts = Counter(verdict.outcome for verdict in verdicts.values())
    print("\n" + "  ".join(f"{outcome} {counts[outcome]}" for outcome in _OUTCOMES))
    return int(any(verdict.is_bad for verdict in verdicts.values()))


def _shrunk(bad: tuple[int, Verdict]) -> Verdict:
    seed, verdict = bad
    return shrunk(verdict, partial(judged_source, seed=seed, is_random=verdict.is_random))


if __name__ == "__main__":
    sys.exit(main())
