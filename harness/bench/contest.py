"""Check and time all contenders of one problem in one process, and return their rows.

    operands from the seed, on the device
    each contender: convert ─> prepare ─> fresh activations in place ─> run on NaN-filled output
                    ─> compare with the fp64 reference (output_checks.py) ─> exact products of small
                    integers (exact_draws.py) ─> spot-check many calls (spot_checks.py)
    in scope chain, 8 layers: repeat these checks for every layer's launch, in order
    time the correct contenders together, once for each scope and cache state (timing.py), with spot
    checks among the samples; compare with the device's ceilings (results/ceilings.py); refresh the
    activations, rerun without clearing the previous output, and compare again
    after each step: verify that operands and settings are unchanged (stages.py)
    contenders from outside the package: each in a process of its own (guest_contest.py)

This process judges, and never imports what it judges from outside (TRUST.md). The row records the
seeds of activations. A case that cannot run gets a row; a CUDA error ends the contest: Fatal.
"""

import gc
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import SystemRandom

import torch

from sparsebench.errors import SparsebenchError
from sparsebench.formats._format import Format
from sparsebench.harness.bench.contest_state import (
    NO_MEMORY,
    Announce,
    CheckedCall,
    ContestOptions,
    Fatal,
    OnFailure,
    RunningContender,
    checked_before,
    end_status,
    exchange_twins,
    one_line,
    synchronize,
)
from sparsebench.harness.bench.correctness import Expected
from sparsebench.harness.bench.energy import facts_under_load
from sparsebench.harness.bench.exact_draws import check_exact
from sparsebench.harness.bench.guest_contest import measure_guests
from sparsebench.harness.bench.guest_process import GuestQueue
from sparsebench.harness.bench.operands import Layers
from sparsebench.harness.bench.output_checks import (
    Variant,
    arrays_of_answers,
    judge,
    misfit,
    poison_outputs,
    right_answers,
    variant,
)
from sparsebench.harness.bench.prepare import (
    Conversions,
    added_memory,
    entries_of,
    operands_of,
    prepare,
    prepare_chain,
)
from sparsebench.harness.bench.sampling import CHAIN, LAYERS, SCOPES, distinct_measures
from sparsebench.harness.bench.spot_checks import A, B, SpotChecks, right_outputs
from sparsebench.harness.bench.stages import Spoiled, Stages
from sparsebench.harness.bench.tampering import TamperingError
from sparsebench.harness.bench.timing import ready, time_together
from sparsebench.harness.catalog import is_outside, load_op
from sparsebench.results.record import Case, Contender, Problem, Row, Status

BEFORE, AFTER = "before timing", "after timing"


def run(
    problem: Problem,
    contenders: Sequence[Contender],
    device: torch.device,
    data: Path | None,
    options: ContestOptions = ContestOptions(),  # noqa: B008 (frozen)
    announce: Announce = lambda case, stage: None,
    on_failure: OnFailure = lambda *failure: None,
) -> tuple[list[Row], dict[str, float]]:
    """Return the rows of every contender, and the seconds spent by stage."""
    readings = load_op(problem.op).readings
    measures = distinct_measures(options.measures, device.type, readings)
    options = replace(options, measures=measures)
    spent_s, ended = Counter[str](), dict[str, RunningContender]()
    while left := [c for c in contenders if Case(problem, c).id not in ended]:
        entries = entries_of(problem, left, device, options)
        stages = Stages(device, announce, on_failure)
        try:
            if any(entry.running for entry in entries):  # draw no operands that none would take
                with closing(RunningContest(entries, stages, data, options)) as contest:
                    contest.prepare()
                    contest.start()
                    contest.measure()
                    contest.measure_guests()
        except Spoiled as spoiled:  # begin again without this contender
            entries = [spoiled.entry]
        except (*NO_MEMORY, SparsebenchError) as error:
            status, detail = end_status(error)
            for entry in entries:
                entry.end(status, f"{stages.latest}: {detail}")
        spent_s.update(stages.spent_s)
        ended |= {entry.row.case.id: entry for entry in entries}
    each = [ended[Case(problem, contender).id] for contender in contenders]
    return [row for entry in each for row in entry.rows(options.measures)], dict(spent_s)


