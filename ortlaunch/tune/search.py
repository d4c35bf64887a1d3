"""Which cell is tried next, how long, and when it is decided.

Short trials climb from the configuration as asked to what is faster beside it; longer trials for the better half; the
last three in interleaved rounds while there is time, each until its interval parts from the best one's or is a tie. The
winner is measured once more, because the best of many noisy figures flatters.

The search is a function of the outcomes, of its arguments and of nothing else: no clock, no state of the machine.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ortlaunch.launch.trial import Outcome
from ortlaunch.tune.intervals import LEAST_ROUNDS, Interval, difference_of, interval_of, slower_by
from ortlaunch.tune.space import CHECKPOINTING, MICRO, OFF, ON, Cell, Value

NO_TIME = "no time for it in the minutes given"
"""Why a cell was not tried that more minutes would have tried."""
NO_GAIN = "cells nearer to the fastest one gained nothing"
"""Why a cell was not tried that might have been."""
NEEDS_MORE = "needs more memory than "
"""The beginning of the reasons that name another cell, which does not fit."""
FINALISTS = 3
SHORT_SECONDS, _LONG_SECONDS = 2.0, 6.0
_MOST_ROUNDS = 8
_MOST_LONG = 8
_LEAST_SEARCH, _MOST_SEARCH = 0.5, 0.8
"""Bounds of the share of the budget that the short trials may take; what the later stages need is left."""
_LATER_TRIALS = 15
"""Trials that the later stages need: four longer ones, three rounds of three, the last ones."""
_UNTIL_LONG, _UNTIL_ROUNDS = 0.4, 0.9
"""Shares of what the search has left after which longer trials and rounds are begun no more."""
_HOPELESS = 0.7
"""A short trial with less than this share of the best speed gets no longer one."""
_BESIDE = (2, 1)
"""The rank of a cell that differs from the best one by one value, which was met before."""
_LEAST_IDLE, _IDLE = 4, 0.1
"""So many cells, or this share of all, are tried beyond those beside the best one before the climb ends."""
_RIDGE = 0.3
"""How much of a trial it takes to believe in the effect of a value."""
_SAME = math.log(1.01)
"""Two finalists whose interval is within one percent are equal: further rounds would tell nothing of use."""
_CLOSE = math.log(1.03)
"""With too few rounds for an interval, finalists whose means are nearer to each other than this are a tie."""
_LEAST_TIMEOUT = 60.0
_OF_ALLOWED = 3.0
"""A trial may take this many times as long as the longest good one, and `_LEAST_TIMEOUT`."""
_OF_BUDGET = 0.25
"""This share of the budget may be taken by the first trial of a backend or a trainer. It may have to export, to compile
or to build what the others do not need."""

Stage = Literal["probe", "short", "long", "round", "again"]
Seen = Mapping[Cell, Outcome]
"""The latest outcome of each cell that was tried."""


@dataclass(frozen=True)
class Effort:
    """How long a trial measures, and why."""

    stage: Stage
    number: int
    """The round, from 0; of the last trials, how many there were before. The same trial of a stage is never repeated
    under one number."""
    seconds: float
    """Seconds of training that are wanted, without the start. 0 takes the fewest steps."""
    rate: float | None
    """Samples per second that are expected, from which the number of steps follows; None if nothing is known."""
    timeout: float
    """Seconds after which the trial is ended."""


@dataclass
class Plan:
    """What a search needs."""

    cells: Sequence[Cell]
    """All cells that the rules allow, each once. The first is the configuration as asked."""
    trial: Callable[[Cell, Effort], Outcome]
    budget: float
    """Seconds that all trials may take together."""
    work: float
    """Samples of the whole run, over which the start of a backend counts; infinite for the steady speed alone."""
    accumulates: Callable[[Cell], bool] = lambda cell: True
    """Whether a cell has several micro-batches in a step. It then keeps gradients while it computes the next
    activations, and can need more memory than a larger micro-batch without accumulation."""
    seed: int = 0


@dataclass
class Finding:
    """The end of a schedule."""

    winner: Cell | None
    """The fastest cell; None if none trained."""
    ties: list[Cell] = field(default_factory=list)
    """Cells that the rounds could not part from the winner."""
    measured: dict[Cell, list[Outcome]] = field(default_factory=dict)
    """All outcomes of each cell, in their order."""
    pruned: dict[Cell, str] = field(default_factory=dict)
    """Why a cell was not tried."""
    dropped: dict[Cell, str] = field(default_factory=dict)
    """Why a cell that was tried is not the winner."""
    score: float = 0.0
    """The winner's score, measured once more."""
    interval: Interval | None = None
    """Of the winner's score, from its rounds and the last trial; None for less than three values."""
    asked_score: float = 0.0
    """The score of the configuration as asked, measured beside the winner; 0 if it did not train."""
    rounds: dict[Cell, list[float]] = field(default_factory=dict)
    """The logarithms of a cell's scores in the rounds, and in the trial after them."""
    spent: float = 0.0
    """Seconds of all trials together."""


