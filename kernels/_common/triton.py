"""Launch Triton kernels, and choose the path by which they read operands: TMA or pointers.

TMA copies boxes, on compute capability 9.0 and newer. Pointers with masks take any shape and any
alignment. `choose_path` chooses the path; it is a field of the configuration, so rows have it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from sparsebench.kernels._common.bound_launch import BoundLaunch
from sparsebench.kernels._common.capture import is_capturing, keep
from sparsebench.kernels._common.cuda import TMA_ALIGNMENT, require_compiled
from sparsebench.kernels._common.machine_code import digest
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.raw_launch import Raw
from sparsebench.kernels._common.tape import on_tape
from sparsebench.kernels._common.transforms import device_guard
from sparsebench.results.record import Problem

Path = Literal["tma", "pointers"]
Precision = Literal["ieee", "tf32"]  # precision of fp32 products, as tl.dot names it
Program: TypeAlias = "BoundKernel | BoundLaunch"

SHARED_BYTES = 96 * 1024  # operands in flight, so that two programs share an SM of an H100
SM_BYTES = 220 * 1024  # operands in flight; a program on Hopper or Blackwell may have 227 KB
COMPILE_THREADS = 8
LAYOUTS = 64  # sets of layouts, so numbers of tokens, for which a product stays bound
SMALLEST_TILE = 16  # smallest side for tl.dot; the depth of one bf16 tensor-core instruction


@dataclass(frozen=True)
class BoundKernel:
    """A kernel, its grid and its arguments: each call computes `out`, in the same buffer.

    `before` is a kernel that writes an operand of this one.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: Mapping[str, Any]
    out: Tensor
    before: "BoundKernel | None" = None

    def __call__(self) -> Tensor:
        if self.before:
            self.before()
        self.kernel[self.grid](*self.args, **self.constants)
        return self.out

    @property
    def code(self) -> str | None:
        """Return the digest of the machine code (machine_code.py); None when interpreted."""
        if self.out.device.type != "cuda":
            return None
        return digest(*self.binaries())

    def binaries(self) -> list[bytes]:
        compiled = self.kernel.warmup(*self.args, grid=self.grid, **self.constants)
        return [*(self.before.binaries() if self.before else ()), bytes(compiled.asm["cubin"])]


class Template:
    """Kernels bound to tensors without data (device meta): call it with operands to run them.

    The operands of a call replace those of the constructor. They must have the same shapes, strides
    and dtypes, and start at multiples of 16 bytes. Other tensors without data are allocated at each
    call. Triton compiles and binds once; later launches only pass addresses.
    """

    def __init__(
        self, programs: Sequence[Program], operands: Sequence[Tensor], results: Sequence[Tensor]
    ) -> None:
        flat = [one for each in programs for one in (each.before, each) if one]
        bases = [*results, *(tensor_of(arg) for each in flat for arg in each.args)]
        operand_ids = {id(t): t for t in operands}
        rest = {id(t): t for t in bases if t is not None and t.is_meta and id(t) not in operand_ids}
        place = {at: i for i, at in enumerate((*operand_ids, *rest))}
        self._allocated = [(t.shape, t.dtype) for t in rest.values()]
        self._results = [place[id(t)] for t in results]
        self._launches = [
            each.bind(place) if isinstance(each, BoundLaunch) else _Launch(each, place)
            for each in flat
        ]

    def __call__(self, *operands: Tensor, out: Sequence[Tensor] = ()) -> list[Tensor]:
        """Return the results: the tensors of `out`, and then new ones."""
        new_empty = operands[0].new_empty
        written = {i - len(operands): t for i, t in zip(self._results, out, strict=False)}
        buffers = [
            written[i] if i in written else new_empty(shape, dtype=dtype)
            for i, (shape, dtype) in enumerate(self._allocated)
        ]
        tensors = [*operands, *buffers]
        addresses = [t.data_ptr() for t in tensors]
        for launch in self._launches:
            launch(tensors, addresses)
        results = [tensors[i] for i in self._results]
        on_tape(*buffers, owners=(self,))
        return results

    def enqueue(self, *operands: Tensor) -> list[Tensor]:
        """Call on the operands' device; a graph that captures the call keeps the template."""
        with device_guard(operands[0].device):
            if is_capturing(operands[0]):
                keep(self)
            return self(*operands)


