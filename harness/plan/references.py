"""A/A pairs: the same kernel twice, to learn how far apart equal things come out here.

    references   five contests that every run has, dense against dense:
                 launch    almost nothing is computed: the cost of launching
                 memory    one token: reading the weights is the work
                 compute   as many tokens as features: multiplying is the work
                 between   two lengths of call between the first and the others (results/noise.py)
    twins        in one problem of TWIN_EVERY of a suite, every contender competes twice

A twin is prepared anew: its own packing, output and addresses, as another contender would have.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from sparsebench.harness.catalog import load_op
from sparsebench.harness.plan.suite import Contest
from sparsebench.results.record import Contender, Problem

SEED = 2**31 - 1  # of the references, so that no problem of a suite is one of them
TWIN_EVERY = 20  # 5 % of the problems; at least one

# (m, n, k, dtype) and the kernel. On a GPU the second reads 512 MB: no L2 cache holds that.
GPU = ((1, 64, 64, "bf16"), (1, 16384, 16384, "bf16"), (4096, 4096, 4096, "bf16")), "cublas"
CPU = ((1, 64, 64, "fp32"), (1, 2048, 2048, "fp32"), (256, 256, 256, "fp32")), "torch_dense"

BETWEEN = {  # about 14 and 35 µs on an NVIDIA H200, 10 and 40 µs on two cores
    "cuda": ((64, 4096, 4096, "bf16"), (64, 14336, 4096, "bf16")),
    "cpu": ((1, 256, 256, "fp32"), (1, 512, 512, "fp32")),
}


def references(device: str) -> list[Contest]:
    """Return the reference contests for a device, by its name."""
    sizes, kernel = CPU if device == "cpu" else GPU
    first = Contender("dense", kernel, baseline=True)
    pair = first, replace(first, baseline=False, twin=True)
    every = (*sizes, *BETWEEN["cpu" if device == "cpu" else "cuda"])
    return [Contest(_problem(*size), pair, reference=True) for size in every]


def with_twins(contests: Sequence[Contest], seed: str) -> list[Contest]:
    """Give every contender of some contests, the same ones for a seed, a twin."""
    count = -(-len(contests) // TWIN_EVERY)
    chosen = set(random.Random(seed).sample(range(len(contests)), count))
    return [_twice(c) if number in chosen else c for number, c in enumerate(contests)]


def _twice(contest: Contest) -> Contest:
    twins = (replace(c, baseline=False, twin=True) for c in contest.contenders)
    return replace(contest, contenders=(*contest.contenders, *twins))


def _problem(m: int, n: int, k: int, dtype: str) -> Problem:
    op, sizes = load_op("linear"), {"m": m, "n": n, "k": k}
    fields = {**op.defaults, "dtype": dtype, **sizes}
    return Problem("linear", fields, SEED, defaults=op.defaults)
