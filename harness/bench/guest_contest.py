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
from functools import partial
from math import prod
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from sparsebench.harness.bench.arena import Arena, Layout, dtype_name
from sparsebench.harness.bench.contest_state import (
    ContestOptions,
    Fatal,
    RunningContender,
    checked_before,
    end_status,
    one_line,
    synchronize,
    traceback_of,
)
from sparsebench.harness.bench.correctness import form_error
from sparsebench.harness.bench.exact_draws import exact_draws
from sparsebench.harness.bench.guest import EXACT
from sparsebench.harness.bench.guest_calls import GuestCalls
from sparsebench.harness.bench.guest_process import GuestLoss, GuestQueue
from sparsebench.harness.bench.guest_times import GuestTimes
from sparsebench.harness.bench.operands import Layers
from sparsebench.harness.bench.prepare import json_choice
from sparsebench.harness.bench.process_state import rewritten_modules
from sparsebench.harness.bench.sampling import CHAIN, layers_of
from sparsebench.harness.bench.stages import Stages
from sparsebench.harness.bench.timing import TimedCall
from sparsebench.results.record import Status

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
        case = self.entry.row.case.id
        rewritten_modules()
        try:
            self._measure()
            if modules := rewritten_modules():
                raise GuestLoss(Status.WRONG, f"rewrote the files of {', '.join(modules[:3])}")
        except GuestLoss as loss:
            self.entry.end(loss.status, str(loss))
            if loss.status not in (Status.UNSUPPORTED, Status.WRONG):
                self.calls.stages.on_failure(case, str(loss), loss.traceback)
        except Exception as error:  # whatever the guest's answers make this process do
            try:
                synchronize(self.calls.stages.device)
            except Exception as dead:
                raise Fatal(case, one_line(dead)) from error
            status, reason = end_status(error)
            if status is Status.FAILED:
                reason = f"no answer of its process: {reason}"
                self.calls.stages.on_failure(case, reason, traceback_of(error))
            self.entry.end(status, reason)
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
        self._share()
        self._check("before timing", whole=self.whole)
        with self.calls.stage("capture"):
            names = CLOCKS[self.calls.device.type]
            for scope, (clock, why) in self.calls.ask("capture").items():
                if clock not in names:
                    raise ValueError(f"expected the clock {' or '.join(names)}, found {clock}")
                self.calls.timed[scope] = TimedCall(tuple, clock, str(why))
            chain = self.calls.timed.get(CHAIN)
            if chain and chain.clock == "events":
                self.entry.leave_chain(Status.UNSUPPORTED, chain.why)
        for scope, state in self.options.measures:
            if scope != CHAIN or not self.entry.chain_failure:
                self._time(scope, state)
        if self.options.energy:
            with self.calls.stage("energy"):
                facts = self.calls.ask("energy", number=self.calls.number)
            facts = {name: facts[name] for name in ("loads", "energy_j", "energy_window_s")}
            self.entry.record_timed(("kernel", "op"), **facts)
        self._check("after timing", whole=False)

    def _open(self) -> None:
        """Give the guest its operands: copies, so that it can spoil only its own."""
        first, seed = self.layers.each[0], self.calls.random.getrandbits(62)
        self.exact = None if self.entry.contender.error else exact_draws(self.op, first, seed)
        layers = [(layer.name, layer) for layer in self.layers.each]
        if self.exact and not self.op.pattern:
            layers.append((f" {EXACT}", self.exact.layer))
        arrays = {
            f"{name}{suffix}": tensor
            for suffix, layer in layers
            for dense in [layer.with_weights_of(self.entry.contender).dense]
            for name, tensor in {**dense.weights, **dense.activations}.items()
        }
        shared = self._arena({n: (list(t.shape), dtype_name(t.dtype)) for n, t in arrays.items()})
        for name, tensor in arrays.items():
            shared.arrays[name].copy_(tensor)
        every = self.calls.contenders  # which all multiply the weights that the guest gets
        contenders = [asdict(replace(contender, weights="pruned")) for contender in every]
        about = {"problem": asdict(self.layers.each[0].problem), "contenders": contenders}
        if reason := self.calls.ask("open", **about, handle=shared.handle, layout=shared.layout):
            raise GuestLoss(Status.UNSUPPORTED, str(reason))

    def _arena(self, layout: Layout) -> Arena:
        self.arenas.append(Arena(layout, self.calls.device))
        return self.arenas[-1]

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
        choice, chain = json_choice(facts["choice"]), len(self.calls.each) > 1
        if mine:
            self.form = facts["form"]
            held = {n: int(facts[n]) for n in ("held_bytes", "peak_bytes") if facts.get(n)}
            candidates = tuple(map(dict, facts["candidates"]))
            code = facts["code"] if isinstance(facts["code"], str) else None
            self.entry.record(choice=choice, code=code, candidates=candidates, **held)
            self.entry.record(convert_us=min(took_us), prepare_s=spent, stored_bytes=stored)
            self.whole = not checked_before(self.entry.row, self.options)
        with self.calls.stage("chain" if chain else "prepare"):
            further = partial(self.calls.ask, "further", number=number, choice=choice)
            if chain:
                try:
                    further(layers=[layer.name for layer in self.layers.each[1:]], scope=CHAIN)
                except GuestLoss as loss:
                    if loss.status not in (Status.UNSUPPORTED, Status.OUT_OF_MEMORY):
                        raise
                    self.entry.leave_chain(loss.status, str(loss))
            if mine and self.whole and self.exact and not self.op.pattern:
                further(layers=[f" {EXACT}"], scope=EXACT)

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
        shared = self._arena(layout)
        self.calls.ask("share", handle=shared.handle, layout=layout, count=self.calls.count)
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
                    if whole and self.exact and scope == "kernel":
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
