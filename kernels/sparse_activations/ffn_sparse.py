"""Gated feed-forward layer with few units on, relu or relu2, in CUDA C++ for Hopper.

    G = X @ Wg.T                         cuBLAS, cuBLASLt, or _packed_gate.py
    Y = (act(G) * (X @ Wu.T)) @ Wd.T     ffn_sparse.cu: of units that are on, and no others
    the same, dense                      _remainder.py: of groups of tokens with too many of them

Which units are on is found by each call, on the device: nothing is packed, any number of them is
right, and the bits are the same at every call. Where a group of eight tokens has more rows (units
that are on for any of them) than a dense product is worth, the kernel leaves the group to one; the
host never waits, so that a CUDA graph can hold it all. The limit is the higher of two estimates of
how many rows cost what dense products do:

    many tokens   rows x 4 k bytes at L2_RATE  =  8 tokens x 4 n k FLOPs at DENSE_RATE
    few           rows x groups                =  FEW n: two reads of the weights, and launches

`prepare` times whole layers on the activations that it is given, and keeps the fastest:

    library   all of G is written by a library's product, and read to find who is on
    packed    of G only a bitmap and what is on are written, and nothing else is read
    few       up to 64 tokens: one launch, which reads units that are on for any (ffn_few.py)
    dense     cublas_ffn or ffn_dense_triton, where so many units are on that they win

Where few groups would leave SMs idle, up to 8 CTAs (a cluster) share the units of a group.

n and k are multiples of 8, and k is at most 4096. Where X is not finite, a unit that is off counts
as zero; dense products make it NaN.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Literal, get_args

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats._format import Format
from sparsebench.formats.dense import Dense
from sparsebench.kernels._common.cuda import (
    BoundKernel,
    Constants,
    Layout,
    Loaded,
    clusters_at_once,
    load,
    unsupported_on_hopper,
)
from sparsebench.kernels._common.tuned_table import multiprocessors
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.dense import cublas, cublas_ffn, ffn_dense_triton
from sparsebench.kernels.sparse_activations import _packed_gate, _remainder, ffn_few
from sparsebench.kernels.sparse_activations._remainder import GROUP
from sparsebench.results.record import Problem

MOST_K, MOST_SPLIT = 4096, 8
MOST_ROWS = 1536  # of a group, as ffn_sparse.cu has it
SHARED_BYTES = 192 * 1024  # of 227 KB, of which 30 are the kernel's own
L2_RATE, DENSE_RATE, FEW = 9e12, 7e14, 4.0  # bytes/s, FLOP/s of an H200 (NOTES.md)

Way = Literal["best", "sparse", "library", "packed", "few"]
"""Of those above: the fastest of all, the fastest but for dense, or one."""

# x, g, wu, wd transposed, y, left, heavy; m, n, limit; bits
ARGUMENTS = Layout(*"PPPPPPPiiiP")


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Say why the kernel cannot run the problem here, or None."""
    activation, n, k = problem["activation"], problem["n"], problem["k"]
    if activation not in ("relu", "relu2"):
        return f"expected activation relu or relu2, found {activation}"
    if n % 8 or k % 8:
        return f"expected n and k to be multiples of 8, found n {n} and k {k}"
    if k > MOST_K:
        return f"expected k up to {MOST_K}, found {k}"
    return unsupported_on_hopper(problem, device)