def product_of(
    bound: Callable[..., BoundKernel],
    operands: Sequence[Tensor],
    device: torch.device,
    pack: Callable[[Tensor], Tensor] | None = None,
) -> Product:
    """Return the product of a kernel; each set of layouts of its operands is bound once.

    bound     (*operands) -> the kernel, whose first arguments these are, as tensors on "meta"
    operands  of the planned call, on "meta"; on a GPU the kernel is compiled for them now
    pack      of the last operand
    """

    @lru_cache(LAYOUTS)
    def template(*layouts: tuple[torch.Size, tuple[int, ...], torch.dtype]) -> Template:
        tensors = (torch.empty_strided(*at, dtype=kind, device="meta") for *at, kind in layouts)
        program = bound(*tensors)
        first = (program.before or program).args[: len(layouts)]
        return Template(
            [program], [t for t in map(tensor_of, first) if t is not None], [program.out]
        )

    def run(*operands: Tensor, out: Tensor | None = None) -> Tensor:
        at = template(*[(t.shape, t.stride(), t.dtype) for t in operands])
        y = at(*operands, out=() if out is None else (out,))[0]
        on_tape(owners=operands[1:])
        if is_capturing(y):
            keep(at)
        return y

    if device.type == "cuda":
        require_compiled("a Triton kernel", lambda: False)  # Triton does not say what it has
    code = digest(*bound(*operands).binaries()) if device.type == "cuda" else None
    return Product(run, code, pack, pack and object())


class _Launch:
    """A kernel of a template; `place` has the index of each tensor, by id."""

    def __init__(self, program: BoundKernel, place: Mapping[int, int]) -> None:
        self._program, self._args = program, [*program.args]
        self._run: Callable[..., None] | None = None
        self._raw: Raw | None = None
        self._rest: list[Any] = []
        matches = [(at, place.get(id(tensor_of(arg))), arg) for at, arg in enumerate(program.args)]
        holes = [
            (at, i, isinstance(arg, TensorDescriptor)) for at, i, arg in matches if i is not None
        ]
        self._plain = [(at, i) for at, i, boxed in holes if not boxed]
        self._boxed = [(at, i) for at, i, boxed in holes if boxed]

    def __call__(self, tensors: list[Tensor], addresses: list[int]) -> None:
        """Enqueue the kernel; calls after the first only pass addresses."""
        if self._raw:
            self._raw(addresses)
            return
        args = self._args.copy()
        on_tape(complete=False)
        for at, i in self._boxed:
            args[at] = replace(args[at], base=tensors[i])
        for at, i in self._plain:
            args[at] = addresses[i] if self._run else tensors[i]
        if self._run:
            self._run(*args, *self._rest)
            return
        kernel, grid, constants = self._program.kernel, self._program.grid, self._program.constants
        compiled = kernel[grid](*args, **constants)
        if compiled:  # None if interpreted
            self._rest = [constants[name] for name in kernel.arg_names[len(args) :]]
            self._run = compiled[(*grid, 1, 1)[:3]]
            holes = dict([*self._plain, *self._boxed])
            self._raw = Raw.of(compiled, grid, args, holes, tensors[0].device)


def tensor_of(arg: Any) -> Tensor | None:
    """Return the tensor of a kernel's argument, or None if it has none."""
    arg = arg.base if isinstance(arg, TensorDescriptor) else arg
    return arg if isinstance(arg, Tensor) else None


