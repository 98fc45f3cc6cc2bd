"""Launches of the BSR kernels with a stand-in for the driver: their arguments, also by threads."""

import ctypes
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.product import Product
from sparsebench.kernels.bsr import bsr_wgmma
from tests.kernels.bsr.examples import call_of, example


class Driver:
    """A stand-in for CUDA's driver: maps hold their fields, and launches record arguments."""

    def __init__(self) -> None:
        self.maps, self.launches, self.size = 0, [], 0

    def cuTensorMapEncodeTiled(self, place, type, rank, address, sizes, steps, box, *rest) -> int:
        self.maps += 1
        fields = address.value, *sizes, *steps, *box, type
        ctypes.memmove(place.value, struct.pack("16q", *fields, *[0] * (16 - len(fields))), 128)
        return 0

    def cuLaunchKernelEx(self, config, kernel, args, extra) -> int:
        self.launches.append(ctypes.string_at(args[0], self.size))
        return 0


@pytest.fixture
def driver(monkeypatch) -> Iterator[Driver]:
    """Launch without effect."""
    driver = Driver()
    monkeypatch.setattr(cuda, "driver", lambda: driver)
    monkeypatch.setattr(cuda, "set_device", lambda: lambda device: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    cuda.tensor_map.cache_clear()
    yield driver
    cuda.tensor_map.cache_clear()


def test_arguments_have_the_layout_of_c_and_are_never_rewritten():
    layout = cuda.Layout("5s", "P", "i", "P")
    (one, memory), (two, _) = layout(b"a\0b\0c", 1, -2, 3), layout(b"defgh", 4, 5, 6)
    assert [pointer - one[0] for pointer in one] == [0, 8, 16, 24]
    assert memory.raw[:5] == b"a\0b\0c"
    assert struct.unpack("PiP", memory.raw[8:]) == (1, -2, 3)
    assert ctypes.string_at(two[0], 5) == b"defgh"


def product_of(kernel: Any, block: int, config: Any) -> tuple[Product, Tensor]:
    """Plan Y of 128 columns for X of 192, and return what it reads of W."""
    w, _, _ = example((300, 128, 192, block, 0.5), dtype="bf16")
    product = kernel.plan(w, call_of("linear", w, 400, "bf16"), config)
    return product, product.packed(w.values)


def test_launches_from_several_threads_do_not_mix_operands(loads, driver):
    product, packed = product_of(bsr_wgmma, 64, bsr_wgmma.Config(128, 1))
    xs = [torch.zeros(300, 192, dtype=torch.bfloat16) for _ in range(4)]
    driver.size = 384

    def pairs(x: Tensor) -> set[tuple[int, int]]:
        return {(x.data_ptr(), product.run(x, packed).data_ptr()) for _ in range(200)}

    with ThreadPoolExecutor(len(xs)) as pool:
        returned = set().union(*pool.map(pairs, xs))
    launched = {
        (struct.unpack_from("q", args)[0], struct.unpack_from("q", args, 256)[0])
        for args in driver.launches
    }
    assert launched == returned
