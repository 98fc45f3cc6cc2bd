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

from dataclasses import replace
from functools import partial
from itertools import groupby
from math import inf
from operator import itemgetter
from statistics import median

from sparsebench.harness.bench.contest_state import GuestLoss, synchronize
from sparsebench.harness.bench.guest_calls import GuestCalls
from sparsebench.harness.bench.sampling import CAPTURED, INTERRUPTED, call_of, sample_budget
from sparsebench.harness.bench.spot_checks import SHARE
from sparsebench.harness.bench.timing import (
    Order,
    Samples,
    TimedSample,
    samples_alone,
    time_together,
)
from sparsebench.results.record import Status

WAKE_US = 5e3  # two processes take turns on a GPU in 3 ms
TOLERANCE = 0.1  # of a sample, which may be hot while a burst is throttled by power
# For a request and its answer: 30 to 250 µs on an H200, 1,200 µs where two cores are virtual.
SLACK_US = {"cuda": 400.0, "cpu": 2500.0}
BURST_US = 2e4  # a burst takes about as long, but has at least LEAST_CALLS
LEAST_CALLS, BURSTS = 4, 5  # BURSTS: tries, of which the fastest counts
# How far the yardstick's times may differ, by its clock: a ratio, and µs beyond it. The host has
# other work: called from Python, one call took 44 µs in one process and 55 in another. On a CPU, a
# call of 3.6 µs took 11 µs in a process that had just waited for a request.
AGREE = {"graph": (1.1, 0.0), "events": (3.0, 0.0), "host": (3.0, 20.0)}
COMPARED = 8  # outputs of a burst: one that leaves out a tenth of its calls passes in 43 %
TRIES = 3
COMPARE = "compare"  # a sample whose output is compared, too


class GuestTimes:
    """The times of a measure."""

    def __init__(self, calls: GuestCalls, scope: str, state: str) -> None:
        self._calls, self._scope, self._state = calls, scope, state

    def samples(self) -> Samples:
        """Return samples that are confirmed. Raises GuestLoss."""
        for _ in range(TRIES):
            with self._calls.stage("timing"):
                *of_yardstick, mine = self._take()
                doubt = "".join(map(self._disagreement, of_yardstick)) or self._unplanned(mine)
            with self._calls.stage("audit"):
                doubt = doubt or self._audit(median(mine.times_us))
            if not doubt:
                return mine
        raise GuestLoss(Status.FAILED, doubt)

    def _take(self) -> list[Samples]:
        """Return the samples of the yardstick, if there is one, and of the contender, by turns."""
        call = self._calls.timed_in(self._scope)
        return time_together(
            [call] * self._calls.number + [replace(call, turns=self._comparisons)],
            self._calls.device,
            f"{self._calls.entry.row.case.problem.id} {self._calls.options.replicate} guest",
            scope=self._scope,
            cache=self._state,
            clock=self._turns,
        )

    def _comparisons(self, rounds: int, per_round: int) -> list[list[str]]:
        """Return the calls of each round, and in which of them outputs are compared."""
        chosen = self._calls.random.sample(range(rounds), max(1, int(SHARE * rounds)))
        return [[COMPARE if n in chosen else ""] * per_round for n in range(rounds)]

    def _turns(self, order: Order) -> list[TimedSample]:
        """Return samples as the guest claims them, of as many calls at once as there are sets."""
        samples = []
        for number, turn in groupby(order, itemgetter(0)):
            calls = [*turn]
            for start in range(0, len(calls), self._calls.count):
                part = calls[start : start + self._calls.count]
                if number == self._calls.number:
                    self._calls.fill(len(part))
                ask = {"scope": self._scope, "cache": self._state, "count": len(part)}
                claims = self._calls.ask("turn", number=number, **ask)
                times = [TimedSample(number, float(us), bool(late)) for us, late in claims]
                if len(times) != len(part) or not all(0 < t.time_us < inf for t in times):
                    raise ValueError(f"expected {len(part)} times, found {str(claims)[:80]}")
                samples += times
                if part[0][2] == COMPARE:
                    every = len(part), len(part)
                    self._calls.compare(*every, self._scope, 0, "among the timed ones")
        return samples

    def _disagreement(self, samples: Samples) -> str:
        """Return why the yardstick's times here and in the judge's process differ, or ""."""
        call = self._calls.yardstick and self._calls.yardstick.timed_in(self._scope)
        if not (self._calls.yardstick and call):
            return ""
        alone = replace(call, spots=None, turns=samples_alone)  # leaves the activations as they are
        seed = f"{self._calls.random.random()}"
        (there,) = time_together(
            [alone], self._calls.device, seed, scope=self._scope, cache=self._state
        )
        here_us, there_us = median(samples.times_us), median(there.times_us)
        ratio, cold_us = AGREE[call.clock]
        if there_us / ratio <= here_us <= there_us * ratio + cold_us:
            return ""
        expected = f"expected {there_us:.4g} µs as in the judge's process, found {here_us:.4g}"
        return f"{self._calls.yardstick.contender.label} beside it: {expected}"

    def _unplanned(self, mine: Samples) -> str:
        """Return why the samples are not as many as their time allows (sampling.py), or ""."""
        graph = self._calls.timed_in(self._scope).clock == "graph"
        by, plan = CAPTURED if graph else INTERRUPTED, mine.plan
        least, most = (sample_budget(median(mine.times_us) * factor) for factor in (by, 1 / by))
        if least <= plan and (plan <= most or not graph):
            return ""
        return f"expected {least} to {most} rounds and calls of such a time, found {plan}"

    def _audit(self, claimed_us: float) -> str:
        """Return why bursts do not confirm the samples, or ""."""
        of = call_of(self._scope)
        count = min(self._calls.count, max(LEAST_CALLS, int(BURST_US / claimed_us)))
        idle_us = min(self._idle_us(count) for _ in range(BURSTS))
        most_us = (1 + TOLERANCE) * claimed_us + idle_us + SLACK_US[self._calls.device.type] / count
        self._calls.burst(of, count)  # captures
        for _ in range(BURSTS):
            took_us, with_wake_us = (
                1e6 * took_s / count for took_s in self._calls.inspect_burst(of, count, COMPARED)
            )
            if took_us <= most_us and with_wake_us <= most_us + WAKE_US / count:
                return ""
        actual = f"found {took_us:.4g} µs by the judge's clock"
        return f"expected calls back to back to take at most {most_us:.4g} µs, {actual}"

    def _idle_us(self, count: int) -> float:
        """Return the time per call of a burst that calls nothing, in this process."""
        graph = self._calls.timed["kernel"].clock == "graph"
        run = self._calls.idle.capture(count) if graph else partial(self._calls.idle.run, count)

        def whole() -> None:
            run()
            synchronize(self._calls.device)

        whole()
        return 1e6 * self._calls.clock(whole)[0] / count
