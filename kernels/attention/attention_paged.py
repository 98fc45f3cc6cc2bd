"""Decoding attention over all pages of a cache: what `attention_decode` is compared with.

A block of keys of the problem is a page, and K and V of the problem are the pool. The kernel is
that of _paged.py, without a list.

Bound: the bytes of K and V.
"""

import torch

from sparsebench.formats._format import sides_of
from sparsebench.kernels._kernel import Kernel, Launch, Operands, refuse
from sparsebench.kernels.attention import _shapes
from sparsebench.kernels.attention._paged import PAGE_SIZES, Pool, attend, config_of
from sparsebench.results.record import Problem


def pool_of(operands: Operands) -> tuple[Pool, float]:
    """Return the operands by page, and the factor of the scores."""
    problem, a = operands.problem, operands.activations
    page, head_dim, scale = sides_of(problem["block"])[1], problem["head_dim"], problem["scale"]
    sequences, context = problem["batch"], problem["context"] or problem["m"]
    k, v = (a[name].view(-1, page, a[name].shape[1] // head_dim, head_dim) for name in "kv")
    table = torch.arange(len(k), dtype=torch.int32, device=k.device).view(sequences, -1)
    lengths = torch.full_like(table[:, 0], context)
    q = a["q"].view(sequences, -1, head_dim)
    return Pool(q, k, v, table, lengths), head_dim**-0.5 if scale is None else float(scale)


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why the kernel cannot run the problem here, or None."""
    if reason := _shapes.unsupported(problem, device):
        return reason
    page, context = sides_of(problem["block"])[1], problem["context"] or problem["m"]
    if problem["m"] != 1:
        return f"expected one query of a sequence, found {problem['m']}"
    if page not in PAGE_SIZES or context % page:
        sizes = ", ".join(map(str, PAGE_SIZES))
        return f"expected whole pages of {sizes} keys, found {context} keys in blocks of {page}"
    return None


def prepare(operands: Operands) -> Launch:
    """Bind the launch."""
    pool, scale = pool_of(operands)
    refuse(unsupported(operands.problem, pool.q.device))
    config = config_of(pool.shape, pool.table.shape[1])
    return Launch(lambda: attend(pool, None, scale, config).flatten(1), choice=config._asdict())


KERNEL = Kernel("attention", "dense", "cuda", prepare, unsupported)
"""Attends to all pages."""
