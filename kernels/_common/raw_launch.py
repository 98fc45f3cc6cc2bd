"""Launch a compiled Triton kernel with arguments that this module packs: 4 µs instead of 20.

parameters   those of the signature, in order, then two pointers to scratch memory
descriptor   its tensor map, sizes in int32 and strides in int64 (triton/backends/nvidia)
"""

from collections.abc import Callable, Mapping, Sequence
from ctypes import c_float
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sparsebench.kernels._common.cuda import Layout, Loaded, encoded_map

ADDRESSES = 64  # sets of addresses for which arguments and boxes are kept
NUMBERS = {"i32": "i", "i64": "q", "fp32": "f"}  # Triton's types, and formats of `struct`


class Raw:
    """A compiled kernel and the layout of its arguments, of which a call changes addresses."""

    def __init__(self, loaded: Loaded, formats: list[str], fill: Callable[..., list[Any]]) -> None:
        """Keep the launch, the layout of its arguments, and a function of the addresses."""
        self.loaded, self.layout = loaded, Layout(*formats)
        self.arguments = lru_cache(ADDRESSES)(lambda *at: self.layout(*fill(at)))

    def __call__(self, addresses: Sequence[int]) -> None:
        self.loaded.enqueue(self.arguments(*addresses))

    @classmethod
    def of(
        cls,
        compiled: Any,
        grid: tuple[int, ...],
        args: Sequence[Any],
        holes: Mapping[int, int],
        device: torch.device,
    ) -> "Raw | None":
        """Return the launch, or None if Triton's own launcher must make it.

        holes  argument -> number of the tensor whose address it takes
        """
        if (metadata := getattr(compiled, "metadata", None)) is None:
            return None
        signature = [*compiled.src.signature.values()]
        scratch = ("global_scratch_size", "profile_scratch_size")
        special = [getattr(metadata, name, 0) for name in (*scratch, "launch_cooperative_grid")]
        special.append(getattr(metadata, "num_ctas", 1) != 1)
        described = [*(getattr(metadata, "tensordesc_meta", None) or ())]
        if any(special) or len(grid) > 1 or device.type != "cuda":
            return None
        formats: list[str] = []
        parts: list[Callable[[Sequence[int]], list[Any]]] = []
        for at, kind in enumerate(signature[: len(args)]):
            arg, hole = args[at], holes.get(at)
            if kind == "constexpr":
                continue
            if isinstance(arg, TensorDescriptor):
                meta = described.pop(0) if described else None
                if meta is None or hole is None:
                    return None
                formats += ["128s", *"i" * len(arg.shape), *"q" * len(arg.shape)]
                parts.append(partial(_described, hole, meta, arg))
            elif isinstance(arg, Tensor):
                formats.append("P")
                address = arg.data_ptr()
                parts.append(partial(_address, hole, address))
            elif kind in NUMBERS and isinstance(arg, int | float):
                formats.append(NUMBERS[kind])
                parts.append(partial(_constant, c_float(arg).value if kind == "fp32" else arg))
            else:
                return None
        formats += ["P", "P"]
        parts.append(partial(_constant, 0, 0))
        threads, kernel = 32 * metadata.num_warps, SimpleNamespace(ptr=compiled.function)
        early = bool(getattr(metadata, "launch_pdl", False))
        sizes = grid[0], threads, metadata.shared
        loaded = Loaded(kernel, "", device.index, *sizes, early=early)
        return cls(loaded, formats, lambda at: [value for part in parts for value in part(at)])


def _address(hole: int | None, address: int, addresses: Sequence[int]) -> list[Any]:
    """Return the address of a tensor of the call, or of one that stays."""
    return [address if hole is None else addresses[hole]]


def _constant(*args: Any) -> list[Any]:
    """Return the values before the addresses, which are the last argument."""
    return [*args[:-1]]


def _described(
    hole: int, meta: Mapping[str, Any], box: TensorDescriptor, addresses: Sequence[int]
) -> list[Any]:
    """Return the parameters of a descriptor at one of these addresses."""
    kind = {8: 10, 9: 8, 10: 9}.get(meta["elem_type"], meta["elem_type"])  # device to host
    map_ = encoded_map(
        addresses[hole],
        tuple(box.shape),
        tuple(stride * meta["elem_size"] for stride in box.strides[:-1]),
        kind,
        tuple(meta["block_size"]),
        meta["swizzle"],
    )
    return [map_, *box.shape, *box.strides]
