"""Which contests a run measures: those selected, and the A/A pairs that every run has.

Dense contenders with unpruned weights are added before the selection (unpruned.py).

--only "sparsity=0.8|0.9 kernel=bsr_triton"    every named field has one of its values
--only "kernel!=cusparse_csr|cusparse_bsr"     or none of them
--only "m!=16 m!=64"                           a field named twice has to meet both
--only "op=linear_dgrad"                       op, format, kernel and case are fields, too

A/A pairs time the same kernel twice, which shows how far apart equal things come out here:

    references   five contests that every run has, dense against dense:
                 launch    almost no work: the cost of launching
                 memory    one token: reading the weights is the work
                 compute   as many tokens as features: multiplying is the work
                 between   two lengths of call between the first and the others (tables/noise.py)
    twins        in one of TWIN_EVERY problems of a suite, every contender competes twice

The ceilings of a run are measured on `memory` and `compute` as well (bench/device_ceilings.py). A
reference that is faster than a ceiling raises it (results/ceilings.py). A twin is prepared anew: it
has its own packing, output and addresses, as another contender would have.
"""

import random
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from math import isfinite
from typing import Any

from sparsebench._discovery import did_you_mean
from sparsebench.errors import SuiteError
from sparsebench.harness.bench.device_ceilings import COMPUTE, DENSE, MEMORY
from sparsebench.harness.bench.prepare import unsupported_on
from sparsebench.harness.catalog import load_op
from sparsebench.harness.plan.suite import Contest, Suite
from sparsebench.harness.plan.unpruned import with_unpruned
from sparsebench.results.record import Case, Contender, Problem

Condition = tuple[str, Collection[str]]
"""The name of a field, with a ! at its end to exclude the values, and the values (see `text`)."""


def planned_contests(
    suite: Suite, device: str, condition: str = "", unpruned: bool = True
) -> list[Contest]:
    """Return the contests of a run: A/A references, then the suite's, some with twins.

    Without `unpruned`, dense contenders multiply pruned weights only, as in runs up to 0.4.
    """
    contests = with_unpruned(suite.contests) if unpruned else suite.contests
    return references(device) + with_twins(only(contests, condition), suite.name)


def only(contests: Sequence[Contest], condition: str) -> list[Contest]:
    """Keep the cases that meet `field=value field=this|that`, with their baselines."""
    conditions = _parse_condition(condition)
    fields = (name for contest in contests for name in contest.problem.fields)
    names = {"case", "format", "kernel", "op", *fields}
    for name, values in conditions:
        if name.removesuffix("!") not in names or not all(values):
            expected = f"field=value with a field of {', '.join(sorted(names))}"
            term = f"{name}={'|'.join(values)}".removesuffix("=")
            hint = did_you_mean(name, names)
            raise SuiteError(f"--only: expected {expected}; found {term!r}{hint}")
    field_names = {name.removesuffix("!") for name, _ in conditions}
    present: dict[str, set[str]] = {name: set() for name in field_names}
    selected = []
    for contest in contests:
        matching = []
        for contender in contest.contenders:
            facts = _facts(contest.problem, contender, field_names)
            for name, value in facts.items():
                present[name].add(value)
            if _meet(facts, conditions):
                matching.append(contender)
        if matching:
            contenders = (c for c in contest.contenders if c.baseline or c in matching)
            selected.append(Contest(contest.problem, tuple(contenders)))
    for name, value in [(name, value) for name, values in conditions for value in values]:
        if value not in present[name.removesuffix("!")]:
            hint = did_you_mean(value, present[name.removesuffix("!")])
            expected = f"at least one case of {name}={value}"
            raise SuiteError(f"--only {condition!r}: expected {expected}, found none{hint}")
    if not selected:
        raise SuiteError(f"--only {condition!r}: expected at least one case, found none")
    return selected


def has_only_baselines(suite: Suite, device: str, condition: str = "") -> bool:
    """Return whether a device supports no contender of a suite but its baselines."""
    contests = only(suite.contests, condition)
    rivals = [(c.problem, k) for c in contests for k in c.contenders if not k.baseline]
    return bool(rivals) and all(unsupported_on(device, *rival) for rival in rivals)


def meets(problem: Problem, contender: Contender, condition: str) -> bool:
    """Return whether a case meets a condition that is written as for `only`."""
    conditions = _parse_condition(condition)
    names = {name.removesuffix("!") for name, _ in conditions}
    return _meet(_facts(problem, contender, names), conditions)


def _parse_condition(condition: str) -> list[Condition]:
    parts = [part.partition("=")[::2] for part in condition.replace(",", " ").split()]
    return [(name, dict.fromkeys(map(text, value.split("|")))) for name, value in parts]


def _facts(problem: Problem, contender: Contender, names: Set[str]) -> dict[str, str]:
    """Return the text of each named field that the case has."""
    facts: dict[str, Any] = {n: problem.fields[n] for n in names & problem.fields.keys()}
    facts |= {"op": problem.op, "format": contender.format, "kernel": contender.kernel}
    facts |= {"case": Case(problem, contender).id} if "case" in names else {}
    return {name: text(facts[name]) for name in names & facts.keys()}


def _meet(facts: Mapping[str, str], conditions: Iterable[Condition]) -> bool:
    return all(
        (facts.get(name.removesuffix("!")) in values) is not name.endswith("!")
        for name, values in conditions
    )


def text(value: Any) -> str:
    """Write a field as a user would: 64, 0.9, 16x32."""
    if isinstance(value, list):
        return "x".join(str(v) for v in value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return f"{number:g}" if isfinite(number) else str(value)  # 12e3456789012345 is a case


SEED = 2**31 - 1  # seed of the references; no suite has it
TWIN_EVERY = 20  # 5 % of the problems; at least one

LAUNCH = {"cuda": (1, 64, 64, "bf16"), "cpu": (1, 64, 64, "fp32")}  # m, n, k, dtype

BETWEEN = {  # about 14 and 35 µs on an NVIDIA H200, 10 and 40 µs on two cores
    "cuda": ((64, 4096, 4096, "bf16"), (64, 14336, 4096, "bf16")),
    "cpu": ((1, 256, 256, "fp32"), (1, 512, 512, "fp32")),
}


def references(device: str) -> list[Contest]:
    """Return the reference contests for a device, by its name."""
    kind = "cpu" if device == "cpu" else "cuda"
    first = Contender("dense", DENSE[kind], baseline=True)
    pair, op = (first, replace(first, baseline=False, twin=True)), load_op("linear")
    contests = []
    for m, n, k, dtype in (*sizes(kind), *BETWEEN[kind]):
        fields = {**op.defaults, "dtype": dtype, "m": m, "n": n, "k": k}
        problem = Problem("linear", fields, SEED, defaults=op.defaults)
        contests.append(Contest(problem, pair, reference=True))
    return contests


def sizes(kind: str) -> list[tuple[int, int, int, str]]:
    """Return m, n, k and dtype of the reference contests of each kind, on a `cpu` or on `cuda`."""
    return [which[kind] for which in (LAUNCH, MEMORY, COMPUTE)]


def with_twins(contests: Sequence[Contest], seed: str) -> list[Contest]:
    """Give every contender of some contests, the same ones for a seed, a twin."""
    count = -(-len(contests) // TWIN_EVERY)
    planned = [*contests]
    for number in random.Random(seed).sample(range(len(contests)), count):
        contenders = planned[number].contenders
        twins = (replace(c, baseline=False, twin=True) for c in contenders)
        planned[number] = replace(planned[number], contenders=(*contenders, *twins))
    return planned