def unsupported(
    problem: Problem, device: torch.device, least: tuple[int, int] | None = None
) -> str | None:
    """Return why Triton cannot run the problem here, or None.

    least  the compute capability from which on the kernel multiplies fp8; None if it never does
    """
    dtype, needed = problem["dtype"], (8, 0)
    if dtype == "fp8":
        if least is None:
            return "expected fp16, bf16, fp32 or tf32, found fp8"
        needed = least
    if device.type == "cpu" and knobs.runtime.interpret:
        wrong = dtype in ("bf16", "fp8")
        return f"Triton's interpreter multiplies {dtype} wrongly" if wrong else None
    if device.type != "cuda":
        return f"needs an NVIDIA GPU, found {device.type}"
    if (capability := torch.cuda.get_device_capability(device)) < needed:
        at_least, actual = (f"{major}.{minor}" for major, minor in (needed, capability))
        return f"needs compute capability {at_least} or newer, found {actual}"
    return None


def choose_path(reason: str | None, device: torch.device) -> Path:
    """Return TMA if the device has it and there is no reason against it."""
    has_tma = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return "tma" if has_tma and not reason else "pointers"


def precision_of(*, tf32: bool) -> Precision:
    """Return the precision of products; those of 16-bit operands are exact."""
    return "tf32" if tf32 else "ieee"


def without_tensor_cores(itemsize: int, precision: Precision) -> bool:
    """Return whether tensor cores cannot make the products: fp32 in full precision."""
    return itemsize == 4 and precision == "ieee"


def whole_tile(side: int) -> int:
    """Return the smallest side of a tile, a power of two, that holds `side` rows or columns."""
    return max(SMALLEST_TILE, 1 << (side - 1).bit_length())


def unsupported_alignment(*matrices: Tensor) -> str | None:
    for t in matrices:
        if t.data_ptr() % TMA_ALIGNMENT or t.stride(1) != 1:
            expected = f"contiguous rows at a multiple of {TMA_ALIGNMENT} bytes"
            return f"expected {expected}, found {list(t.shape)} with strides {list(t.stride())}"
        if reason := unsupported_row(t.stride(0), t.element_size()):
            return reason
    return None


def unsupported_row(columns: int, itemsize: int) -> str | None:
    size = columns * itemsize
    fits = size % TMA_ALIGNMENT == 0
    return None if fits else f"rows of {size} bytes, not a multiple of {TMA_ALIGNMENT}"


def box(matrix: Tensor, rows: int, columns: int, path: Path) -> Any:
    """Return the argument for a matrix: a descriptor of boxes for TMA, or the tensor."""
    return TensorDescriptor.from_tensor(matrix, [rows, columns]) if path == "tma" else matrix


def fitting_depth(tokens: int, features: int, depth: int, warps: int, path: Path) -> int:
    """Return the largest depth, up to `depth`, whose tile fits into registers; 0 if none does.

    Pointers need registers for addresses and masks. They compile without a spill for 8.0 to 10.0
    up to 64 sums per thread, and from 32 sums on with a depth of at most 32.
    """
    sums = tokens * features // (32 * warps)
    if path == "tma":
        return depth
    return 0 if sums > 64 else min(depth, 32 if sums >= 32 else 64)


def stages(
    tokens: int, features: int, depth: int, itemsize: int, path: Path, precision: Precision = "ieee"
) -> int:
    """Return how many tiles of both operands to keep in flight."""
    # With pointers each stage costs registers; fp32 arithmetic is slow enough to hide any load.
    most = 3 if without_tensor_cores(itemsize, precision) else 8 if path == "tma" else 4
    held = most_stages(tokens, features, depth, itemsize)
    return min(most, held, max(3, SHARED_BYTES // ((tokens + features) * depth * itemsize)))


def most_stages(tokens: int, features: int, depth: int, itemsize: int) -> int:
    """Return how many tiles of both operands one SM holds.

    A tile of Y in fp32 needs extra shared memory; a tile of 16 bits reuses a stage.
    """
    out = tokens * features * itemsize if itemsize == 4 else 0
    return (SM_BYTES - out) // (itemsize * (tokens + features) * depth)


def options(warps: int, path: Path) -> dict[str, int]:
    """Return the options of the compiler.

    Kernels with pointers may use all 255 registers. Otherwise ptxas spills one or two registers of
    some tiles for a higher occupancy.
    """
    return {"num_warps": warps} | ({} if path == "tma" else {"maxnreg": 255})
