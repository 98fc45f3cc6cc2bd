"""The times of a guest's calls: what the guest claims, and what the judge's clock says of it.

    turns    of the contender and of the yardstick, in rounds; the guest claims a time for each call
    yardstick  its time in the guest's process and in the judge's, which must agree within AGREE.
             Otherwise something slows the process, or speeds it up
    bursts   calls back to back, on new activations, by the judge's clock. A call of the fastest may
             take TOLERANCE longer than the samples say, plus what the same burst without a call
             takes in the judge's process, plus SLACK_US for a burst's request and answer

A burst's calls follow each other, so it includes the work that a contender leaves to a thread, to a
stream or to the time between two samples. A request before the burst lets the GPU turn to the
guest; both together may take WAKE_US more, in which a contender could work ahead.

If a measure is not confirmed, it is taken again, up to TRIES times in all.
"""

import random
from functools import partial
from math import isfinite
from statistics import median
from time import perf_counter

from sparsebench.harness.bench.contest_state import synchronize
from sparsebench.harness.bench.guest_calls import GuestCalls
from sparsebench.harness.bench.guest_process import GuestLoss
from sparsebench.harness.bench.sampling import CHAIN, ROUNDS, sample_budget
from sparsebench.harness.bench.spot_checks import SHARE
from sparsebench.harness.bench.timing import REPEATS, Samples, time_together
from sparsebench.results.record import Status

WAKE_US = 5e3  # two processes take turns on a GPU in 3 ms
TOLERANCE = 0.1  # of a sample, which may be hot while a burst is throttled by power
SLACK_US = {"cuda": 400.0, "cpu": 1000.0}  # for a request and its answer; 30 to 250 µs on an H200
BURST_US = 2e4  # a burst takes about as long, but has at least LEAST_CALLS
LEAST_CALLS, BURSTS = 4, 5  # BURSTS: tries, of which the fastest counts
AGREE = {"graph": 1.1, "events": 3.0, "host": 3.0}  # of the yardstick, by its clock: the host has
# other work, and called from Python one call took 44 µs in one process and 55 in another
TRIES = 3


class GuestTimes:
    """The times of a measure."""

    def __init__(self, calls: GuestCalls, scope: str, state: str) -> None:
        self._calls, self._scope, self._state = calls, scope, state

    def samples(self) -> Samples:
        """Return samples that are confirmed. Raises GuestLoss."""
        for _ in range(TRIES):
            with self._calls.stage("timing"):
                mine, of_yardstick = self._take()
                doubt = self._disagreement(of_yardstick)
            with self._calls.stage("audit"):
                doubt = doubt or self._audit(median(mine.times_us))
            if not doubt:
                return mine
        raise GuestLoss(Status.FAILED, doubt)

    def _take(self) -> tuple[Samples, Samples | None]:
        """Return the samples of the contender and of the yardstick, in rounds by turns."""
        numbers = range(len(self._calls.contenders))
        first = {number: self._turn(number, 1) for number in numbers}
        plans = {n: sample_budget(min(first[n][0][0], self._turn(n, 1)[0][0])) for n in numbers}
        plans = {n: (rounds, min(each, self._calls.count)) for n, (rounds, each) in plans.items()}
        taken: dict[int, list[tuple[float, bool]]] = {n: [] for n in numbers}
        rounds = plans[self._calls.number][0]
        spots = {*self._calls.random.sample(range(rounds), max(1, int(SHARE * rounds)))}
        seed = f"{self._calls.options.replicate} {self._scope} {self._state} guest"
        draw = random.Random(f"{self._calls.entry.row.case.problem.id} {seed}")
        for number in range(ROUNDS):
            order = [n for n in numbers if number < plans[n][0]]
            for n in draw.sample(order, len(order)):
                taken[n] += self._turn(n, plans[n][1])
                if n == self._calls.number and number in spots:
                    count = plans[n][1]
                    self._calls.compare(count, count, self._scope, 0, "among the timed ones")
        counts_late = self._calls.device.type == "cuda" and self._scope != "op"

        def samples(n: int) -> Samples:
            times_us, late = zip(*taken[n], strict=True)
            share = sum(late) / len(late) if counts_late else None
            return Samples(tuple(round(us, 3) for us in times_us), plans[n][1], share)

        return samples(self._calls.number), samples(0) if self._calls.number else None

    def _turn(self, number: int, count: int) -> list[tuple[float, bool]]:
        """Return samples as the guest claims them: times in µs, and whether each is late."""
        for attempt in range(1 + REPEATS):
            if number == self._calls.number:
                self._calls.fill(count)
            ask = {"scope": self._scope, "cache": self._state, "count": count}
            claimed = self._calls.ask("turn", number=number, **ask)
            samples = [(float(us), bool(late)) for us, late in claimed]
            if len(samples) != count or not all(us > 0 and isfinite(us) for us, _ in samples):
                raise ValueError(f"expected {count} times, found {str(claimed)[:80]}")
            graph = (
                self._calls.device.type == "cuda"
                and self._calls.clocks.get(self._scope, ("",))[0] == "graph"
            )
            if attempt == REPEATS or not graph or not any(late for _, late in samples):
                break
        return samples

    def _disagreement(self, samples: Samples | None) -> str:
        """Return why the yardstick's times here and in the judge's process differ, or ""."""
        call = self._calls.yardstick and self._calls.yardstick.timed_in(self._scope)
        if not (samples and self._calls.yardstick and call):
            return ""
        seed = f"{self._calls.random.random()}"
        (there,) = time_together(
            [call], self._calls.device, seed, scope=self._scope, cache=self._state
        )
        here_us, there_us = median(samples.times_us), median(there.times_us)
        allowed = AGREE[call.clock]
        if 1 / allowed <= here_us / there_us <= allowed:
            return ""
        expected = f"expected {there_us:.4g} µs as in the judge's process, found {here_us:.4g}"
        return f"{self._calls.yardstick.contender.label} beside it: {expected}"

    def _audit(self, claimed_us: float) -> str:
        """Return why bursts do not confirm the samples, or ""."""
        of = CHAIN if self._scope == CHAIN else "kernel"
        count = min(self._calls.count, max(LEAST_CALLS, int(BURST_US / claimed_us)))
        idle_us = min(self._idle_us(count) for _ in range(BURSTS))
        most_us = (1 + TOLERANCE) * claimed_us + idle_us + SLACK_US[self._calls.device.type] / count
        self._calls.burst(of, count)  # captures
        for _ in range(BURSTS):
            took_us, with_wake_us = (
                1e6 * took_s / count for took_s in self._calls.inspect_burst(of, count, 2)
            )
            if took_us <= most_us and with_wake_us <= most_us + WAKE_US / count:
                return ""
        found = f"found {took_us:.4g} µs by the judge's clock"
        return f"expected calls back to back to take at most {most_us:.4g} µs, {found}"

    def _idle_us(self, count: int) -> float:
        """Return the time per call of a burst that calls nothing, in this process."""
        graph = self._calls.clocks["kernel"][0] == "graph"
        run = self._calls.idle.captured(count) if graph else partial(self._calls.idle.run, count)
        run()
        synchronize(self._calls.device)
        start = perf_counter()
        run()
        synchronize(self._calls.device)
        return 1e6 * (perf_counter() - start) / count
