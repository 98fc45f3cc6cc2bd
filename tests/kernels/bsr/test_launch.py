"""Launches of the BSR kernels with a stand-in for the driver: tensor maps, arguments, addresses."""

import ctypes
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.selection import bucket
from sparsebench.kernels.bsr import bsr_small, bsr_wgmma
from sparsebench.kernels.nn import BlockSparseLinear, _bsr_plans


def layer_of(n: int, k: int, block: Any, **options: Any) -> BlockSparseLinear:
    return BlockSparseLinear(k, n, block=block, sparsity=0.5, **options)


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


def map_of(matrix: Tensor, box: tuple[int, int]) -> tuple[int, ...]:
    """Return the fields of a map, 2 bytes an element."""
    height, width = matrix.shape
    return matrix.data_ptr(), width, height, 2 * matrix.stride(0), *box[::-1]


@pytest.fixture
def driver(monkeypatch) -> Iterator[Driver]:
    """Plan, bind and launch the Hopper kernels on a CPU, without effect."""
    driver = Driver()
    properties = SimpleNamespace(multi_processor_count=5)
    monkeypatch.setattr(cuda, "driver", lambda: driver)
    monkeypatch.setattr(cuda, "set_device", lambda: lambda device: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(cuda, "load", lambda *args: (SimpleNamespace(ptr=1), "code"))
    engines = {16: "bsr_small", 24: "bsr_strips", 64: "bsr_wgmma"}
    monkeypatch.setattr(_bsr_plans, "engines_of", lambda call, device: [engines[call.block[0]]])
    monkeypatch.setattr(_bsr_plans.knobs.runtime, "interpret", True)  # not dense products in torch
    cuda.tensor_map.cache_clear()
    yield driver
    cuda.tensor_map.cache_clear()


def test_a_tensor_map_is_made_once_for_what_it_describes(driver):
    fields = 4096, (64, 128), (128, 1), torch.bfloat16, (64, 64)
    first = cuda.tensor_map(*fields)
    assert cuda.tensor_map(*fields) is first
    others = 8192, (65, 128), (256, 1), torch.float16, (64, 32)
    for at, other in enumerate(others):
        assert cuda.tensor_map(*fields[:at], other, *fields[at + 1 :]) != first
    assert driver.maps == 1 + len(others)
    for at, wrong in ((0, 4104), (2, (129, 1)), (2, (128, 2))):
        for _ in range(2):
            with pytest.raises(Unsupported, match="TMA"):
                cuda.tensor_map(*fields[:at], wrong, *fields[at + 1 :])


def test_arguments_have_the_layout_of_c_and_are_never_rewritten():
    layout = cuda.Layout("5s", "P", "i", "P")
    (one, memory), (two, _) = layout(b"a\0b\0c", 1, -2, 3), layout(b"defgh", 4, 5, 6)
    assert [pointer - one[0] for pointer in one] == [0, 8, 16, 24]
    assert memory.raw[:5] == b"a\0b\0c"
    assert struct.unpack("PiP", memory.raw[8:]) == (1, -2, 3)
    assert ctypes.string_at(two[0], 5) == b"defgh"


def test_a_launch_has_the_addresses_of_its_operands(driver):
    layer = layer_of(128, 192, 64, bias=False, dtype=torch.bfloat16)
    blocks, driver.size = layer.values.detach().view(-1, 64), 384
    alive = []  # so that no address is reused

    def check(m: int, x: Tensor) -> None:
        alive.extend((x, y := layer(x).detach()))
        tokens = bsr_wgmma.configurations(bucket(m), 128)[0].tokens
        expected = (x, (tokens, 64)), (blocks, (64, 64)), (y, (64, 64))
        for at, matrix in enumerate(expected):
            assert struct.unpack_from("6q", driver.launches[-1], 128 * at) == map_of(*matrix)

    for m in (300, 400, 300):
        wide = torch.zeros(m, 256, dtype=torch.bfloat16)
        for x in (torch.zeros(m, 192, dtype=torch.bfloat16), wide[:, :192], wide[:, 8:200]):
            check(m, x)
    with torch.no_grad():
        layer.values.data = layer.values.clone()
    blocks = layer.values.detach().view(-1, 64)
    check(300, alive[0])
    other = layer_of(128, 192, 64, dtype=torch.bfloat16)
    layer.set_pattern(other.offsets, other.columns)
    blocks = layer.values.detach().view(-1, 64)
    check(300, alive[0])
    with pytest.raises(Unsupported, match="one dtype"):
        layer(alive[0].half())


def test_equal_addresses_give_the_same_arguments(driver):
    w = layer_of(128, 192, 16, dtype=torch.bfloat16).bsr
    plan = bsr_small.plan(w, 300, bsr_small.Config(64, 64))
    addresses = 300, 4096, (192, 1), 8192, 16384
    first = plan.arguments(*addresses)
    assert plan.arguments(*addresses) is first
    for at, other in enumerate((299, 4112, (256, 1), 8208, 16400)):
        changed = plan.arguments(*addresses[:at], other, *addresses[at + 1 :])
        assert changed[1].raw != first[1].raw


def test_launches_from_several_threads_do_not_mix_operands(driver):
    layer = layer_of(128, 192, 64, bias=False, dtype=torch.bfloat16)
    layer.values.requires_grad_(False)
    xs = [torch.zeros(300, 192, dtype=torch.bfloat16) for _ in range(4)]
    driver.size = 384
    layer(xs[0])

    def pairs(x: Tensor) -> set[tuple[int, int]]:
        return {(x.data_ptr(), layer(x).data_ptr()) for _ in range(200)}

    with ThreadPoolExecutor(len(xs)) as pool:
        returned = set().union(*pool.map(pairs, xs))
    launched = {
        (struct.unpack_from("q", args)[0], struct.unpack_from("q", args, 256)[0])
        for args in driver.launches[1:]
    }
    assert launched == returned
