"""The calls of a guest, as the judge asks for them: on activations that no earlier call had."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from random import SystemRandom
from time import perf_counter
from typing import Any

from sparsebench.harness.bench.contest_state import (
    ContestOptions,
    GuestLoss,
    RunningContender,
    synchronize,
)
from sparsebench.harness.bench.guest import Burst
from sparsebench.harness.bench.guest_process import GuestProcess
from sparsebench.harness.bench.guest_sets import GuestSets
from sparsebench.harness.bench.operands import ChainLayer, Layers
from sparsebench.harness.bench.sampling import call_of, layers_of
from sparsebench.harness.bench.stages import Stages
from sparsebench.harness.bench.timing import TimedCall
from sparsebench.results.record import Status

ANSWER = 0.8  # of the contest's time limit, which ends the judge
SPOT_S = 0.2  # for comparing outputs of a turn or a burst; one at least


class GuestCalls:
    """A guest process with its contenders: the yardstick, if there is one, and entry `number`.

    count   sets of activations, once they are shared
    idle    a burst on them that calls nothing, in this process
    timed   the contender's calls by scope, once they are captured; the guest makes them
    """

    count: int
    idle: Burst

    def __init__(
        self,
        entry: RunningContender,
        yardstick: RunningContender | None,
        layers: Layers,
        stages: Stages,
        options: ContestOptions,
        process: GuestProcess,
    ) -> None:
        self.entry, self.yardstick, self.layers = entry, yardstick, layers
        self.stages, self.options, self.device = stages, options, stages.device
        contenders = [yardstick.row.case.contender] if yardstick else []
        self.contenders, self.number = [*contenders, entry.contender], len(contenders)
        self.process, self.random = process, SystemRandom()
        self.sets, self.timed = GuestSets(layers, entry.contender), dict[str, TimedCall]()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.stages.announce(self.entry.row.case.id, name)
        with self.stages.stage(name):
            yield

    def ask(self, what: str, **arguments: Any) -> Any:
        synchronize(self.device)  # the guest reads what this process wrote
        try:
            return self.process.ask(what, ANSWER * self.options.timeout_s, **arguments)
        except GuestLoss as loss:
            if arguments.get("number", self.number) == self.number:
                raise
            beside = f"{self.contenders[0].label} beside it: {loss}"
            raise GuestLoss(loss.status, beside, loss.traceback) from loss

    def further(
        self, number: int, choice: Mapping[str, Any], layers: Sequence[str], scope: str
    ) -> None:
        """Let a contender prepare its launches on these layers."""
        self.ask("further", number=number, choice=choice, layers=layers, scope=scope)

    def timed_in(self, scope: str) -> TimedCall:
        """Return the call that is timed in a scope, which the guest makes."""
        return self.timed[call_of(scope)].in_scope(scope, tuple)

    @property
    def each(self) -> list[ChainLayer]:
        """Return the layers of the calls: one if the contender has no chain."""
        return self.layers.each[: 1 if self.entry.chain_failure else None]

    def fill(self, count: int) -> None:
        """Write activations that no call has had into the first sets."""
        self.sets.fill(count, self.each)

    def burst(self, scope: str, count: int, fill: bool = False) -> int:
        return int(self.ask("burst", number=self.number, scope=scope, count=count, fill=fill))

    def inspect_burst(self, scope: str, count: int, calls: int) -> tuple[float, float]:
        """Burst on new activations, and compare some of the outputs.

        Return the seconds that it took, and with the request before it, which wakes the guest.
        """
        self.fill(count)
        synchronize(self.device)
        wake_s, _ = self.clock(partial(self.ask, "wake"))
        burst_s, lost = self.clock(partial(self.burst, scope, count))
        self.compare(count, calls, scope, lost, "back to back")
        return burst_s, wake_s + burst_s

    def clock(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """Return the seconds of work by this process's clock, without waits, and its result."""
        before = self.process.waits()  # takes a millisecond, so before the clock starts
        start = perf_counter()
        result = work()
        took_s = perf_counter() - start
        return max(0.0, took_s - self.process.waits().since(before)), result

    def compare(self, count: int, calls: int, scope: str, lost: int, when: str) -> None:
        """Compare outputs of `calls` of the first sets, chosen at random, for at most SPOT_S."""
        self.sets.receive(count)
        start = perf_counter()
        for number in self.random.sample(range(count), min(count, calls)):
            _, reason = self.sets.judge(number, layers_of(scope), lost, whole=False)
            if reason:
                raise GuestLoss(Status.WRONG, f"a call {when} is wrong: {reason}")
            if perf_counter() - start > SPOT_S:
                break
