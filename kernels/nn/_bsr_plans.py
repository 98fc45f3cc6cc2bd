"""Offer the kernels of each product of a block-sparse layer, and plan the chosen one.

    GPU of compute capability 9.0, fp16 or bf16, n and k multiples of 8
      Y and dX   bsr_wgmma       blocks of multiples of 64, as stored
                 bsr_small       blocks of 16 and 32, packed; larger ones cut, up to 256 tokens
                 bsr_strips      even sides from 10 on, packed
                 bsr_triton      powers of two from 16, as stored, below MANY tokens
                 bsr_resident    Y alone: even sides, frozen values, few tokens and columns
      dW         bsr_wgrad       blocks that tiles of 40 to 64 divide
                 bsr_wgrad_mma   blocks of 16, of which few are stored
                 bsr_wgrad_small multiples of 8
      fp8        Y alone: bsr_wgmma and bsr_triton
    GPU of compute capability 8.0 and newer, fp32
      Y          bsr_fp32        multiples of 8, as stored; products are exact, as bsr_triton's are
    other GPUs, other blocks and sizes, and TRITON_INTERPRET=1
                 bsr_triton, bsr_triton_dgrad, bsr_triton_wgrad
    CPU          dense products in torch, as a reference

selection.py takes one of them: what a search found fastest, or else the first one here. The order
is what H100 and H200 measured (bsr/NOTES.md). A weight that can change is packed at every call, so
a search times the packing too (`live`).

A plan holds everything that depends only on the index and the sizes: pairs of block rows, work
lists on the device, machine code. Making one copies the index to the host; calling it never waits
for the device. Calls of one plan must run one after the other on the device, as they do on one
stream, because bsr_wgrad and bsr_wgrad_small keep counters in the memory of their plans.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from math import ceil
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from triton import knobs

from sparsebench.errors import FormatError, Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.capture import is_capturing, keep
from sparsebench.kernels._common.cuda import on_tape
from sparsebench.kernels._common.requirements import (
    HOPPER,
    unsupported_before_ampere,
    unsupported_on_hopper,
)
from sparsebench.kernels._common.selection import Candidate, NoConfig, Operator, Product, config_of
from sparsebench.kernels._common.triton import (
    BoundKernel,
    Template,
    choose_path,
    tensor_of,
    unsupported,
)
from sparsebench.kernels._common.tuned_table import (
    Sizes,
    blocked,
    multiprocessors,
    shared_bytes_of,
)
from sparsebench.kernels._kernel import DTYPES, output_dtype
from sparsebench.kernels.bsr import (
    _launch,
    bsr_fp32,
    bsr_resident,
    bsr_small,
    bsr_strips,
    bsr_triton,
    bsr_triton_dgrad,
    bsr_triton_wgrad,
    bsr_wgmma,
    bsr_wgrad,
    bsr_wgrad_mma,
    bsr_wgrad_small,
)
from sparsebench.kernels.bsr._strip_tiles import depth_of, height_of
from sparsebench.kernels.bsr._wgmma_pairs import SIDE, checked
from sparsebench.results.record import Problem

FP8 = DTYPES["fp8"]
NAMES = {dtype: name for name, dtype in DTYPES.items() if name != "tf32"}
ENGINES = (
    *("bsr_fp32", "bsr_resident", "bsr_small", "bsr_strips"),
    *("bsr_triton", "bsr_triton_dgrad", "bsr_triton_wgrad"),
    *("bsr_wgmma", "bsr_wgrad", "bsr_wgrad_mma", "bsr_wgrad_small"),
)
FEW = 64  # tokens: up to here blocks as stored, by Triton, are the likeliest for large blocks
MANY = 512  # tokens: from here on bsr_wgmma is the likeliest for blocks of 64 and more
# Up to these tokens and columns of X bsr_resident may be the fastest: 1000 x 1000 in blocks of 10
# took 0.87 of the time of bsr_strips with 64 tokens on an H200, and 1.3 with 1024.
RESIDENT_TOKENS, RESIDENT_COLUMNS = 256, 2048
OFFERED = 6  # configurations of one engine
LAYOUTS = 64  # numbers of tokens for which a Triton kernel stays bound


class Call(NamedTuple):
    """A product for up to m tokens. With the index, it determines the plan.

    shape  n and k of W
    block  rows r and columns c
    dtype  of both operands
    live   the values can change, so each call packs them
    """

    op: Literal["linear", "dgrad", "wgrad"]
    m: int
    shape: tuple[int, int]
    block: tuple[int, int]
    dtype: torch.dtype
    live: bool = True

    @property
    def transposed(self) -> bool:
        """Return whether the product is with W instead of W.T."""
        return self.op == "dgrad"


def require_index(
    offsets: Tensor, columns: Tensor, shape: tuple[int, int], block: tuple[int, int]
) -> None:
    """Raise FormatError unless this is the index of a BSR matrix [n, k]. Waits for the device."""
    for name, index in (("offsets", offsets), ("columns", columns)):
        if index.dim() != 1 or index.dtype != torch.int32 or not index.is_contiguous():
            layout = f"{index.dtype} {list(index.shape)} with strides {list(index.stride())}"
            raise FormatError(f"{name}: expected a contiguous list of int32, found {layout}")
    checked(Bsr(shape, offsets, columns, columns.new_empty((1, 1, 1)).expand(len(columns), *block)))


def operator_of(offsets: Tensor, columns: Tensor) -> Operator:
    """Return the plans of a pattern; they read these tensors."""

    def weight(call: Call) -> Bsr:
        require_index(offsets, columns, call.shape, call.block)
        values = columns.new_empty((len(columns), *call.block), dtype=call.dtype)  # never read
        return Bsr(call.shape, offsets, columns, values)

    def problem(call: Call) -> dict[str, Any]:
        dtype = NAMES.get(call.dtype, str(call.dtype))
        sizes = blocked(call.m, *call.shape, dtype, call.block, len(columns))
        fields = {"op": f"bsr.{call.op}", "dtype": dtype, "block": list(call.block)}
        shape = {"m": call.m, "n": call.shape[0], "k": call.shape[1]}
        return {**fields, **shape, "density": float(f"{sizes.density:.2g}"), "live": call.live}

    def offer(call: Call, choice: Mapping[str, Any] | None) -> list[Iterator[Candidate]]:
        w, device = weight(call), columns.device
        if device.type == "cpu" and not knobs.runtime.interpret:
            return [iter([Candidate("torch", NoConfig(), lambda: _Dense(call, w))])]
        if choice:
            return [_candidates(choice["kernel"], call, w, choice)]
        return [_candidates(engine, call, w) for engine in engines_of(call, device)]

    return Operator(ENGINES, offer, problem, columns.device)


def engines_of(call: Call, device: torch.device) -> list[str]:
    """Return the kernels that may run a call, the likeliest first. Raises Unsupported."""
    if call.dtype not in NAMES:
        raise Unsupported(f"expected {', '.join(NAMES.values())} on a GPU, found {call.dtype}")
    if call.dtype == FP8 and call.op != "linear":
        raise Unsupported("expected no gradient of fp8 operands, found one")
    problem = Problem(call.op, {"dtype": NAMES[call.dtype]})
    triton = "bsr_triton" + {"linear": "", "dgrad": "_dgrad", "wgrad": "_wgrad"}[call.op]
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER
    step = 16 // call.dtype.itemsize  # elements of a row that TMA reads
    hopper = hopper and call.dtype != torch.float32
    hopper = hopper and not (call.shape[0] % 8 or call.shape[1] % step)
    engines = _hopper_engines(call) if hopper else []
    if engines:
        if reason := unsupported_on_hopper(problem, device, ("fp16", "bf16", "fp8")):
            raise Unsupported(reason)
        stored = all(side >= 16 and not side & (side - 1) for side in call.block)
        few = call.m < MANY and call.op != "wgrad"
        unpacked = call.live or call.dtype == FP8
        first = unpacked and call.m <= FEW and min(call.block) >= SIDE
        more = [*([triton] if stored and few else []), *_resident(call, problem, device)]
        return [*more, *engines] if first else [*engines, *more]
    if reason := unsupported(problem, device, least=bsr_triton.FP8_CAPABILITY):
        raise Unsupported(reason)
    exact = call.dtype == torch.float32 and call.op == "linear" and device.type == "cuda"
    if not exact or not all(bsr_fp32.step_of(call.block)):
        return [triton, *_resident(call, problem, device)]
    if reason := unsupported_before_ampere(problem, device, ("fp32",)):
        raise Unsupported(reason)
    return ["bsr_fp32", triton]


def _resident(call: Call, problem: Problem, device: torch.device) -> list[str]:
    """Return bsr_resident if it may be the fastest for a call: it packs slowly, so only once."""
    short = call.m <= RESIDENT_TOKENS and call.shape[1] <= RESIDENT_COLUMNS
    even = all(side % 2 == 0 and side <= bsr_resident.SIDE for side in call.block)
    if call.op != "linear" or call.live or not short or not even or device.type != "cuda":
        return []
    reason = unsupported_before_ampere(problem, device, ("fp16", "bf16"))
    return [] if reason else ["bsr_resident"]


def _hopper_engines(call: Call) -> list[str]:
    """Return the kernels in CUDA C++ that may run a call, the likeliest first."""
    r, c = call.block
    if call.op == "wgrad":
        if r % 8 or c % 8:
            return []
        single = (r, c) == (bsr_wgrad_mma.SIDE, bsr_wgrad_mma.SIDE)
        return ["bsr_wgrad_mma" if single else "bsr_wgrad", "bsr_wgrad_small"]
    large = r % SIDE == 0 and c % SIDE == 0
    if call.dtype == FP8:
        return ["bsr_wgmma"] if large else []
    depth, height = (r, c) if call.transposed else (c, r)
    strips = bool(depth_of(depth) and height_of(height))
    cut = r % 16 == 0 and c % 16 == 0 and call.m <= bsr_small.CUT_TOKENS
    small = (r, c) in ((16, 16), (32, 32)) or cut or (r, c) == (8, 8)
    fit = {"bsr_wgmma": large, "bsr_small": small, "bsr_strips": strips}
    if large:
        many = "bsr_wgmma", "bsr_strips", "bsr_small"
        order = many if call.m >= MANY else ("bsr_small", "bsr_strips", "bsr_wgmma")
    else:
        order = ("bsr_small", "bsr_strips", "bsr_wgmma")
    return [engine for engine in order if fit[engine]]


def _candidates(
    engine: str, call: Call, w: Bsr, choice: Mapping[str, Any] | None = None
) -> Iterator[Candidate]:
    """Yield the configurations of one engine that are worth timing, the likeliest first.

    With a choice, yield only this one.
    """
    x, dy = _activations(call)
    if engine.startswith("bsr_triton"):
        yield from _triton(engine, call, w, choice)
        return
    if engine == "bsr_fp32":
        yield from _fp32(call, w, choice)
        return
    if engine == "bsr_resident":
        yield from _rows_resident(call, w, choice)
        return
    kernel, product = HOPPER_KERNELS[engine]
    workers, sizes = multiprocessors(w.columns.device), {}
    if call.op == "wgrad":
        reason = kernel.unsupported_operands(dy, x, w)
    else:
        sizes = {"transposed": call.transposed}
        reason = kernel.unsupported_operands(dy if call.transposed else x, w, call.transposed)
    if reason:
        raise Unsupported(reason)
    configs: list[Any] = [(config_of(kernel, choice),)] if choice else []
    if not choice and call.op == "wgrad":
        stored = blocked(call.m, *w.shape, "", w.block, len(w.columns)).density
        if kernel is not bsr_wgrad_mma or stored <= bsr_wgrad_mma.DENSEST:
            configs = [(each,) for each in kernel.configurations(w, call.m, workers)]
    elif not choice:
        configs = kernel.offered(w, call.m, call.transposed)
    for config, *tiles in configs[:OFFERED]:
        plan = partial(kernel.plan, w, call.m, config, *tiles, **sizes)
        yield Candidate(engine, config, partial(_product, product, plan))


def _product(product: Callable[[Any], Product], plan: Callable[[], Any]) -> Product:
    return product(plan())


HOPPER_KERNELS: dict[str, tuple[Any, Callable[[Any], Product]]] = {
    "bsr_small": (bsr_small, _launch.Product),
    "bsr_strips": (bsr_strips, _launch.Product),
    "bsr_wgmma": (bsr_wgmma, _launch.Product),
    "bsr_wgrad": (bsr_wgrad, bsr_wgrad.Product),
    "bsr_wgrad_mma": (bsr_wgrad_mma, bsr_wgrad.Product),
    "bsr_wgrad_small": (bsr_wgrad_small, bsr_wgrad.Product),
}


def _fp32(call: Call, w: Bsr, choice: Mapping[str, Any] | None) -> Iterator[Candidate]:
    """Yield the configurations of bsr_fp32; the layer has already aligned X (_bsr_autograd.py)."""
    (x, _), device = _activations(call), w.columns.device
    if reason := bsr_fp32.unsupported_operands(x, w):
        raise Unsupported(reason)
    if choice:
        configs = [config_of(bsr_fp32, choice)]
    else:
        sizes = call.m, multiprocessors(device), shared_bytes_of(device)
        configs = bsr_fp32.configurations(w, *sizes)
    for config in configs:
        plan = partial(bsr_fp32.plan, w, call.m, config, aligned=bsr_fp32.is_aligned(x))
        yield Candidate("bsr_fp32", config, partial(_product, _launch.Product, plan))


def _rows_resident(call: Call, w: Bsr, choice: Mapping[str, Any] | None) -> Iterator[Candidate]:
    """Yield the configurations of bsr_resident."""
    (x, _), device = _activations(call), w.columns.device
    if reason := bsr_resident.unsupported_operands(x, w):
        raise Unsupported(reason)
    if choice:
        configs = [config_of(bsr_resident, choice)]
    else:
        configs = bsr_resident.configurations(w, call.m, device)
    for config in configs[:OFFERED]:
        yield Candidate("bsr_resident", config, partial(bsr_resident.Product, w, call.m, config))


# ---- Triton kernels ----


TRITON_KERNELS: dict[str, Any] = {
    "bsr_triton": bsr_triton,
    "bsr_triton_dgrad": bsr_triton_dgrad,
    "bsr_triton_wgrad": bsr_triton_wgrad,
}


def _triton(
    engine: str, call: Call, w: Bsr, choice: Mapping[str, Any] | None
) -> Iterator[Candidate]:
    """Yield the configurations of a Triton kernel."""
    (x, dy), size, device = _activations(call), call.dtype.itemsize, w.columns.device
    if engine == "bsr_triton":
        if reason := bsr_triton.unsupported_blocks(w):
            raise Unsupported(reason)
        path = choose_path(None, bsr_triton.unsupported_by_tma(x, w), device)
        configs: list[Any] = bsr_triton.configurations(call.m, w.block, size, path)
        stored = [c for c in configs if bsr_triton.packed_block(w.block, c) == w.block]
        # No padding if it can be avoided, else the least first: in fp32, with blocks of 10 and 64
        # tokens, unions of six block rows took 223 µs on an H200, and single ones 34 µs.
        sizes = blocked(call.m, *w.shape, NAMES[call.dtype], w.block, len(w.columns))
        configs = stored or sorted(configs, key=partial(_padded, sizes=sizes))
        make: Callable[[Bsr, Any], Templates] = _linear
    elif engine == "bsr_triton_dgrad":
        path = choose_path(None, bsr_triton_dgrad.unsupported_by_tma(dy, w), device)
        configs, make = bsr_triton_dgrad.configurations(call.m, w.block, size, path), _dgrad
    else:
        path = choose_path(None, bsr_triton_wgrad.unsupported_by_tma(dy, x, w.block), device)
        more = len(w.columns), size, path, multiprocessors(device)
        configs, make = bsr_triton_wgrad.configurations(call.m, w.block, *more), _wgrad
    if choice:
        config = config_of(TRITON_KERNELS[engine], choice)
        configs = [config] if config.path == path else []
    for config in configs[:OFFERED]:
        yield Candidate(engine, config, partial(make, w, config))


def _padded(config: bsr_triton.Config, sizes: Sizes) -> float:
    """Return the elements of W as bsr_triton packs it, zeros included, for random blocks."""
    (r, c), group = sizes.block or (1, 1), config.group
    height, width = bsr_triton.packed_block((r, c), config)
    columns = ceil(sizes.k / c) * (1 - (1 - sizes.density) ** group)
    return ceil(ceil(sizes.n / r) / group) * columns * height * width


def _linear(w: Bsr, config: bsr_triton.Config) -> "Templates":
    (packed, pack), bare = _packer(w, config), _bare(w)

    def bound(x: Tensor, values: Tensor) -> BoundKernel:
        return bsr_triton.launch(x, bare, config, replace(packed, values=values))

    return Templates(bound, pack)


def _dgrad(w: Bsr, config: bsr_triton_dgrad.Config) -> "Templates":
    bare, by_columns = _bare(w), bsr_triton_dgrad.index_of(w)

    def bound(dy: Tensor, values: Tensor) -> BoundKernel:
        return bsr_triton_dgrad.launch(dy, replace(bare, values=values), config, by_columns)

    return Templates(bound)


def _wgrad(w: Bsr, config: bsr_triton_wgrad.Config) -> "Templates":
    pattern, strips = _bare(w), bsr_triton_wgrad.strips_of(w, config)
    return Templates(lambda dy, x: bsr_triton_wgrad.launch(dy, x, pattern, config, strips))


class Templates:
    """A Triton kernel to call; each pair of layouts of the operands is bound once."""

    code: str | None = None

    def __init__(
        self,
        bound: Callable[[Tensor, Tensor], BoundKernel],
        pack: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Take a function that binds operands, and one that packs the values."""
        self.pack, self.order = pack, pack and object()

        @lru_cache(LAYOUTS)
        def template(dtype: torch.dtype, *layouts: tuple[torch.Size, tuple[int, ...]]) -> Template:
            program = bound(*(torch.empty_strided(*o, dtype=dtype, device="meta") for o in layouts))
            operands = (tensor_of(arg) for arg in (program.before or program).args[:2])
            return Template([program], [t for t in operands if t is not None], [program.out])

        self.template = template

    def run(self, a: Tensor, b: Tensor) -> Tensor:
        """Run on torch's current stream; return a new tensor."""
        y = self.template(a.dtype, (a.shape, a.stride()), (b.shape, b.stride()))(a, b)[0]
        on_tape(owners=(b,))
        if is_capturing(a):
            keep(self)
        return y


