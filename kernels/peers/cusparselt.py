"""2:4 sparse weights by NVIDIA's cuSPARSELt: Y.T[n, m] = W[n, k] @ X.T[k, m].

The library compresses W to values and metadata, in its own order. Each operand has two layouts, and
each combination that the library accepts has its own algorithms:

    W    rows     as given          compressed once, in `prepare`
         columns  W.T
    X.T  columns  X in place
         rows     X.T, copied by the launch
    Y.T  columns  Y in its final layout; by rows, it would have to be transposed back

The library takes multiples of 8 tokens, or of 16 in 8-bit dtypes. Other numbers are padded with
rows of zeros, as torch.sparse.to_sparse_semi_structured does (_common/padding.py). The search also
tries more padding for few tokens, because in bf16 256 tokens take 34 us but 16 tokens 48 (0.8.0,
n = 14336, k = 4096).

`prepare` makes three searches, each over captured launches:

    layouts     every combination, with the library's default algorithm
    algorithms  every number that the library has, for every layout; in fp16, where a plan takes
                the host 0.15 s, for the fastest few layouts; for few tokens also with padding
    splits      the fastest few of these with k split into parts

A later process of a verdict times the finalists of all three in one search.

In fp16, algorithms from number 34 or 36 on raise an illegal instruction on Hopper (0.8.0, every
layout of W and X), which ends the process, so those from TRAPS on are not tried. The library's own
search would run them; elsewhere it could only find what `algorithms` and `splits` time.

In 8 bits the library multiplies only along the contiguous k of W and X. It refuses some of the
other layouts, and W by columns ends the process (0.8.0 and 0.10.0), so they are not tried. In int8
it scales the exact sums, and rounds them to int8 in the same call.

`search: false` takes the default algorithm with all operands in place, like
torch.sparse.to_sparse_semi_structured. Plans are made in `prepare` (_cusparselt.py).

The library does not check that a matrix is 2:4 and would return wrong products. So it receives only
matrices that formats/spense.py has checked.
Source: docs.nvidia.com/cuda/cusparselt.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.spense import Spense
from sparsebench.kernels._common.padding import Tokens, multiple_of, padded
from sparsebench.kernels._common.search import Search, finalists, part_of, search
from sparsebench.kernels._kernel import DTYPES, Kernel, Launch, Operands, output_dtype, sum_scale
from sparsebench.kernels.dense.cublas import unsupported_8_bits
from sparsebench.kernels.peers import _cusparselt
from sparsebench.kernels.peers._cusparselt import (
    CusparseLtError,
    LtAlgorithm,
    MatmulPlan,
    Matrix,
    Order,
)
from sparsebench.results.record import Problem

LAYOUTS: tuple[Order, ...] = "rows", "columns"
MULTIPLES = {"fp16": 16, "bf16": 16, "fp8": 32, "int8": 32}  # n and k must be multiples of these
TOKEN_MULTIPLES = {torch.float16: 8, torch.bfloat16: 8, torch.float8_e4m3fn: 16, torch.int8: 16}
STAGES = "layouts", "algorithms", "splits"  # stages of the search
BEST = 3  # algorithms whose splits are timed
MORE_TOKENS = 128, 256  # tokens that fewer may be padded to
PADDED_LAYOUTS = 2  # the fastest
FEW_LAYOUTS = {torch.float16: 2}  # number of layouts whose algorithms are timed; default: all
TRAPS = {torch.float16: 34}  # the first number that is not tried
SPLITS = tuple(product((2, 3, 4, 6, 8), (1, 2)))  # parts of k, and one kernel or two


@dataclass(frozen=True)
class LtCall(LtAlgorithm):
    """One way to call the library, by default as the library does; `tokens` is for padding."""

    w_layout: Order = "rows"
    x_layout: Order = "columns"
    tokens: int | None = None


@dataclass(frozen=True)
class HalfSparse:
    """A way with its plan: `call` writes to its argument, whose first m of `rows` rows are Y."""

    way: LtCall
    rows: int
    call: Callable[[Tensor], None]


@dataclass(frozen=True)
class Call:
    """The operands of a product: W by layout, X [m, k], the stride of Y's rows, beta and scale.

    `scale` multiplies the sums, and `buffers` are the padded tokens, by their number of rows.
    """

    w: Callable[[Order], _cusparselt.CompressedWeight]
    x: Tensor
    y_stride: int
    beta: float = 0.0
    scale: float = 1.0
    buffers: dict[int, Tokens] = field(default_factory=dict)

    def tokens(self, way: LtCall) -> Tokens:
        """Return X, padded if the way says so. All ways with as many tokens share a buffer."""
        rows = way.tokens or len(self.x)
        if rows not in self.buffers:
            self.buffers[rows] = padded(self.x, rows)
        return self.buffers[rows]

    @property
    def fewest_tokens(self) -> int | None:
        """Return the tokens that X must be padded to, or None if the library takes X as it is."""
        rows = multiple_of(TOKEN_MULTIPLES[self.x.dtype], len(self.x))
        return None if rows == len(self.x) else rows

    @property
    def output(self) -> torch.dtype:
        """Return the dtype of Y: bf16 for fp8."""
        return output_dtype(self.x.dtype)


def unsupported(problem: Problem, device: torch.device) -> str | None:
    dtype, n, k = (problem[name] for name in ("dtype", "n", "k"))
    if dtype not in MULTIPLES:
        return f"cuSPARSELt expected a dtype of {', '.join(MULTIPLES)} for 2:4, found {dtype}"
    side = MULTIPLES[dtype]
    if n % side or k % side:
        return f"cuSPARSELt expected n and k in multiples of {side} in {dtype}, found {n} and {k}"
    if device.type != "cuda":
        return f"cuSPARSELt expected an NVIDIA GPU, found device {device}"
    try:
        _cusparselt.library()
    except Unsupported as error:
        return str(error)
    return unsupported_8_bits(dtype, device) if DTYPES[dtype].itemsize == 1 else None


def prepare(operands: Operands, *, search: bool = True) -> Launch:
    """Compress W and choose the fastest way; `search: false` takes the default.

    Raises Unsupported unless all of W is 2:4.
    """
    w, x = operands.weights["w"], operands.activations["x"]
    assert isinstance(w, Spense)
    if w.sparse_shape != w.shape:
        split = f"{list(w.sparse_shape)} of {list(w.shape)}; use cusparselt_hybrid"
        raise Unsupported(f"cuSPARSELt expected all of W to be 2:4, found {split}")
    n = w.shape[0]
    scale = sum_scale(operands.problem["dtype"], w.shape[1])
    target = Call(compressed(w.to_dense()), x, n, scale=scale)
    fastest, choice, candidates = choose(target, n, search, operands.pinned, operands.timed)

    def run() -> Tensor:
        y = x.new_empty(fastest.rows, n, dtype=target.output)
        fastest.call(y)
        return y[: len(x)]

    return Launch(run, choice, candidates=candidates)


def compressed(w: Tensor) -> Callable[[Order], _cusparselt.CompressedWeight]:
    """Return a function that compresses W [n, k], contiguous and 2:4, once in each layout."""

    @cache
    def of(layout: Order) -> _cusparselt.CompressedWeight:
        return _cusparselt.compress(w if layout == "rows" else w.t().contiguous().t())

    return of


def choose(
    target: Call,
    n: int,
    searching: bool,
    pinned: Mapping[str, Any] | None,
    before: Sequence[Mapping[str, Any]] = (),
) -> tuple[HalfSparse, dict[str, Any], list[dict[str, Any]]]:
    """Return the fastest way, or the pinned one, its choice, and the candidates.

    before  candidates of an earlier process (Operands.timed)

    Raises Unsupported if the library accepts no way.
    """
    version = {"cusparselt": _cusparselt.library().version}
    if pinned:
        way = LtCall(**{name: pinned[name] for name in asdict(LtCall())})
        return planned(target, way), dict(pinned), []
    repeated = [LtCall(**each) for of in STAGES for each in finalists(part_of(of, before))]
    if repeated:
        products, _ = accepted(target, dict.fromkeys(repeated))
        best, result = time_products(target, n, products)
        return best, asdict(best.way) | version, lines_of("finalists", products, result)
    every = [
        replace(way, tokens=target.fewest_tokens)
        for way in (layouts(target.x.dtype) if searching else [LtCall()])
    ]
    products, reasons = accepted(target, every)
    if not products:
        raise Unsupported(f"cuSPARSELt accepts no layout: {'; '.join(sorted(reasons))}")
    if not searching:
        return products[0], asdict(products[0].way) | version, []
    best, first = time_products(target, n, products)
    lines = lines_of(STAGES[0], products, first)
    few = fastest_few(products, first, FEW_LAYOUTS.get(target.x.dtype, len(every)), numbers=False)
    ways = numbers(target, few)
    numbered = [best, *accepted(target, [*ways, *with_more_tokens(target, ways, few)])[0]]
    best, second = time_products(target, n, numbered)
    lines += lines_of(STAGES[1], numbered, second)
    few = fastest_few(numbered, second, BEST, numbers=True)
    split = [replace(way, split_k=k, split_k_mode=mode) for way in few for k, mode in SPLITS]
    products = [best, *accepted(target, split)[0]]
    best, third = time_products(target, n, products)
    lines += lines_of(STAGES[2], products, third)
    return best, asdict(best.way) | version, lines


def layouts(dtype: torch.dtype) -> list[LtCall]:
    """Return every combination of layouts, those of the default first."""
    if dtype.itemsize == 1:
        return [LtCall()]
    return [LtCall(w_layout=w, x_layout=x) for w, x in product(LAYOUTS, LAYOUTS[::-1])]


def accepted(target: Call, ways: Iterable[LtCall]) -> tuple[list[HalfSparse], set[str]]:
    """Return the products of the accepted ways, and why the library refuses the others."""
    products, reasons = [], set()
    for way in ways:
        try:
            products.append(planned(target, way))
        except CusparseLtError as error:
            reasons.add(str(error))
    return products, reasons


def planned(target: Call, way: LtCall) -> HalfSparse:
    """Plan one way. Raises CusparseLtError if the library refuses it."""
    plan = plan_of(target, way)
    rows = way.tokens or len(target.x)
    return HalfSparse(replace(way, **asdict(plan.actual)), rows, call_of(target, way, plan))


def plan_of(target: Call, way: LtCall) -> MatmulPlan:
    weight, x = target.w(way.w_layout), target.tokens(way).whole
    (m, k), stride = x.shape, x.stride(0)
    b = Matrix(k, m, stride if way.x_layout == "columns" else m, way.x_layout, x.dtype)
    d = Matrix(weight.dense.rows, m, target.y_stride, "columns", target.output)
    return MatmulPlan(weight, b, d, way, target.beta, target.scale)


def call_of(target: Call, way: LtCall, plan: MatmulPlan) -> Callable[[Tensor], None]:
    """Return the launch of a plan, with the copies that its layouts need."""
    tokens = target.tokens(way)

    def run(y: Tensor) -> None:
        x = tokens.filled()
        plan(x if way.x_layout == "columns" else x.t().contiguous(), y)

    return run


def numbers(target: Call, ways: Iterable[LtCall]) -> list[LtCall]:
    """Return every algorithm of these layouts up to TRAPS; the library numbers them from 0."""
    counts = {way: plan_of(target, way).algorithms for way in ways}
    return [
        replace(way, algorithm=i)
        for way, count in counts.items()
        for i in range(min(count, TRAPS.get(target.x.dtype, count)))
    ]


def with_more_tokens(target: Call, ways: Sequence[LtCall], few: Sequence[LtCall]) -> list[LtCall]:
    """Return the ways of the fastest layouts, `few`, with X padded to more tokens."""
    fewest = target.fewest_tokens or len(target.x)
    more = [tokens for tokens in MORE_TOKENS if tokens > fewest]
    layouts = {layout_of(way) for way in few[:PADDED_LAYOUTS]}
    if target.x.dtype in FEW_LAYOUTS:
        return [replace(way, tokens=tokens) for way in few for tokens in more]
    return [replace(w, tokens=tokens) for w in ways if layout_of(w) in layouts for tokens in more]


def layout_of(way: LtCall) -> tuple[Order, Order]:
    return way.w_layout, way.x_layout


def plain(way: LtCall, algorithm: int | None = None) -> LtCall:
    """Return a way's layouts with this algorithm or the default one, without a split of k."""
    return replace(way, algorithm=algorithm, split_k=None, split_k_mode=None)


def fastest_few(
    products: Sequence[HalfSparse], result: Search, count: int, *, numbers: bool
) -> list[LtCall]:
    """Return the layouts, or with `numbers` also the algorithms, of the fastest few products."""
    times_us = [trial.time_us for trial in result.trials] or [0.0]  # of a single one: not timed
    ways = (products[i].way for i in sorted(range(len(times_us)), key=times_us.__getitem__))
    return list(dict.fromkeys(plain(w, w.algorithm if numbers else None) for w in ways))[:count]


def time_products(
    target: Call, n: int, products: Sequence[HalfSparse]
) -> tuple[HalfSparse, Search]:
    def calling(one: HalfSparse) -> Callable[[], object]:
        def call() -> None:
            rows = target.x.new_empty(one.rows, target.y_stride, dtype=target.output)
            one.call(rows[:, :n])

        return call

    result = search([calling(one) for one in products], target.x.device)
    return products[result.best], result


def lines_of(of: str, products: Sequence[HalfSparse], result: Search) -> list[dict[str, Any]]:
    return result.lines([asdict(one.way) for one in products], whole=True, of=of)


KERNEL = Kernel("linear", "spense", "cuda", prepare, unsupported)