class Search:
    """One search."""

    def __init__(self, plan: Plan, say: Callable[[str], None] = lambda line: None) -> None:
        """
        Args:
            plan: what is searched.
            say: takes a line about the progress.
        """
        self._plan = plan
        self._say = say
        self._asked = plan.cells[0]
        self._finding = Finding(None)
        self._seen: dict[Cell, Outcome] = {}
        self._scores: dict[Cell, float] = {}
        """The score of each tried cell by the mean speed of its trials; 0 for one that failed."""
        self._rates: dict[Cell, list[float]] = {}
        """The speeds of each cell in its trials. Those of the fewest steps count only until there are others."""
        self._open = dict.fromkeys(plan.cells)
        self._chance = random.Random(plan.seed)
        self._longest = 0.0
        self._searched = 0.0
        """Seconds that the search took."""
        self._is_cut = False
        """Whether the climb ended for want of time. Later trials take time too, and say nothing about that."""
        self._idle = 0
        """How many cells in a row were tried that are not beside the best one."""

    def run(self) -> Finding:
        """Searches to the end of the budget, or until it is decided."""
        self._climb()
        self._searched, self._is_cut = self._finding.spent, self._finding.spent >= self._search_until
        rounds = self._rounds(self._longer())
        self._decide(rounds)
        self._measure_again(rounds)
        self._ready()
        self._finding.pruned |= {cell: self._left(cell) for cell in self._open}
        return self._finding

    # Short trials.

    def _climb(self) -> None:
        # Nothing is known about the speed yet: the fewest steps show what a step takes.
        del self._open[self._asked]
        first = self._try(self._asked, "probe", 0, 0.0)
        if first.ok and first.rate and self._finding.spent < self._search_until:
            self._try(self._asked, "short", 0, SHORT_SECONDS)
        while self._finding.spent < self._search_until and (cell := self._next()) is not None:
            del self._open[cell]
            self._try(cell, "short", 0, SHORT_SECONDS)

    def _next(self) -> Cell | None:
        """The open cell to try next; None if none is left, or those beside the best one and some others were tried.

        A value that no trial had yet comes first, where it is nearest to the best cell: so its effect shows where it
        counts. Then come the cells beside the best one, and then all others.
        """
        best = (self._best_first() or [self._asked])[0]
        met = {pair for cell in self._seen for pair in cell.values}
        ranks = {cell: _rank(cell, best, met) for cell in self._ready()}
        if not ranks:
            return None
        first = min(ranks.values())
        is_beside = first <= _BESIDE
        self._idle = 0 if is_beside else self._idle + 1
        if self._idle > max(_LEAST_IDLE, _IDLE * len(self._plan.cells)):
            return None
        cells = [cell for cell, rank in ranks.items() if not is_beside or rank == first]
        self._chance.shuffle(cells)
        return max(cells, key=self._promise())

    def _promise(self) -> Callable[[Cell], float]:
        """How fast cells are to be expected: the effects of single values on the logarithm of the score, added."""
        import numpy

        scores = {cell: math.log(score) for cell, score in self._scores.items() if score > 0}
        place = {pair: number for number, pair in enumerate({pair: 0 for cell in scores for pair in cell.values})}
        if not place:
            return lambda cell: 0.0
        table = numpy.zeros((len(scores), len(place)))
        for row, cell in zip(table, scores, strict=True):
            row[[place[pair] for pair in cell.values]] = 1.0
        logs = numpy.array(list(scores.values()))
        squares = table.T @ table + _RIDGE * numpy.eye(len(place))
        effects = numpy.linalg.solve(squares, table.T @ (logs - logs.mean()))
        return lambda cell: float(sum(effects[place[pair]] for pair in cell.values if pair in place))

    def _ready(self) -> list[Cell]:
        """The open cells that may be tried now, without those that the outcomes so far make needless."""
        for cell in list(self._open):
            reason = needless(cell, self._seen, accumulates=self._plan.accumulates(cell))
            if reason is not None:
                self._finding.pruned[cell] = reason
                del self._open[cell]
        # One that computes activations again waits for the same that does not.
        return [cell for cell in self._open if _plainer(cell) not in self._open]

    def _left(self, cell: Cell) -> str:
        """Why a cell was never tried although nothing speaks against it."""
        if _plainer(cell) in self._open:
            return "only of use if the same without checkpointing does not fit, which was not tried"
        return NO_TIME if self._is_cut else NO_GAIN

    # Longer trials and rounds.

    def _longer(self) -> list[Cell]:
        best_first = self._best_first()
        if not best_first:
            return []
        most = self._scores[best_first[0]]
        half = best_first[: min(_MOST_LONG, max(FINALISTS, math.ceil(len(best_first) / 2)))]
        chosen = [cell for cell in half if self._scores[cell] >= _HOPELESS * most]
        # A first trial may pay for an export or a compilation that later ones find made. The fastest once it is steady
        # gets a longer trial in any case.
        steady = max(best_first, key=lambda cell: self._seen[cell].rate)
        if steady not in chosen:
            chosen.insert(1, steady)
        for cell in best_first:
            if cell not in chosen:
                slower = 1 - self._scores[cell] / most
                self._finding.dropped[cell] = f"{slower:.0%} slower than the best in its short trial"
        done = []
        # All that are left are finalists: rounds measure them as long.
        for cell in chosen if len(chosen) > FINALISTS else []:
            if self._finding.spent >= self._later_until(_UNTIL_LONG):
                break
            self._try(cell, "long", 0, _LONG_SECONDS)
            done.append(cell)
        # Figures of longer trials come first: those of short ones flatter.
        later = [cell for cell in chosen if cell not in done]
        ranked = [cell for cell in self._best_first() if cell in done] + later
        for cell in ranked[FINALISTS:]:
            self._finding.dropped[cell] = "not among the last three in its longer trial"
        return ranked[:FINALISTS]

    def _rounds(self, finalists: list[Cell]) -> dict[Cell, list[float]]:
        """Measures the finalists in turn; returns the logarithms of their scores, round by round."""
        logs: dict[Cell, list[float]] = {cell: [] for cell in finalists}
        running = list(finalists)
        for number in range(_MOST_ROUNDS):
            if len(running) < 2 or self._finding.spent >= self._later_until(_UNTIL_ROUNDS):
                break
            # Each begins a round in turn, so that what follows on what is the same for all.
            turn = number % len(running)
            for cell in running[turn:] + running[:turn]:
                outcome = self._try(cell, "round", number, _LONG_SECONDS)
                if outcome.ok:
                    logs[cell].append(math.log(outcome.score(self._plan.work)))
            for cell in [cell for cell in running if len(logs[cell]) <= number]:
                self._finding.dropped[cell] = f"failed in round {number + 1}: {self._seen[cell].reason}"
                running.remove(cell)
                del logs[cell]
            running = self._still_open(running, logs)
        return logs

    def _still_open(self, running: list[Cell], logs: dict[Cell, list[float]]) -> list[Cell]:
        """The finalists that further rounds may still decide about."""
        if not running or len(logs[running[0]]) < LEAST_ROUNDS:
            return running
        best = max(running, key=lambda cell: statistics.fmean(logs[cell]))
        undecided = []
        for cell in running:
            if cell == best:
                continue
            low, high = difference_of(best, cell, {one: logs[one] for one in running})
            if max(-low, high) <= _SAME:
                continue
            if low > 0:
                self._finding.dropped[cell] = (
                    f"{slower_by(low)} to {slower_by(high)} slower than the winner in the rounds"
                )
            else:
                undecided.append(cell)
        return [best, *undecided] if undecided else [best]

    # The end.

    def _decide(self, logs: dict[Cell, list[float]]) -> None:
        """Chooses the winner among the finalists that nothing has dropped."""
        found = self._finding
        names = [cell for cell in logs if cell not in found.dropped] or self._best_first()[:1]
        if not names:
            return
        best = max(names, key=self._mean)
        ties = [cell for cell in names if cell != best and self._is_tie(best, cell, logs)]
        # If nothing is faster than the configuration as asked, there is no reason to change it. Where the rounds could
        # not separate it from one that is faster on average, the faster one is the better guess.
        is_asked = self._asked in ties and self._mean(best) - self._mean(self._asked) <= _CLOSE
        found.winner = self._asked if is_asked else best
        found.ties = [cell for cell in (best, *ties) if cell != found.winner]
        found.dropped.pop(found.winner, None)
        behind = [cell for cell in names if cell not in (best, *ties)]
        found.dropped |= dict.fromkeys(behind, f"slower, in fewer than {LEAST_ROUNDS} rounds")

    def _mean(self, cell: Cell) -> float:
        """The logarithm of a cell's score by all its trials."""
        return math.log(self._scores[cell]) if self._scores.get(cell) else -math.inf

    def _is_tie(self, best: Cell, cell: Cell, logs: dict[Cell, list[float]]) -> bool:
        """Whether a finalist that the rounds have not dropped may be as fast as the best one."""
        has_interval = min(len(logs.get(one, [])) for one in (best, cell)) >= LEAST_ROUNDS
        return has_interval or self._mean(best) - self._mean(cell) <= _CLOSE

    def _measure_again(self, logs: dict[Cell, list[float]]) -> None:
        """Measures the winner once more, beside the configuration as asked."""
        found, plan = self._finding, self._plan
        if found.winner is None:
            return
        # Both at the same time, also where more minutes go on: last trials of an earlier search do not serve again.
        number = sum(map(len, found.measured.values()))
        last = self._try(found.winner, "again", number, _LONG_SECONDS)
        found.score = last.score(plan.work) if last.ok else 0.0
        found.rounds = logs
        if found.score:
            logs.setdefault(found.winner, []).append(math.log(found.score))
        found.interval = interval_of(logs.get(found.winner, []))
        if self._asked == found.winner:
            found.asked_score = found.score
        elif self._scores.get(self._asked):
            asked = self._try(self._asked, "again", number, _LONG_SECONDS)
            found.asked_score = asked.score(plan.work)

    # Trials.

    @property
    def _search_until(self) -> float:
        """Seconds after which the search begins no further trial."""
        budget = self._plan.budget
        if not any(self._scores.values()):
            # While nothing has trained, there is nothing to compare later.
            return budget
        later = _LATER_TRIALS * self._finding.spent / max(1, sum(map(len, self._finding.measured.values())))
        return min(_MOST_SEARCH * budget, max(_LEAST_SEARCH * budget, budget - later))

    def _later_until(self, share: float) -> float:
        """Seconds after which a later stage begins no further trial."""
        return self._searched + share * max(0.0, self._plan.budget - self._searched)

    def _best_first(self) -> list[Cell]:
        good = [cell for cell, score in self._scores.items() if score > 0]
        return sorted(good, key=lambda cell: -self._scores[cell])

    def _try(self, cell: Cell, stage: Stage, number: int, seconds: float) -> Outcome:
        plan = self._plan
        outcome = plan.trial(cell, Effort(stage, number, seconds, self._rate(cell), self._timeout(cell)))
        self._finding.spent += outcome.seconds
        if outcome.ok:
            self._longest = max(self._longest, outcome.seconds)
        self._finding.measured.setdefault(cell, []).append(outcome)
        if stage != "again" and not (stage == "round" and not outcome.ok):
            self._scores[cell] = self._mean_score(cell, outcome, is_first=stage in ("probe", "short"))
        self._seen[cell] = outcome
        self._say(_line(cell, stage, number, outcome))
        return outcome

    def _mean_score(self, cell: Cell, latest: Outcome, *, is_first: bool) -> float:
        """The score of a cell with the mean speed of its trials, and the start of the latest.

        An earlier start may have held an export or a compilation that is kept now.
        """
        if not latest.ok or latest.rate <= 0:
            return 0.0
        rates = self._rates[cell] = [*([] if is_first else self._rates.get(cell, [])), latest.rate]
        return replace(latest, rate=statistics.geometric_mean(rates)).score(self._plan.work)

    def _rate(self, cell: Cell) -> float | None:
        """Samples per second to expect of a cell: what it had, else what the median cell had."""
        before = [one.rate for one in self._finding.measured.get(cell, []) if one.ok]
        if before:
            return before[-1]
        rates = [one[-1].rate for one in self._finding.measured.values() if one[-1].ok]
        return statistics.median(rates) if rates else None

    def _timeout(self, cell: Cell) -> float:
        """Seconds that the next trial may take: by the longest so far, and before that half of what is left."""
        if not self._longest:
            return max(_LEAST_TIMEOUT, (self._plan.budget - self._finding.spent) / 2)
        usual = _LEAST_TIMEOUT + _OF_ALLOWED * self._longest
        shown = {
            pair for one, outcome in self._seen.items() if outcome.status in ("ok", "time-out") for pair in one.values
        }
        is_first = any(isinstance(pair[1], str) and pair not in shown for pair in cell.values)
        return max(usual, _OF_BUDGET * self._plan.budget) if is_first else usual


