"""A/A pairs: the same kernel twice, to learn how far apart equal things come out here.

    references   five contests that every run has, dense against dense:
                 launch    almost nothing is computed: the cost of launching
                 memory    one token: reading the weights is the work
                 compute   as many tokens as features: multiplying is the work
                 between   two lengths of call between the first and the others (results/noise.py)
    twins        in one problem of TWIN_EVERY of a suite, every contender competes twice

The ceilings of a run are measured on the latter two as well (bench/ceilings.py). A reference that
is faster than a ceiling raises it (results/ceilings.py).

A twin is prepared anew: its own packing, output and addresses, as another contender would have.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from sparsebench.harness.bench.ceilings import COMPUTE, DENSE, MEMORY
from sparsebench.harness.catalog import load_op
from sparsebench.harness.plan.suite import Contest
from sparsebench.results.record import Contender, Problem

SEED = 2**31 - 1  # of the references, so that no problem of a suite is one of them
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
    pair = first, replace(first, baseline=False, twin=True)
    return [
        Contest(_problem(*size), pair, reference=True) for size in (*sizes(kind), *BETWEEN[kind])
    ]


def sizes(kind: str) -> list[tuple[int, int, int, str]]:
    """Return m, n, k and dtype of the reference contests of each kind, on a `cpu` or on `cuda`."""
    return [which[kind] for which in (LAUNCH, MEMORY, COMPUTE)]


def with_twins(contests: Sequence[Contest], seed: str) -> list[Contest]:
    """Give every contender of some contests, the same ones for a seed, a twin."""
    count = -(-len(contests) // TWIN_EVERY)
    chosen = set(random.Random(seed).sample(range(len(contests)), count))
    return [_twice(c) if number in chosen else c for number, c in enumerate(contests)]


def _twice(contest: Contest) -> Contest:
    twins = (replace(c, baseline=False, twin=True) for c in contest.contenders)
    return replace(contest, contenders=(*contest.contenders, *twins))


def _problem(m: int, n: int, k: int, dtype: str) -> Problem:
    op = load_op("linear")
    fields = {**op.defaults, "dtype": dtype, "m": m, "n": n, "k": k}
    return Problem("linear", fields, SEED, defaults=op.defaults)
