"""Arguments of compiled Triton kernels, as raw_launch.py packs them."""

import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from sparsebench.kernels._common import raw_launch
from sparsebench.kernels._common.raw_launch import Raw

DEVICE: Any = SimpleNamespace(type="cuda", index=0)
META = {"elem_type": 10, "elem_size": 2, "block_size": [1, 16, 1, 64], "swizzle": 3}


def raw_of(kinds: dict[str, str], args: list[Any], holes: dict[int, int]) -> Raw | None:
    metadata = SimpleNamespace(num_warps=4, shared=0, tensordesc_meta=[META])
    source = SimpleNamespace(signature=kinds)
    compiled = SimpleNamespace(metadata=metadata, src=source, function=1)
    return Raw.of(compiled, (5,), args, holes, DEVICE)


def test_numbers_and_boxes_of_heads_are_packed(monkeypatch) -> None:
    maps: list[Any] = []

    def encode(*layout: Any) -> bytes:
        maps.append(layout)
        return b"m" * 128

    monkeypatch.setattr(raw_launch, "encoded_map", encode)
    heads, fixed = torch.empty(2, 32, 4, 64, dtype=torch.bfloat16), torch.empty(3)
    box = TensorDescriptor.from_tensor(heads, [1, 16, 1, 128])
    kinds = {"x": "*fp32", "k": "tensordesc", "ONE": "constexpr", "n": "i32", "many": "i64"}
    kinds |= {"scale": "fp32", "large": "fp32", "fixed": "*fp32"}
    raw = raw_of(kinds, [fixed, box, 1, 7, 2**40, 0.1, 1e300, fixed], {0: 0, 1: 1})
    assert raw is not None
    pointers, memory = raw.arguments(1000, 2000)
    tail = struct.Struct("P128s4i4qiqffPPP")
    address, map_, *rest = tail.unpack(bytes(memory))
    assert (address, map_) == (1000, b"m" * 128)
    sizes = 2, 32, 4, 64, 32 * 4 * 64, 4 * 64, 64, 1
    tenth = struct.unpack("f", struct.pack("f", 0.1))[0]
    numbers = 7, 2**40, tenth, float("inf"), fixed.data_ptr(), 0, 0
    assert tuple(rest) == (*sizes, *numbers)
    assert len(pointers) == 17
    steps = tuple(2 * stride for stride in sizes[4:7])
    assert maps == [(2000, sizes[:4], steps, 9, (1, 16, 1, 64), 3)]


@pytest.mark.parametrize(("kind", "value"), [("fp64", 0.5), ("u1", True)])
def test_other_types_are_left_to_triton(kind: str, value: Any) -> None:
    assert raw_of({"x": kind}, [value], {}) is None
