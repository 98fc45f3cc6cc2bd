"""What this device can do at most, measured on it: bandwidth, matrix rates, launch cost, L2 size.

    bound = max( bytes that must move / read bandwidth,  FLOPs of the non-zeros / matrix rate )

    bytes, cold   every operand once; of the output what the L2 cache cannot hold, since the rest
                  may be written back after the sample
    bytes, hot    what does not fit the L2 cache
    rate, fp32    TF32's: a product of fp32 takes at least one pass of it, whatever the method
    rate, fp8     where the device has no such products, the highest: operands are converted

Each ceiling is the best of several short bursts, not an average: a kernel that runs for 50 µs meets
no power limit. A time below LIGHT x bound is no record but an error: `faster_than_light`.
Datasheets are no ceilings: an H200 lists 989 TFLOP/s for bf16, and cuBLAS reaches 806 there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, Self

import torch

from sparsebench.harness.bench.timing import ready, time_together
from sparsebench.kernels._kernel import DTYPES, Launch
from sparsebench.kernels.dense.cublas import scaled_product, tf32_products, unsupported_fp8

LIGHT = 0.95  # of the bound: ceilings are measured too
BURSTS = 8
COPY_BYTES = {"cuda": 2**29, "cpu": 2**26}
MATRIX_SIDE = {"cuda": 8192, "cpu": 512}
TF32, FP8 = "tf32", "fp8"


@dataclass(frozen=True)
class Ceilings:
    """One device's: GB/s read and copied (read + written), TFLOP/s by dtype, µs, bytes."""

    read_gb_per_s: float
    copy_gb_per_s: float
    matrix_tflops: Mapping[str, float]
    launch_us: float
    l2_bytes: int

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what asdict wrote."""
        return cls(**data)

    def bound(
        self, dtype: str, flops: float, fewest_bytes: int, output_bytes: int, cache: str
    ) -> tuple[float, str]:
        """Return the least µs that the op can take here, and whether memory or compute says so."""
        cached = self.l2_bytes if cache == "hot" else min(output_bytes, self.l2_bytes)
        bandwidth = max(self.read_gb_per_s, self.copy_gb_per_s)
        memory_us = max(0, fewest_bytes - cached) / bandwidth / 1e3
        rates = self.matrix_tflops
        rate = rates.get(TF32 if dtype == "fp32" else dtype, max(rates.values()))
        compute_us = flops / rate / 1e6
        return max(memory_us, compute_us), "memory" if memory_us >= compute_us else "compute"


def measure(device: torch.device) -> Ceilings:
    """Measure a device's ceilings; about a second."""
    best = _best_us(device)
    size = COPY_BYTES[device.type]
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    total = torch.empty((), device=device)
    dtypes = [name for name in DTYPES if name != FP8 or not unsupported_fp8(device)]
    read_us = best(lambda: torch.sum(source, 0, out=total))
    copy_us = best(lambda: target.copy_(source))
    return Ceilings(
        read_gb_per_s=round(size / read_us / 1e3, 1),
        copy_gb_per_s=round(2 * size / copy_us / 1e3, 1),
        matrix_tflops={name: round(_matrix(name, device, best), 2) for name in dtypes},
        launch_us=round(nothing_us(device), 2),
        l2_bytes=_l2_bytes(device),
    )


def nothing_us(device: torch.device) -> float:
    """Return the µs of a sample of almost nothing: what launching costs every sample."""
    small = torch.zeros(32, device=device)
    small.add_(1)  # compiled and loaded before a graph is captured
    (taken,) = time_together([ready(Launch(lambda: small.add_(1)), device)], device, "launch")
    return median(taken.times_us)


def _matrix(name: str, device: torch.device, best: Callable[[Callable[[], Any]], float]) -> float:
    """Return the TFLOP/s of a large product of random matrices; zeros would draw less power."""
    side = MATRIX_SIDE[device.type]
    a, b = (torch.randn(side, side, device=device).to(DTYPES[name]) for _ in range(2))
    out = torch.empty_like(a)
    dense = partial(torch.matmul, a, b.t(), out=out)
    product = partial(scaled_product, b, a, fast=True) if name == FP8 else dense
    with tf32_products(name == TF32):
        return 2 * side**3 / best(product) / 1e6


def _best_us(device: torch.device) -> Callable[[Callable[[], Any]], float]:
    def host(call: Callable[[], Any]) -> float:
        start = perf_counter()
        call()
        return 1e6 * (perf_counter() - start)

    def events(call: Callable[[], Any]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize(device)
        return float(1e3 * begin.elapsed_time(end))

    clock = events if device.type == "cuda" else host

    def best(call: Callable[[], Any]) -> float:
        return min(clock(call) for _ in range(BURSTS))

    return best


def _l2_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).L2_cache_size)
