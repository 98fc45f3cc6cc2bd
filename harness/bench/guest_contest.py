"""Measure a contender from outside the package: the judge's side of a guest process (guest.py).

    weights, activations ── arena ──> guest: convert, prepare, capture
    draws, in sets       ── arena ──> turns and bursts: a set for each call
    outputs              <─ arena ──  compared here, in full, with the op's definition in fp64
    times                <─ JSON ───  believed only if the judge's clock agrees (guest_times.py)

The guest process runs the contender and the *yardstick* alone: the baseline that has run beside the
package's kernels.

**Outputs.** Each call of the contender has activations that no earlier call had (guest_sets.py).
The judge compares the outputs of all calls in a quarter of the rounds, of 64 calls back to back
before them, and of some in every other burst, for at most 0.2 s each. It chooses afterwards, and
the operating system supplies all random numbers.

A guest that ends, hangs or breaks the protocol costs its own row alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import prod
from time import perf_counter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sparsebench.harness.bench.arena import Arena, Layout, dtype_name
from sparsebench.harness.bench.contest_state import (
    ContestOptions,
    GuestLoss,
    RunningContender,
    checked_before,
    line_of,
)
from sparsebench.harness.bench.correctness import form_error
from sparsebench.harness.bench.energy import Energy, facts_of_loads
from sparsebench.harness.bench.exact_draws import exact_draws
from sparsebench.harness.bench.guest import EXACT
from sparsebench.harness.bench.guest_calls import GuestCalls
from sparsebench.harness.bench.guest_process import GuestQueue
from sparsebench.harness.bench.guest_times import GuestTimes
from sparsebench.harness.bench.operands import ChainLayer, Layers
from sparsebench.harness.bench.prepare import facts_of
from sparsebench.harness.bench.process_state import rewritten_modules
from sparsebench.harness.bench.sampling import CHAIN, SCOPES, layers_of
from sparsebench.harness.bench.stages import Stages
from sparsebench.harness.bench.timing import TimedCall
from sparsebench.results.record import Status
from sparsebench.results.run.store import unreadable

MOST_SETS = 128  # of one contender; a large problem has at least one set
SETS_BYTES = {"cuda": 2**30, "cpu": 2**28}
CALLS = 64  # back to back before timing
CLOCKS = {"cuda": ("graph", "events"), "cpu": ("host",)}


def measure_guests(
    guests: Sequence[RunningContender],
    yardsticks: Sequence[RunningContender],
    layers: Layers,
    stages: Stages,
    options: ContestOptions,
    processes: GuestQueue,
) -> None:
    """Measure contenders from outside, each alone with a yardstick; a twin as its original."""
    choices: dict[str, Mapping[str, Any]] = {}
    for entry in guests:
        case = entry.row.case
        earlier = {case.id: choices[case.original.id]} if case.original.id in choices else {}
        pinned = replace(options, pinned=earlier | {**options.pinned})
        alike = [y for y in yardsticks if y.contender.weights == entry.contender.weights]
        yardstick = next(iter([*alike, *yardsticks]), None)
        calls = GuestCalls(entry, yardstick, layers, stages, pinned, processes.next())
        GuestContest(calls).run()
        choices |= {case.id: entry.row.choice} if entry.row.choice else {}


class GuestContest:
    """A contender from outside being measured; alone changes its entry."""

    def __init__(self, calls: GuestCalls) -> None:
        self.calls, self.entry, self.layers = calls, calls.entry, calls.layers
        self.options, self.op = calls.options, calls.layers.op
        self.arenas = list[Arena]()

    def run(self) -> None:
        """Measure the contender; its entry has the rows, or the reason why there are none."""
        with self.calls.stages.ending(self.entry, "no answer of its process"):
            rewritten_modules()
            try:
                self._measure()
                if changed := self.calls.stages.process.restore():
                    raise GuestLoss(Status.WRONG, f"changed {', '.join(changed)} of the judge")
                if modules := rewritten_modules():
                    raise GuestLoss(Status.WRONG, f"rewrote the files of {', '.join(modules[:3])}")
            finally:
                self.calls.process.child.kill()
                for arena in self.arenas:
                    arena.close()

    def _measure(self) -> None:
        with self.calls.stage("convert"):
            self.calls.process.begin(self.calls.device)
            self._open()
        for number in range(len(self.calls.contenders)):
            self._prepare(number)
        whole = not checked_before(self.entry.row, self.options)
        seed = self.calls.random.getrandbits(62)
        exact = whole and not self.entry.contender.error
        self.exact = exact_draws(self.op, self.layers.each[0], seed) if exact else None
        self._share()
        self._check("before timing", whole=whole)
        with self.calls.stage("capture"):
            names = CLOCKS[self.calls.device.type]
            for scope, (clock, why) in self.calls.ask("capture").items():
                if clock not in names:
                    raise ValueError(f"expected the clock {' or '.join(names)}, found {clock}")
                self.calls.timed[scope] = TimedCall(tuple, clock, line_of(str(why)))
            chain = self.calls.timed.get(CHAIN)
            if chain and chain.clock == "events":
                self.entry.leave_chain(Status.UNSUPPORTED, chain.why)
        for scope, state in self.options.measures:
            if scope not in SCOPES:
                continue
            if scope != CHAIN or not self.entry.chain_failure:
                self._time(scope, state)
        if self.options.energy:
            with self.calls.stage("energy"):
                loads = self.calls.ask("energy", number=self.calls.number)["loads"]
            facts = facts_of_loads(Energy(**loads["half"]), Energy(**loads["full"]))
            self.entry.record_timed(("kernel", "op"), **self._readable(facts))
        self._check("after timing", whole=False)

    def _open(self) -> None:
        """Give the guest its operands: copies, so that it can spoil only its own."""
        every = [self._operands(layer, layer.name) for layer in self.layers.each]
        shared = self._arena({name: x for operands in every for name, x in operands.items()})
        both = self.calls.contenders  # which multiply the weights that the guest gets
        contenders = [asdict(replace(contender, weights="pruned")) for contender in both]
        about = {"problem": asdict(self.layers.each[0].problem), "contenders": contenders}
        if reason := self.calls.ask("open", **about, handle=shared.handle, layout=shared.layout):
            raise GuestLoss(Status.UNSUPPORTED, str(reason))

    def _operands(self, layer: ChainLayer, suffix: str) -> dict[str, Tensor]:
        dense = layer.with_weights_of(self.entry.contender).dense
        return {f"{n}{suffix}": x for n, x in {**dense.weights, **dense.activations}.items()}

    def _arena(self, values: Mapping[str, Tensor], further: Layout = MappingProxyType({})) -> Arena:
        """Share an arena with these values, and with room for further arrays."""
        layout = {name: (list(x.shape), dtype_name(x.dtype)) for name, x in values.items()}
        self.arenas.append(Arena({**layout, **further}, self.calls.device))
        for name, x in values.items():
            self.arenas[-1].arrays[name].copy_(x)
        return self.arenas[-1]

    def _readable(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Return facts as the guest states them. Raises GuestLoss if no reader would take them."""
        if fault := unreadable(replace(self.entry.row, **facts)):
            raise GuestLoss(Status.FAILED, f"its process states: {fault}")
        return facts

    def _prepare(self, number: int) -> None:
        """Convert and prepare; times are the judge's."""
        mine, case = number == self.calls.number, self.entry.row.case
        with self.calls.stage("convert"):
            took_us = []
            for _ in range(2):  # the first call also allocates memory and loads kernels
                start = perf_counter()
                stored = int(self.calls.ask("convert", number=number))
                took_us.append(1e6 * (perf_counter() - start))
        options = self.options
        pinned = options.pinned.get(case.id), list(options.timed.get(case.id, ()))
        if not mine and self.calls.yardstick:
            pinned = dict(self.calls.yardstick.row.choice) or None, []
        with self.calls.stage("prepare"):
            start = perf_counter()
            facts = self.calls.ask("prepare", number=number, pinned=pinned[0], timed=pinned[1])
            spent = perf_counter() - start
        stated = facts_of(facts)
        if mine:
            self.form = facts["form"]
            held = {n: int(facts[n]) for n in ("held_bytes", "peak_bytes") if facts.get(n)}
            self.entry.record(**self._readable({**stated, **held, "stored_bytes": stored}))
            self.entry.record(convert_us=min(took_us), prepare_s=spent)
        if len(self.calls.each) > 1:
            with self.calls.stage("chain"):
                try:
                    names = [layer.name for layer in self.layers.each[1:]]
                    self.calls.further(number, stated["choice"], names, CHAIN)
                except GuestLoss as loss:
                    if loss.status not in (Status.UNSUPPORTED, Status.OUT_OF_MEMORY):
                        raise
                    self.entry.leave_chain(loss.status, str(loss))

    def _share(self) -> None:
        """Share sets of activations and outputs, if the output has a form that can be right."""
        layers, first = [layer.name for layer in self.calls.each], self.layers.each[0]
        expected = self.calls.sets.expected(first, first.dense.activations, whole=False)
        packed = self.op.pattern and self.entry.contender.format != "dense"
        if not packed and (reason := form_error(self.form, expected)):
            raise GuestLoss(Status.WRONG, f"before timing: {reason}")
        shape = self.form[0] if packed else list(expected.shape)
        most = 4 * expected.reference.numel()
        if packed and not (len(self.form) == 3 and min(shape) > 0 and prod(shape) <= most):
            raise GuestLoss(Status.WRONG, f"expected a packed output, found {self.form}")
        one: dict[str, tuple[list[int], str]] = {}
        for suffix in layers:
            for name, x in first.dense.activations.items():
                one[f"{name}{suffix}"] = list(x.shape), dtype_name(x.dtype)
            one[f"output{suffix}"] = shape, dtype_name(expected.dtype)
        size = sum(prod(s) * getattr(torch, dtype).itemsize for s, dtype in one.values())
        self.calls.count = max(
            1, min(MOST_SETS, SETS_BYTES[self.calls.device.type] // max(1, size))
        )
        layout = {
            f"{n} in set {j}": form for j in range(self.calls.count) for n, form in one.items()
        }
        if packed:
            layout["positions"] = [prod(shape)], "float64"
        values: dict[str, Tensor] = {}
        if self.exact and not self.op.pattern:  # integers for a further launch
            values = self._operands(self.exact.layer, f" {EXACT}")
        shared = self._arena(values, layout)
        self.calls.ask("share", handle=shared.handle, layout=shared.layout, count=self.calls.count)
        if values:
            with self.calls.stage("prepare"):
                choice = self.entry.row.choice
                self.calls.further(self.calls.number, choice, [f" {EXACT}"], EXACT)
        arrays = self.arenas[0].arrays | shared.arrays
        self.calls.idle = self.calls.sets.take(arrays, layers, self.calls.count)

    def _check(self, when: str, *, whole: bool) -> None:
        """Compare one call of each scope with the whole answer, and the exact draws."""
        with self.calls.stage("check"):
            for scope in ["kernel", CHAIN] if len(self.calls.each) > 1 else ["kernel"]:
                self.calls.fill(1)
                self.entry.record(draws=(*self.entry.row.draws, self.calls.sets.drawn))
                lost = self.calls.burst(scope, 1, fill=when == "before timing")
                self.calls.sets.receive(1)
                errors, reason = self.calls.sets.judge(0, layers_of(scope), lost, whole=whole)
                if reason:
                    raise GuestLoss(Status.WRONG, f"{when}: {reason}")
                self.entry.record_errors(scope, errors)
                if when == "before timing":
                    if self.exact and scope == "kernel":
                        self._check_exact()
                    self.calls.inspect_burst(scope, min(self.calls.count, CALLS), CALLS)

    def _check_exact(self) -> None:
        assert self.exact
        scope = "kernel" if self.op.pattern else EXACT
        activations, out = self.calls.sets.first()

        def call() -> Tensor:
            self.calls.sets.send(1)
            self.calls.burst(scope, 1)
            self.calls.sets.receive(1)
            return out

        if reason := self.exact.judge(call, activations, self.calls.sets.pack):
            raise GuestLoss(Status.WRONG, f"before timing: {reason}")

    def _time(self, scope: str, state: str) -> None:
        """Put the samples of a measure into a row."""
        mine = GuestTimes(self.calls, scope, state).samples()
        call, size = self.calls.timed_in(scope), self.layers.output_bytes
        self.entry.add((scope, state), call, mine, self.options, size)
