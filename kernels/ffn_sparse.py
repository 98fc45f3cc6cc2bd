"""Gated feed-forward layer with few units on, relu or relu2, in CUDA C++ for Hopper.

    G = X @ Wg.T                         cuBLAS, cuBLASLt, or _gate.py, whichever is faster
    Y = (act(G) * (X @ Wu.T)) @ Wd.T     ffn_sparse.cu: of units that are on, and no others
    the same, dense                      _ffn_rest.py: of groups of tokens with too many of them

Which units are on is found by each call, on the device: nothing is packed, any number of them is
right, and the bits are the same at every call. Where a group of tokens has more rows (units that
are on for any of them) than a dense product is worth, the kernel leaves the group to one; the host
never waits, so that a CUDA graph can hold it all. The limit is the higher of two estimates of how
many rows cost what dense products do:

    many tokens   rows x 4 k bytes at L2_RATE  =  tokens of the group x 4 n k FLOPs at DENSE_RATE
    few           rows x groups                =  FEW n: two reads of the weights, and launches

    m, tokens    tokens a group    CTAs a group (a cluster)
    1 to 16           1            8               few tokens share no units to speak of, and
    to 32, 64         2, 4         8               smaller groups give every SM work
    more              8            8, 4, 2, 1      so many that they run at one time

Where groups have eight tokens, there are two ways to the gate, and `prepare` times the whole layer
with each: a library's product, all of which is read to find who is on; and one of which only a
bitmap and what is on are written, and nothing else is read.

k and n are multiples of 8; k is at most 4096, and a multiple of 256 beyond 3072, where a thread's
registers suffice for nothing else. Where X is not finite, a unit that is off counts as zero; dense
products make it NaN.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from sparsebench.formats._format import Format
from sparsebench.formats.dense import Dense
from sparsebench.kernels import _ffn_rest, _gate, cublas
from sparsebench.kernels._cuda import (
    Constants,
    Layout,
    Loaded,
    Program,
    load,
    supports_hopper,
)
from sparsebench.kernels._kernel import Kernel, Launch, Operands, Unsupported
from sparsebench.kernels._tuned import multiprocessors
from sparsebench.results.record import Problem

COLUMNS = 256  # of k, a warp's
FEWEST_WARPS, MOST_WARPS, MOST_WARPS_OF_ANY_K = 4, 16, 12
TOKENS, SPLIT = 8, 8  # of a group, at most
ROWS = 16  # of a step
SHARED_BYTES = 216 * 1024  # of 227 KB, of which up to 9 are the kernel's own
L2_RATE, DENSE_RATE, FEW = 9e12, 7e14, 4.0  # bytes/s, FLOP/s of an H200 (kernels/NOTES.md)

# x, g, wu, wd transposed, y, left, heavy; m, n, tokens of a group, limit; bits
ARGUMENTS = Layout(*"PPPPPPPiiiiP")


def supports(problem: Problem, device: torch.device) -> str | None:
    """Say why the kernel cannot run the problem here, or None."""
    activation, n, k = problem["activation"], problem["n"], problem["k"]
    if activation not in ("relu", "relu2"):
        return f"expected activation relu or relu2, found {activation}"
    if n % 8 or k % 8:
        return f"expected n and k to be multiples of 8, found n {n} and k {k}"
    warps = -(-k // COLUMNS)
    if warps > MOST_WARPS or (warps > MOST_WARPS_OF_ANY_K and k % COLUMNS):
        most, any_k = MOST_WARPS * COLUMNS, MOST_WARPS_OF_ANY_K * COLUMNS
        return f"expected k up to {any_k}, or a multiple of {COLUMNS} up to {most}, found {k}"
    needed = shared_bytes(k, n, TOKENS, split=1)
    if needed > SHARED_BYTES:
        return f"expected at most {SHARED_BYTES} bytes of shared memory, found {needed} for n {n}"
    return supports_hopper(problem, device)


def grouping(m: int, k: int, processors: int) -> tuple[int, int]:
    """Return the tokens of a group, and the CTAs that share its units."""
    tokens = 1 if m <= 16 else 2 if m <= 32 else 4 if m <= 64 else TOKENS
    groups = -(-m // tokens)
    resident = processors * (2 if k <= 2048 and k % COLUMNS == 0 else 1)
    split = SPLIT
    while split > 1 and groups * split > resident:
        split //= 2
    return tokens, split


def limit_of(m: int, n: int, tokens: int) -> int:
    """Return how many rows a group may have at most; n where dense products never pay."""
    by_arithmetic = tokens * n * L2_RATE / DENSE_RATE
    by_bytes = FEW * n / -(-m // tokens)
    return min(n, int(max(by_arithmetic, by_bytes)))


def shared_bytes(k: int, n: int, tokens: int, split: int) -> int:
    """Return the shared memory of a CTA: X of eight tokens and the rows, or its sums."""
    x = 8 * (2 * COLUMNS * max(FEWEST_WARPS, -(-k // COLUMNS)) + 64)
    rows = 4 * (8 * -(-n // 8 // split) + ROWS)
    return max(x + rows, 4 * tokens * k if split > 1 else 0)


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
    rest: _ffn_rest.Rest,
    *,
    split: int,
    limit: int,
    squared: bool,
    bits: Tensor | None = None,
) -> Program:
    """Return the program that writes Y of all groups that it does not leave to `rest`.

    x and y [m, k], g, the gates, [m, n], wu and wd_t [n, k]; all contiguous, fp16 or bf16. Without
    wu, H is act(g). With the `bits` of _gate.py, g is packed and groups have eight tokens.
    """
    (m, k), n, device = x.shape, len(wd_t), x.device
    shared = shared_bytes(k, n, rest.most, split)
    constants = constants_of(k, split, squared, wu is not None, x.dtype, bits is not None)
    kernel, code = load("ffn_sparse", "up_and_down", constants, SHARED_BYTES, device)
    threads = 32 * max(FEWEST_WARPS, -(-k // COLUMNS))
    grid = len(rest.heavy) * split
    loaded = Loaded(kernel, code, device.index, grid, threads, shared)
    kept = x, g, wd_t if wu is None else wu, wd_t, y, rest.left, rest.heavy
    at = 0 if bits is None else bits.data_ptr()
    args = ARGUMENTS(*(t.data_ptr() for t in kept), m, n, rest.most, limit, at)
    return Program(loaded, args, kept if bits is None else (*kept, bits), y)


def prepare(operands: Operands, *, fallback: bool = True, packed: bool | None = None) -> Launch:
    """Choose the gate's product: one that is `packed`, one that is not, or the faster (None).

    Without the `fallback` all groups are multiplied as sparse.
    """
    return prepared(operands, "wg", "wu", fallback, packed)


def prepared(
    operands: Operands, gate: str, up: str | None, fallback: bool, packed: bool | None = False
) -> Launch:
    """Return the launch of a layer whose gate and up weights have these names."""
    x = operands.activations["x"]
    dense = {name: _values(weight) for name, weight in operands.weights.items()}
    for name, matrix in {"x": x, **dense}.items():
        if not matrix.is_contiguous() or matrix.data_ptr() % 16:
            found = f"strides {list(matrix.stride())} at {matrix.data_ptr() % 16} modulo 16"
            raise Unsupported(f"{name}: expected a contiguous matrix at 16 bytes, found {found}")
    (m, k), wd, wu = x.shape, dense["wd"], dense[up] if up else None
    n, squared = wd.shape[1], operands.problem["activation"] == "relu2"
    processors = multiprocessors(x.device)
    most, split = grouping(m, k, processors)
    limit = limit_of(m, n, most) if fallback else n
    y, wd_t = torch.empty_like(x), wd.t().contiguous()
    if most < TOKENS:
        if packed:
            raise Unsupported(f"a packed gate needs groups of {TOKENS} tokens, found {most}")
        packed = False

    def layer(gates: Launch | _gate.Gate, g: Tensor, bits: Tensor | None) -> Launch:
        rest = _ffn_rest.rest_of(m, most, processors, x.device)
        sparse = launch(
            x, g, wu, wd_t, y, rest, split=split, limit=limit, squared=squared, bits=bits
        )
        programs: list[Callable[[], object]] = [gates, sparse]
        if limit < n:
            programs += _ffn_rest.products(x, g, wu, wd, y, rest, squared=squared, bits=bits)

        def run() -> Tensor:
            for program in programs:
                program()
            return y

        choice = {"gate": gates.choice, "tokens": most, "split": split, "limit": limit}
        return Launch(run, choice, sparse.code)

    settled = operands.settled and operands.settled["gate"]
    if settled:
        packed = "library" not in settled
    ways = []
    if not packed:
        g = x.new_empty(m, n)
        ways.append(layer(gates_into(g, operands, gate), g, None))
    if packed is not False:
        gates = _gate.prepare(x, dense[gate], settled)
        ways.append(layer(gates, gates.values, gates.bits))
    return ways[cublas.fastest_product(ways, x.device)]


def gates_into(g: Tensor, operands: Operands, name: str) -> Launch:
    """Return the product of x and a weight into g [m, n], by the faster library."""
    settled = operands.settled and operands.settled["gate"]

    def product(x: Tensor, **weight: Tensor) -> Tensor:
        return torch.mm(x, weight[name].t(), out=g)

    weights = {name: operands.weights[name]}
    return cublas.prepare(replace(operands, weights=weights, definition=product, settled=settled))


def _values(weight: Format) -> Tensor:
    assert isinstance(weight, Dense)
    return weight.values


KERNEL = Kernel(op="ffn", consumes="dense", device="cuda", prepare=prepare, supports=supports)