def _packer(
    w: Bsr, config: bsr_triton.Config
) -> tuple[bsr_triton.Packed, Callable[[Tensor], Tensor] | None]:
    """Return the index that bsr_triton.pack makes, and a function that packs values, if needed.

    The function does not wait for the device.
    """
    (r, c), blocks = w.block, len(w.values)
    number = torch.arange(1, blocks + 1, dtype=torch.int32, device=w.columns.device)
    numbered = number[:, None, None].expand(blocks, r, c).contiguous()
    packed = bsr_triton.pack(replace(w, values=numbered), config)
    size, index = packed.values.shape, replace(packed, values=number[:0])
    if size == numbered.shape:
        return index, None
    # A packed block now holds the numbers of the blocks in it, counted from 1; 0 means no block.
    numbers = packed.values[:, : config.group * r : r, 0]
    slot, member = numbers.nonzero(as_tuple=True)
    order = numbers[slot, member].argsort()
    slot, member = slot[order], member[order]

    def pack(values: Tensor) -> Tensor:
        on_tape(complete=False)  # torch's own kernels pack
        united = values.new_zeros(size)
        united[:, : config.group * r, :c].view(size[0], config.group, r, c)[slot, member] = values
        return united

    return index, pack


def _activations(call: Call) -> tuple[Tensor, Tensor]:
    """Return X and dY on the device "meta", for their shapes and dtype."""
    n, k = call.shape
    x, dy = (torch.empty(call.m, size, dtype=call.dtype, device="meta") for size in (k, n))
    return x, dy


def _bare(w: Bsr) -> Bsr:
    """Return the pattern with its block size, but without values."""
    return replace(w, values=w.values.new_empty((0, *w.block)))


class _Dense:
    """A dense product in torch, on a CPU."""

    code = pack = order = None

    def __init__(self, call: Call, w: Bsr) -> None:
        """Keep the pattern."""
        self.op, self.pattern = call.op, _bare(w)

    def run(self, a: Tensor, b: Tensor) -> Tensor:
        """Return Y or dX of activations and values, or dW's values of dY and X."""
        with torch.autocast("cpu", enabled=False):  # the layer has already cast
            if self.op == "wgrad":
                return self.pattern.sample(a.T @ b).values
            w = replace(self.pattern, values=b).to_dense()
            if a.dtype == FP8:
                return (a.float() @ w.float().T).to(output_dtype(FP8))
            return a @ (w.T if self.op == "linear" else w)
