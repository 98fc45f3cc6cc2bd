"""Measure this device's ceilings: memory, products by dtype, an empty launch (results/ceilings.py).

    read     torch.sum; our streams in each shape (kernels/_common/streams.py); the dense product of
             the reference contest `memory`, which reads its weight and hardly anything else
    copy     torch.copy_ and our streams; bytes read and bytes written are added
    write    torch.fill_ and our streams
    matrix   large products of random matrices by the dense baseline, among them those of the
             reference contest `compute`; zeros would draw less power

All candidates are timed like rows: captured, in turn, behind a flush of the L2 cache. Each
ceiling is the best sample, not a mean, because a kernel that runs for 50 µs meets no power limit.
Products pause between their bursts, since earlier bursts have used up the power budget. The end of
what is written may stay in the L2 cache, so the cache's size is subtracted from the bytes moved.
Datasheets give no ceilings: an H200 lists 989 TFLOP/s for bf16, and cuBLAS reaches 806 there.
"""

from collections.abc import Callable, Collection
from functools import partial
from importlib.util import find_spec
from statistics import median
from time import sleep
from typing import Any

import torch

from sparsebench.errors import Unsupported
from sparsebench.formats.dense import Dense
from sparsebench.harness.bench.operands import operands
from sparsebench.harness.bench.timing import ready, time_together
from sparsebench.harness.catalog import load_kernel, load_op
from sparsebench.kernels._common.search import warm_up
from sparsebench.kernels._kernel import DTYPES, Launch, Operands
from sparsebench.kernels.dense.cublas import unsupported_8_bits
from sparsebench.results.ceilings import Ceilings
from sparsebench.results.record import Problem

DENSE = {"cuda": "cublas", "cpu": "torch_dense"}
"""The dense baseline of a device."""

# m, n, k and dtype of the reference contests (plan/selection.py). The first reads 512 MB on a GPU.
MEMORY = {"cuda": (1, 16384, 16384, "bf16"), "cpu": (1, 2048, 2048, "fp32")}
COMPUTE = {"cuda": (4096, 4096, 4096, "bf16"), "cpu": (256, 256, 256, "fp32")}
SIDES = {"cuda": (4096, 8192), "cpu": (256, 512)}  # sides of the products; the first as in COMPUTE
BURSTS, REST_S = 3, 0.1  # bursts, pause; without one bf16 reached 738 or 778 TFLOP/s, not 790
LONG_US = 2000.0  # a product that takes longer is not followed by a larger one

STREAM_BYTES = {"cuda": 2**31, "cpu": 2**26}  # also at most an eighth of the free memory
LEAST_BYTES = 2**20  # a multiple of every stream's chunk
COMPILERS = 8  # threads that compile our streams
NO_STREAMS = "left out: they need Triton, which is not installed"

Call = Callable[[], Any]


def measure(device: torch.device, dtypes: Collection[str] = tuple(DTYPES)) -> Ceilings:
    """Measure a device's ceilings, for products of these dtypes; 10 s on an H200."""
    best, by = dict[str, float](), dict[str, str]()
    measured = {**memory_rates(device), **{dtype: _products(dtype, device) for dtype in dtypes}}
    for kind, rates in measured.items():
        if rates:
            by[kind], best[kind] = max(rates.items(), key=lambda pair: pair[1])
    return Ceilings(
        read_gb_per_s=_digits(best["read"] / 1e3),
        copy_gb_per_s=_digits(best["copy"] / 1e3),
        matrix_tflops={dtype: _digits(best[dtype] / 1e6) for dtype in dtypes if dtype in best},
        launch_us=_digits(empty_launch_us(device)),
        l2_bytes=_l2_bytes(device),
        write_gb_per_s=_digits(best["write"] / 1e3),
        by=by if device.type != "cuda" or find_spec("triton") else by | {"streams": NO_STREAMS},
    )


def empty_launch_us(device: torch.device) -> float:
    """Return the time in µs of an empty launch: a sample that does almost nothing."""
    small = torch.zeros(32, device=device)
    small.add_(1)  # compiled and loaded before a graph is captured
    (taken,) = time_together([ready(Launch(lambda: small.add_(1)), device)], device, "launch")
    return median(taken.times_us)