class RunningContest:
    """A problem being measured, which alone changes its entries.

    `guests` are code from outside the package; `together`, nothing is measured and there are none.
    """

    def __init__(
        self,
        entries: Sequence[RunningContender],
        stages: Stages,
        data: Path | None = None,
        options: ContestOptions = ContestOptions(),  # noqa: B008 (frozen)
        *,
        together: bool = False,
    ) -> None:
        """Build the operands. Raises SparsebenchError, OutOfMemoryError, MemoryError."""
        self.guests = [e for e in entries if is_outside(e.contender) and not together]
        self.entries = [entry for entry in entries if entry not in self.guests]
        self.stages, self.options = stages, options
        self.problem = problem = entries[0].row.case.problem
        stages.announce("", "operands")
        with stages.stage("operands"):
            op, chained = load_op(problem.op), CHAIN in dict(self.options.measures)
            count = LAYERS if chained and not op.pattern else 1
            unpruned = any(entry.contender.is_unpruned for entry in entries)
            self.layers = Layers(problem, op, stages.device, data, count, unpruned)
            for layer in self.layers.each:
                stages.guard.watch(layer.arrays)
            synchronize(stages.device)
        for entry in entries:
            entry.record(**self.layers.facts)
            if chained and op.pattern:
                expected = "expected an op with a dense output"
                entry.leave_chain(Status.UNSUPPORTED, f"{expected}, found {problem.op}")
        self.processes = GuestQueue(len(self.guests), stages.device)

    def prepare(self) -> None:
        """Prepare every contender, in random order."""
        conversions = Conversions(self.layers.each[0], self.stages)
        seed = f"{self.problem.id} {self.options.replicate} {self.options.attempt} prepare"
        shuffled = random.Random(seed).sample(self.entries, len(self.entries))
        for entry in sorted(shuffled, key=lambda entry: entry.contender.twin):
            if entry.running:
                self._prepare(entry, conversions)
            if entry.running and len(self.layers.each) > 1:
                with self.stages.at(entry, "chain"):
                    prepare_chain(self.layers, entry)
                    synchronize(self.stages.device)
                    self.stages.verify()
        exchange_twins(self.entries, random.Random(f"{seed} twins"))

    def _prepare(self, entry: RunningContender, conversions: Conversions) -> None:
        """Convert, then let the kernel pack, compile and tune."""
        case, op, weights = entry.row.case, self.layers.op, dict[str, Format]()
        with self.stages.at(entry, "convert"):
            weights, facts = conversions.weights(case.contender)
            entry.record(**facts)
            if op.pattern:  # a sparse output is packed like it
                pattern = weights.pop(op.pattern)
                entry.pattern = None if case.contender.format == "dense" else pattern
        if not entry.running:
            return
        choices = {e.row.case.id: e.row.choice for e in self.entries if case.contender.twin}
        earlier = self.options.pinned.get(case.id) or choices.get(case.original.id) or None
        with self.stages.at(entry, "prepare"), added_memory(self.stages.device) as memory:
            further = {"pattern": entry.pattern, "timed": self.options.timed.get(case.id, ())}
            operands = operands_of(self.layers.each[0], weights, earlier, **further)
            launch, facts = prepare(operands, case.contender)
            entry.calls["kernel"] = CheckedCall(launch, SpotChecks(self.layers.first))
            entry.record(**facts)
        entry.record(**memory)
        if entry.running:  # apart, so that checksums do not count as memory
            with self.stages.at(entry, "prepare"):
                self.stages.verify()

    def start(self) -> None:
        """Check and capture every contender that was prepared, ready to be timed."""
        self.check(BEFORE)
        check_exact(self.entries, self.layers, self.options, self.stages)
        self.redraw()
        self.layers.keep(A)
        for entry in self.entries:
            if entry.running:
                with self.stages.at(entry, "capture"):
                    self._capture(entry)
            if entry.running:
                with self.stages.at(entry, "check"):
                    self._burst(entry)

    def _capture(self, entry: RunningContender) -> None:
        """Make the calls ready to be timed; a chain only if one CUDA graph can hold it."""
        for scope, checked in entry.calls.items():
            timed = ready(checked.work, self.stages.device)
            checked.timed = replace(timed, spots=checked.spots, turns=checked.spots.turns)
            if scope == CHAIN and timed.clock == "events":
                entry.leave_chain(Status.UNSUPPORTED, timed.why)

    def _burst(self, entry: RunningContender) -> None:
        """Inspect many calls of each scope that is timed."""
        scopes = sorted(dict(self.options.measures))
        timed = [(call, entry.spots_in(s)) for s in scopes if (call := entry.timed_in(s))]
        for call, spots in {call.call: (call, spots) for call, spots in timed}.values():
            spots.burst(call.call, partial(synchronize, self.stages.device))
            self.stages.verify()
            self._end_if_wrong(entry, spots, BEFORE)

    def _end_if_wrong(self, entry: RunningContender, spots: SpotChecks, when: str) -> None:
        wrong = spots.verdict()
        if wrong and entry.running:
            entry.end(Status.WRONG, f"{when}: {wrong}")

    def measure(self) -> None:
        """Time the correct contenders in every scope and cache state, and check them again."""
        for scope, cache in self.options.measures:
            if scope in SCOPES:
                self.time(scope, cache)
        if self.options.energy:
            self._measure_energy()
        self.check(AFTER)

    def measure_guests(self) -> None:
        """Measure each contender from outside, alone with a right baseline."""
        right = [entry for entry in self.entries if entry.running]
        yardsticks = [entry for entry in right if entry.contender.baseline] or right[:1]
        for entry in self.entries:  # the guests need the memory
            if entry not in yardsticks:
                entry.release()
        place = self.layers, self.stages, self.options
        measure_guests(self.guests, yardsticks, *place, self.processes)

    def close(self) -> None:
        self.processes.close()

    def time(self, scope: str, cache: str) -> None:
        """Time the correct contenders together; each gets a row for this scope and cache state."""
        timed = [(entry, call) for entry in self.entries if (call := entry.timed_in(scope))]
        if not timed:
            return
        self.stages.announce("", "timing")
        last = ""

        def announce(number: int) -> None:
            """Announce each sample, and check a contender after its turn."""
            nonlocal last
            case = timed[number][0].row.case.id
            if case != last:
                self._end_if_tampered(last)
                last = case
            self.stages.announce(case, "timing")

        seed = f"{self.problem.id} {self.options.replicate} {self.options.attempt}"
        with self.stages.stage("timing"):
            try:
                samples = time_together(
                    [call for _, call in timed],
                    self.stages.device,
                    seed,
                    announce if self.options.attempt else None,
                    scope=scope,
                    cache=cache,
                )
                self._end_if_tampered(last)
            except Fatal:
                raise
            except Exception as error:
                raise Fatal("", f"timing: {one_line(error)}") from error
        for (entry, call), taken in zip(timed, samples, strict=True):
            entry.add((scope, cache), call, taken, self.options, self.layers.output_bytes)
            for reading, state in self.options.measures if taken.has_readings else ():
                if reading not in SCOPES and state == cache:
                    entry.add_reading((reading, cache), call, taken.of(reading))
        for entry, _ in timed:
            self._end_if_wrong(entry, entry.spots_in(scope), "among the timed calls")

    def _end_if_tampered(self, case: str) -> None:
        """End the process if something was changed while timing; blame the last announced case."""
        try:
            self.stages.verify()
        except TamperingError as error:
            raise Fatal(case, f"timing: {error}") from error

    def _measure_energy(self) -> None:
        """Measure each call alone, under two loads."""
        for entry in self.entries:
            if call := entry.calls.get("kernel"):
                with self.stages.at(entry, "energy"):
                    facts = facts_under_load(call.call, self.stages.device)
                    entry.record_timed(("kernel", "op"), **facts)

    def check(self, when: str) -> None:
        """Redraw the activations, then run every contender and judge it."""
        if not any(entry.running for entry in self.entries):
            return
        self.stages.announce("", "reference")
        with self.stages.stage("check"):
            self.layers.forget()  # an answer needs the memory of the copies
            self.redraw()
            answers = self._answers(when)
            if when == BEFORE:
                self.layers.keep(B)
        arrays = arrays_of_answers(answers)
        self.stages.guard.watch(arrays)
        for entry in self.entries:
            if entry.running:
                with self.stages.at(entry, "check"):
                    for scope in entry.calls:
                        self._check_call(entry, scope, answers[self._variant(entry)], when)
        self.stages.guard.forget({*arrays})

    def _check_call(
        self, entry: RunningContender, scope: str, expected: Sequence[Expected], when: str
    ) -> None:
        """Run a launch, or a chain, and judge each output."""
        checked = entry.calls.get(scope)
        if checked is None:  # the launch alone was wrong
            return
        if when == BEFORE:
            poison_outputs(checked.call)
        outputs = checked.call()
        self.stages.verify()
        allowed = (entry.contender.error or {}).get("at_most")
        right = [replace(each, allowed=allowed) for each in expected[: len(checked.launches)]]
        losses = [launch.lost() if launch.lost else 0 for launch in checked.launches]
        errors, reason = judge(outputs, right, losses, entry.pattern)
        if reason:
            entry.end(Status.WRONG, f"{when}{reason}")
        elif when == BEFORE and (judged := right_outputs(outputs, errors["error"])):
            checked.spots.right[B] = judged
        entry.record_errors(scope, errors)

    def _answers(self, when: str) -> dict[Variant, list[Expected]]:
        """Compute what each layer is expected to give, for each variant of the contenders.

        If memory runs out, compute those of a part (Op.sample). If it does again, end the A/A
        twins, then all contenders: all weights of Qwen3-32B in fp8, dense and 2:4, take 57 GB. If
        an answer does not fit its dtype, every contender ends.
        """
        answers, reason = dict[Variant, list[Expected]](), ""
        for step in range(4):
            for entry in self.entries:
                if entry.running and (step == 3 or (step == 2 and entry.contender.twin)):
                    entry.end(Status.OUT_OF_MEMORY, reason)
            one_of = {self._variant(e): e.contender for e in self.entries if e.running}
            try:
                for of in sorted(one_of, reverse=True):
                    in_part = step > 0 or when == AFTER or self._checked_before(of)
                    seed = SystemRandom().getrandbits(64) if in_part else None
                    answers[of] = right_answers(self.layers, one_of[of], seed)
                break
            except NO_MEMORY as error:
                reason = f"reference, {when}: {one_line(error)}"
            answers.clear()
            gc.collect()
            if self.stages.device.type == "cuda":
                torch.cuda.empty_cache()
        for entry in self.entries if when == BEFORE and reason else ():
            if entry.running and not checked_before(entry.row, self.options):
                samples = (each.sample for each in answers[self._variant(entry)])
                entry.record(judged_part=", ".join({each.text for each in samples if each}))
        reason = next(filter(None, map(misfit, answers.values())), "")
        for entry in self.entries if reason else ():
            if entry.running:
                entry.end(Status.UNSUPPORTED, reason)
        return {} if reason else answers

    def _checked_before(self, of: Variant) -> bool:
        """Return whether an earlier process compared whole outputs of the same configurations."""
        return all(
            checked_before(entry.row, self.options)
            for entry in self.entries
            if entry.running and self._variant(entry) == of
        )

    def _variant(self, entry: RunningContender) -> Variant:
        return variant(self.layers.op, entry.contender)

    def redraw(self) -> None:
        """Draw new activations, and record their seed in the rows."""
        draw = self.layers.redraw()
        self.stages.guard.renew(self.layers.activations)
        for entry in self.entries:
            if entry.running:
                entry.record(draws=(*entry.row.draws, draw))