def split_of(m: int, at_once: Callable[[int], int]) -> int:
    """Return how many CTAs share a group: so many clusters of them run `at_once`."""
    groups = -(-m // GROUP)
    return next((s for s in range(MOST_SPLIT, 1, -1) if groups <= at_once(s)), 1)


def limit_of(m: int, n: int) -> int:
    """Return how many rows a group may have at most."""
    by_arithmetic = GROUP * n * L2_RATE / DENSE_RATE
    by_bytes = FEW * n / -(-m // GROUP)
    return min(n, MOST_ROWS, int(max(by_arithmetic, by_bytes)))


def threads_of(k: int) -> tuple[int, int]:
    """Return a CTA's threads that multiply, and all of them."""
    products = 256 if k > 1024 else 128
    return products, products + (256 if k <= 2048 else 128)


def shared_bytes(k: int) -> int:
    """Return the shared memory of a CTA: X and stages, of eight rows."""
    return 6 * GROUP * 16 * threads_of(k)[0]


def clusters(split: int, k: int, device: torch.device) -> int:
    """Return how many clusters of CTAs run at one time."""
    return clusters_at_once(split, threads_of(k)[1], SHARED_BYTES, device)


def constants_of(
    k: int, split: int, squared: bool, gated: bool, dtype: torch.dtype, packed: bool = False
) -> Constants:
    """Return what the kernel is compiled for."""
    half = dtype == torch.float16
    flags = {"SQUARED": squared, "GATED": gated, "PACKED": packed, "FP16": half}
    return ("K", k), ("SPLIT", split), *((name, int(flag)) for name, flag in flags.items())


def launch(
    x: Tensor,
    g: Tensor,
    wu: Tensor | None,
    wd_t: Tensor,
    y: Tensor,
    rest: _remainder.Rest,
    *,
    split: int,
    limit: int,
    squared: bool,
    bits: Tensor | None = None,
) -> BoundKernel:
    """Return the program that writes Y of all groups that it does not leave to `rest`.

    x and y [m, k], g, the gates, [m, n], wu and wd_t [n, k]; all contiguous, fp16 or bf16. Without
    wu, H is act(g). With the `bits` of _packed_gate.py, g is packed.
    """
    (m, k), n, device = x.shape, len(wd_t), x.device
    constants = constants_of(k, split, squared, wu is not None, x.dtype, bits is not None)
    kernel, code = load("ffn_sparse", "up_and_down", constants, SHARED_BYTES, device)
    groups, (_, threads) = len(rest.heavy), threads_of(k)
    grid = groups * split if split > 1 else min(groups, multiprocessors(device))
    shared = shared_bytes(k)
    loaded = Loaded(kernel, code, device.index, grid, threads, shared, early=True)
    kept = x, g, wd_t if wu is None else wu, wd_t, y, rest.left, rest.heavy
    at = 0 if bits is None else bits.data_ptr()
    args = ARGUMENTS(*(t.data_ptr() for t in kept), m, n, limit, at)
    return BoundKernel(loaded, args, kept if bits is None else (*kept, bits), y)


def prepare(operands: Operands, *, way: Way = "best") -> Launch:
    """Build the layer in every way that is asked for, and keep the fastest. Raises Unsupported."""
    return prepared(operands, "wg", "wu", way, (cublas_ffn, ffn_dense_triton))


def prepared(
    operands: Operands, gate: str, up: str | None, way: Way, dense_ways: Sequence[ModuleType]
) -> Launch:
    """Return the launch of a layer whose gate and up weights have these names."""
    if way not in get_args(Way):
        raise Unsupported(f"option way: expected one of {', '.join(get_args(Way))}, found {way!r}")
    x = operands.activations["x"]
    values = {name: _values(weight) for name, weight in operands.weights.items()}
    for name, matrix in {"x": x, **values}.items():
        if not matrix.is_contiguous() or matrix.data_ptr() % 16:
            found = f"strides {list(matrix.stride())} at {matrix.data_ptr() % 16} modulo 16"
            raise Unsupported(f"{name}: expected a contiguous matrix at 16 bytes, found {found}")
    m, wd, wu = len(x), values["wd"], values[up] if up else None
    n, squared = wd.shape[1], operands.problem["activation"] == "relu2"
    processors = multiprocessors(x.device)
    y, wd_t = torch.empty_like(x), wd.t().contiguous()
    pinned = dict(operands.pinned or {})

    def layer(
        name: str, gates: Launch | _packed_gate.Gate, g: Tensor, bits: Tensor | None
    ) -> Launch:
        rest, limit = _remainder.rest_of(m, processors, x.device), limit_of(m, n)
        split = split_of(m, partial(clusters, k=x.shape[1], device=x.device))
        sparse = launch(
            x, g, wu, wd_t, y, rest, split=split, limit=limit, squared=squared, bits=bits
        )
        rests = _remainder.products(x, g, wu, wd, y, rest, squared=squared, bits=bits)
        programs: list[Callable[[], object]] = [gates, sparse, *rests]

        def run() -> Tensor:
            for program in programs:
                program()
            return y

        choice = {"way": name, "gate": gates.choice, "split": split, "limit": limit}
        return Launch(run, choice, sparse.code)

    unfit = ffn_few.unsupported(m, n, x.shape[1])
    sparse_ways = ("library", "packed") if unfit else ("few",)
    wanted = {"best": (*sparse_ways, "dense"), "sparse": sparse_ways}
    names = [pinned["way"]] if pinned else wanted.get(way, (way,))
    ways = []
    for name in names:
        if name == "few":
            if unfit:
                raise Unsupported(f"option way: few: {unfit}")
            program = ffn_few.launch(x, values[gate], wu, wd_t, y, squared=squared)
            ways.append(Launch(program, {"way": name}, program.code))
        elif name == "library":
            g = x.new_empty(m, n)
            ways.append(layer(name, gates_into(g, operands, gate, pinned.get("gate")), g, None))
        elif name == "packed" and up:
            gates = _packed_gate.prepare(x, values[gate], pinned.get("gate"))
            ways.append(layer(name, gates, gates.values, gates.bits))
        elif name == "dense":
            by = pinned.get("by")
            for module in dense_ways:
                kernel = module.__name__.rpartition(".")[2]
                if by in (None, kernel):
                    dense = module.prepare(replace(operands, pinned=pinned.get("dense")))
                    choice = {"way": name, "by": kernel, "dense": dense.choice}
                    ways.append(Launch(dense.run, choice, dense.code))
    return ways[cublas.fastest_product(ways, x.device)]


def gates_into(
    g: Tensor, operands: Operands, name: str, pinned: dict[str, str] | None = None
) -> Launch:
    """Return the product of x and a weight into g [m, n], by the faster library."""

    def product(x: Tensor, **weight: Tensor) -> Tensor:
        return torch.mm(x, weight[name].t(), out=g)

    weights = {name: operands.weights[name]}
    return cublas.prepare(replace(operands, weights=weights, definition=product, pinned=pinned))


def _values(weight: Format) -> Tensor:
    assert isinstance(weight, Dense)
    return weight.values


KERNEL = Kernel(op="ffn", consumes="dense", device="cuda", prepare=prepare, unsupported=unsupported)