def memory_rates(device: torch.device) -> dict[str, dict[str, float]]:
    """Return bytes per µs by kind of access and by candidate."""
    size = _stream_bytes(device)
    source = torch.arange(size // 4, dtype=torch.int32, device=device)
    target, total = torch.empty_like(source), torch.empty((), device=device)
    in_cache = _l2_bytes(device)  # written bytes that may stay in the cache
    moved = {"read": size, "copy": 2 * size - in_cache, "write": size - in_cache}
    floats = source.view(torch.float32)
    calls: dict[str, dict[str, Call]] = {
        "read": {"torch.sum": partial(torch.sum, floats, 0, out=total)},
        "copy": {"torch.copy_": partial(target.copy_, source)},
        "write": {"torch.fill_": partial(target.fill_, 1)},
    }
    if device.type == "cuda" and find_spec("triton"):
        from sparsebench.kernels._common import streams

        calls["read"] |= dict(streams.readers(source))
        calls["copy"] |= dict(streams.copiers(source, target))
        calls["write"] |= dict(streams.writers(target))
    names = [(kind, name) for kind, named in calls.items() for name in named]
    every = [calls[kind][name] for kind, name in names]
    if device.type == "cuda":
        warm_up(every, device, COMPILERS)
    least_us = dict(zip(names, _least_us(every, device), strict=True))
    rates = {kind: {n: moved[kind] / least_us[kind, n] for n in calls[kind]} for kind in calls}
    if (product := _product(MEMORY[device.type], device)) is not None:
        name, call, problem = product
        bytes_read = DTYPES[problem["dtype"]].itemsize * problem["n"] * problem["k"]
        rates["read"][name] = bytes_read / _least_us([call], device)[0]
    return rates


def _products(dtype: str, device: torch.device) -> dict[str, float]:
    """Return FLOPs per µs of large dense products of a dtype; none if the device has none."""
    rates: dict[str, float] = {}
    if DTYPES[dtype].itemsize == 1 and unsupported_8_bits(dtype, device):
        return rates  # a CPU would convert them
    for side in SIDES[device.type]:
        if (product := _product((side, side, side, dtype), device)) is None:
            return rates
        name, call, _ = product
        times_us = []
        for _ in range(BURSTS):
            if device.type == "cuda":  # products that run for a second lower the clock
                torch.cuda.synchronize(device)
                sleep(REST_S)
            times_us += _least_us([call], device)
        least_us = min(times_us)
        rates[name] = 2 * side**3 / least_us
        if least_us > LONG_US:
            break
    return rates


def _product(
    size: tuple[int, int, int, str], device: torch.device
) -> tuple[str, Launch, Problem] | None:
    """Return the dense baseline's name, launch and problem; None if it cannot run here."""
    op, kernel = load_op("linear"), load_kernel(DENSE[device.type])
    m, n, k, dtype = size
    fields = {**op.defaults, "m": m, "n": n, "k": k, "dtype": dtype}
    problem = Problem("linear", fields, 0, defaults=op.defaults)
    if kernel.unsupported(problem, device):
        return None
    drawn = operands(problem, op, device, None)
    weights = {name: Dense.from_dense(w) for name, w in drawn.weights.items()}
    try:
        launch = kernel.prepare(
            Operands(problem, weights, drawn.activations, op.definition_at(problem))
        )
    except Unsupported:
        return None
    launch()  # compiled and loaded before a graph is captured
    return f"{DENSE[device.type]}, m {m}, n {n}, k {k}, {dtype}", launch, problem


def _least_us(calls: list[Call], device: torch.device) -> list[float]:
    for call in calls:
        call()
    timed = [ready(Launch(call), device) for call in calls]
    return [min(taken.times_us) for taken in time_together(timed, device, "ceilings")]


def _stream_bytes(device: torch.device) -> int:
    size = STREAM_BYTES[device.type]
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 8 * size
    while size > max(LEAST_BYTES, free // 8):
        size //= 2
    return size


def _l2_bytes(device: torch.device) -> int:
    on_gpu = device.type == "cuda"
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if on_gpu else 0


def _digits(value: float) -> float:
    """Round to six significant digits, because a fixed number of decimals erases small rates."""
    return float(f"{value:.6g}")
