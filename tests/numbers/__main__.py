"""Judges drawn runs and prints what is wrong with them, and a table by trainer and backend: ``make test-numbers``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.numbers.draws import Draw, draw
from tests.numbers.judge import judged
from tests.support.pool import Pool


def main() -> int:
    """Returns the exit code: 1 if a run computed something else than the referee, or failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 240), metavar=("FIRST", "END"))
    parser.add_argument("--backends", nargs="+", default=["eager"], choices=("eager", "compile", "ort"))
    arguments = parser.parse_args()
    counts: Counter[tuple[str, str, bool]] = Counter()
    pools: dict[int, Pool] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed in range(*arguments.seeds):
            one = draw(seed, tuple(arguments.backends))
            wrong = _judged(one, folder, pools)
            counts[one.trainer, one.backend, bool(wrong)] += 1
            if wrong:
                print(f"{one} {'-'.join(one.parts)}: {wrong}", flush=True)
        for pool in pools.values():
            pool.close()
    for trainer, backend in sorted({(trainer, backend) for trainer, backend, _ in counts}):
        right, wrong = counts[trainer, backend, False], counts[trainer, backend, True]
        print(f"{trainer:<8} {backend:<8} {right:>4} right {wrong:>3} wrong or failed")
    return int(any(is_wrong for _, _, is_wrong in counts))


def _judged(one: Draw, folder: Path, pools: dict[int, Pool]) -> str:
    own = folder / str(one)
    own.mkdir()
    return judged(one, own, lambda workers: pools.setdefault(workers, Pool(folder, workers)))


if __name__ == "__main__":
    sys.exit(main())