def needless(cell: Cell, seen: Seen, *, accumulates: bool = True) -> str | None:
    """Why a cell cannot be faster or cannot fit, given how other cells did; None if it may be tried.

    Args:
        cell: the cell.
        seen: the outcomes so far.
        accumulates: whether it has several micro-batches in a step.
    """
    plainer = _plainer(cell)
    if plainer is not None and plainer in seen and seen[plainer].ok:
        # Under ONNX Runtime too: its graph has all nodes of the other one, and those that are computed again.
        return "computes activations again, and the same without checkpointing fits"
    for other, outcome in seen.items():
        if outcome.status == "out of memory" and other != cell and _needs_less(other, cell, accumulates=accumulates):
            return f"{NEEDS_MORE}{other}, which ran out of it"
    return None


def _plainer(cell: Cell) -> Cell | None:
    """The same cell without activation checkpointing; None if it has none."""
    return cell.having(CHECKPOINTING, OFF) if dict(cell.values).get(CHECKPOINTING) == ON else None


def _needs_less(one: Cell, other: Cell, *, accumulates: bool) -> bool:
    """Whether a cell needs no more memory than another: the same with a smaller micro-batch, or with checkpointing."""
    its, others = dict(one.values), dict(other.values)
    if any(its[axis] != value for axis, value in others.items() if axis not in (MICRO, CHECKPOINTING)):
        return False
    saves = its.get(CHECKPOINTING) == others.get(CHECKPOINTING) or its.get(CHECKPOINTING) == ON
    small, large = int(its.get(MICRO, 0)), int(others.get(MICRO, 0))
    return saves and (small == large or (accumulates and small < large))


def _rank(cell: Cell, best: Cell, met: set[tuple[str, Value]]) -> tuple[int, int]:
    """The place of a cell in the order of trials: new names, new numbers, then by how many values differ."""
    apart = [pair for pair, other in zip(cell.values, best.values, strict=True) if pair != other]
    new = [value for axis, value in apart if (axis, value) not in met]
    return 2 if not new else int(all(isinstance(value, int) for value in new)), len(apart)


def _line(cell: Cell, stage: Stage, number: int, outcome: Outcome) -> str:
    which = f"round {number + 1}" if stage == "round" else stage
    said = f"{outcome.rate:,.1f} samples/s" if outcome.ok else f"{outcome.status}: {outcome.reason}"
    noted = ", noted before" if outcome.is_noted else ""
    return f"{which}: {cell}: {said} ({outcome.seconds:.0f} s{noted})"
