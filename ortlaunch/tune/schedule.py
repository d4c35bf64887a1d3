"""Which cell is tried next, how long, and when it is decided.

Short trials for all cells, or, where there is no time for all, for those that look best by the trials so far; longer
trials for the better half; the last three in interleaved rounds while there is time, each until its interval parts from
the best one's or is a tie. The winner is measured once more, because the best of many noisy figures flatters.

The schedule is a function of the outcomes, of its arguments and of nothing else: no clock, no state of the machine.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from ortlaunch.launch.trial import Outcome
from ortlaunch.tune.cell import Cell, Effort, Stage
from ortlaunch.tune.expectation import Expectation
from ortlaunch.tune.intervals import LEAST_ROUNDS, difference_of, interval_of, slower_by
from ortlaunch.tune.plan import Finding, Plan

NO_TIME = "no time for it in the minutes given"
"""Why a cell was not tried that more minutes would have tried."""
NO_GAIN = "the trials predict no gain from it"
"""Why a cell was not tried that might have been."""
FINALISTS = 3
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
_FIRST_BESIDE = 2
"""Most cells for each axis that are tried beside the best one before expectations guide the choice."""
_MOST_WEIGHED = 1500
"""Of more cells than this, so many by chance and all next to the best one are weighed for the next trial."""
_NO_BETTER = 0.002
"""A cell that is expected to improve the best by less than this (on the scale of logarithms) is not worth a trial."""
_LEAST_IDLE, _IDLE = 4, 0.1
"""So many cells, or this share of all, are tried without expectation in a row before the search ends."""
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


class Schedule:
    """One search."""

    def __init__(self, plan: Plan, say: Callable[[str], None] = lambda line: None) -> None:
        """
        Args:
            plan: what is searched.
            say: takes a line about the progress.
        """
        self._plan = plan
        self._say = say
        self._finding = Finding(None)
        self._seen: dict[Cell, Outcome] = {}
        self._scores: dict[Cell, float] = {}
        """The score of each tried cell by the mean speed of its trials; 0 for one that failed."""
        self._rates: dict[Cell, list[float]] = {}
        """The speeds of each cell in its trials. Those of the fewest steps count only until there are others."""
        self._open = dict.fromkeys(plan.cells)
        self._chance = random.Random(plan.seed)
        self._expectation: Expectation | None = None
        self._longest = 0.0
        self._searched = 0.0
        """Seconds that the search took."""
        self._is_cut = False
        """Whether the search ended for want of time. Later trials take time too, and say nothing about that."""
        self._idle = 0
        """How many cells in a row were tried without an expectation of gain."""

    def run(self) -> Finding:
        """Searches to the end of the budget, or until it is decided."""
        self._search()
        self._searched, self._is_cut = self._spent, self._spent >= self._search_until
        finalists = self._longer()
        rounds = self._rounds(finalists)
        self._decide(rounds)
        self._measure_again(rounds)
        self._finding.pruned |= {cell: self._left(cell) for cell in self._prune(list(self._open))}
        return self._finding

    # Short trials.

    def _search(self) -> None:
        plan = self._plan
        if self._permitted(plan.asked):
            # Nothing is known about the speed yet: the fewest steps show what a step takes.
            first = self._try(plan.asked, "probe", 0, 0.0)
            if first.ok and first.rate and self._spent < self._search_until:
                self._try(plan.asked, "short", 0, plan.short_seconds)
        while self._spent < self._search_until and (cell := self._next()) is not None:
            if self._permitted(cell):
                self._try(cell, "short", 0, plan.short_seconds)

    def _permitted(self, cell: Cell) -> bool:
        """Whether the estimate lets a cell be tried, which is not open from now on."""
        self._open.pop(cell, None)
        reason = self._plan.estimated(cell, self._seen)
        if reason is not None:
            self._finding.pruned[cell] = reason
            self._say(f"not tried: {cell}: {reason}")
        return reason is None

    def _prune(self, cells: Sequence[Cell]) -> list[Cell]:
        """Leaves out those of some open cells that the outcomes so far make needless, and returns the others."""
        remaining = []
        for cell in cells:
            reason = self._plan.pruner.reason(cell, self._seen)
            if reason is None:
                remaining.append(cell)
            else:
                self._finding.pruned[cell] = reason
                del self._open[cell]
        return remaining

    def _ready(self, cells: Sequence[Cell]) -> list[Cell]:
        """Those of some open cells that may be tried now."""
        return [cell for cell in self._prune(cells) if not self._waits(cell)]

    def _waits(self, cell: Cell) -> bool:
        """Whether another cell comes first. One that was left out, or is none of the space, holds up no other."""
        return any(one in self._open for one in self._plan.pruner.before(cell))

    def _weighed(self) -> list[Cell]:
        """The cells to choose the next one from: all open ones, or some of many, with those next to the best."""
        everything = list(self._open)
        if len(everything) > _MOST_WEIGHED:
            best = self._best_first()[:1]
            near = [cell for cell in everything if best and _axes_apart(cell, best[0]) == 1]
            some = self._ready(list(dict.fromkeys([*near, *self._chance.sample(everything, _MOST_WEIGHED)])))
            if some:
                return some
        return self._ready(list(self._open))

    def _next(self) -> Cell | None:
        """The open cell to try next; None if none is left, or none is expected to be better."""
        ready = self._weighed()
        if not ready:
            return None
        good = [score for score in self._scores.values() if score > 0]
        most_beside = _FIRST_BESIDE * len(self._plan.asked.values)
        if len(self._scores) < most_beside and (cell := self._new_beside(ready)) is not None:
            return cell
        if len(good) < 2:
            return self._unlike(ready)
        if self._expectation is None:
            self._expectation = Expectation(list(self._plan.cells))
        gain = self._expectation.gain(self._scores, ready)
        best = int(gain.argmax())
        if gain[best] >= _NO_BETTER:
            self._idle = 0
            return ready[best]
        # Expectations may be wrong. Cells next to the best one, and some by chance, are tried before they are believed.
        self._idle += 1
        if self._idle > max(_LEAST_IDLE, _IDLE * len(self._plan.cells)):
            return None
        first = self._best_first()[0]
        beside = [index for index, cell in enumerate(ready) if _axes_apart(cell, first) == 1]
        return ready[max(beside, key=lambda index: gain[index])] if beside and self._idle % 2 else self._unlike(ready)

    def _new_beside(self, ready: list[Cell]) -> Cell | None:
        """A cell that differs from the best one so far by one value that no trial had yet; None if there is none.

        So the effect of a value shows where it counts. Names come first, such as those of backends. Of numbers only the
        next ones are taken, for what is beyond them follows from those.
        """
        best = (self._best_first() or [self._plan.asked])[0]
        met = {pair for cell in self._scores for pair in cell.values}
        names, numbers = [], []
        for cell in ready:
            apart = [pair for pair, other in zip(cell.values, best.values, strict=True) if pair != other]
            if len(apart) != 1 or apart[0] in met:
                continue
            ((axis, value),) = apart
            if not isinstance(value, int):
                names.append(cell)
            elif isinstance(other := best[axis], int) and self._are_next(axis, value, other):
                numbers.append(cell)
        found = names or numbers
        return self._chance.choice(found) if found else None

    def _are_next(self, axis: str, one: int, other: int) -> bool:
        """Whether no value of an axis is between two."""
        low, high = sorted((one, other))
        values = {cell[axis] for cell in self._plan.cells}
        return not any(low < value < high for value in values if isinstance(value, int))

    def _unlike(self, ready: list[Cell]) -> Cell:
        """A cell by chance, among those with the most values that no trial had yet."""
        drawn = ready if len(ready) <= 200 else self._chance.sample(ready, 200)
        met = {pair for cell in self._scores for pair in cell.values}
        news = [sum(pair not in met for pair in cell.values) for cell in drawn]
        most = max(news)
        return self._chance.choice([cell for cell, new in zip(drawn, news, strict=True) if new == most])

    def _left(self, cell: Cell) -> str:
        """Why a cell was never tried although nothing speaks against it."""
        if self._waits(cell):
            return "only of use if the same without checkpointing or offload does not fit, which was not tried"
        return NO_TIME if self._is_cut else NO_GAIN

    # Longer trials and rounds.

    def _longer(self) -> list[Cell]:
        plan, best_first = self._plan, self._best_first()
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
            if self._spent >= self._later_until(_UNTIL_LONG):
                break
            self._try(cell, "long", 0, plan.long_seconds)
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
            if len(running) < 2 or self._spent >= self._later_until(_UNTIL_ROUNDS):
                break
            # Each begins a round in turn, so that what follows on what is the same for all.
            turn = number % len(running)
            for cell in running[turn:] + running[:turn]:
                outcome = self._try(cell, "round", number, self._plan.long_seconds)
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
        found, plan = self._finding, self._plan
        names = [cell for cell in logs if cell not in found.dropped] or self._best_first()[:1]
        unfit: set[Cell] = set()
        while names:
            best = max(names, key=self._mean)
            ties = [cell for cell in names if cell != best and self._is_tie(best, cell, logs)]
            # If nothing is faster than the configuration as asked, there is no reason to change it. Where the rounds
            # could not separate it from one that is faster on average, the faster one is the better guess.
            is_asked = plan.asked in ties and self._mean(best) - self._mean(plan.asked) <= _CLOSE
            winner = plan.asked if is_asked else best
            reason = plan.unfit(winner)
            if reason is None:
                found.winner, found.ties = winner, [cell for cell in (best, *ties) if cell != winner]
                found.dropped.pop(winner, None)
                behind = [cell for cell in names if cell not in (best, *ties)]
                found.dropped |= dict.fromkeys(behind, f"slower, in fewer than {LEAST_ROUNDS} rounds")
                return
            found.dropped[winner] = reason
            unfit.add(winner)
            names = [cell for cell in names if cell != winner]
            # All finalists may be unfit. Then the best of the others is left.
            names = names or [cell for cell in self._best_first() if cell not in unfit][:1]

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
        last = self._try(found.winner, "again", number, plan.long_seconds)
        found.score = last.score(plan.work) if last.ok else 0.0
        found.rounds = logs
        if found.score:
            logs.setdefault(found.winner, []).append(math.log(found.score))
        found.interval = interval_of(logs.get(found.winner, []))
        if plan.asked == found.winner:
            found.asked_score = found.score
        elif self._scores.get(plan.asked):
            asked = self._try(plan.asked, "again", number, plan.long_seconds)
            found.asked_score = asked.score(plan.work)

    # Trials.

    @property
    def _spent(self) -> float:
        return self._finding.spent + self._plan.beside()

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
            return max(_LEAST_TIMEOUT, (self._plan.budget - self._spent) / 2)
        usual = _LEAST_TIMEOUT + _OF_ALLOWED * self._longest
        shown = {
            pair for one, outcome in self._seen.items() if outcome.status in ("ok", "time-out") for pair in one.values
        }
        is_first = any(isinstance(pair[1], str) and pair not in shown for pair in cell.values)
        return max(usual, _OF_BUDGET * self._plan.budget) if is_first else usual


def _axes_apart(one: Cell, other: Cell) -> int:
    return sum(left != right for left, right in zip(one.values, other.values, strict=True))


def _line(cell: Cell, stage: Stage, number: int, outcome: Outcome) -> str:
    which = f"round {number + 1}" if stage == "round" else stage
    said = f"{outcome.rate:,.1f} samples/s" if outcome.ok else f"{outcome.status}: {outcome.reason}"
    noted = ", noted before" if outcome.is_noted else ""
    return f"{which}: {cell}: {said} ({outcome.seconds:.0f} s{noted})"
