"""2:4 weights by CUTLASS on Hopper: the kernel of its example 62, with tiles that are searched.

    Y.T [n, m] = W [n, k] @ X.T [k, m]      W compressed by CUTLASS, TMA, wgmma.sp, warp-specialised

nvcc builds one library for each tile from cutlass_sparse.cu, the first time, in parallel: two
minutes on 16 cores. CONFIGS has the example's tile and cluster first, then tiles for many, fewer
and few tokens. Others, stream-k and other schedules are not tried.

    needs   the package nvidia-cutlass 4 (headers only), nvcc, compute capability 9.0
    dtype   fp16, bf16, fp8 (Y in bf16), fp32 accumulation
    sizes   k a multiple of 16, in fp8 of 32; n of 8; any number of tokens

Source: github.com/NVIDIA/cutlass, BSD-3, examples/62_hopper_sparse_gemm.
"""

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.spense import Spense
from sparsebench.kernels._common import foreign_code
from sparsebench.kernels._common.requirements import HOPPER, unmet
from sparsebench.kernels._common.search import fastest_call, pinned_or
from sparsebench.kernels._kernel import OUTPUTS, Kernel, Launch, Operands
from sparsebench.results.record import Problem

PACKAGE, DISTRIBUTION, MAJOR = "cutlass_library", "nvidia-cutlass", 4
ELEMENTS = {"fp16": "half_t", "bf16": "bfloat16_t", "fp8": "float_e4m3_t"}
ALIGNED = {"fp16": 16, "bf16": 16, "fp8": 32}  # k: 16 bytes of the values that are kept
ROWS = 8  # n: 16 bytes of Y
TARGET = "sm_90a"
AUTOMATIC, FAST_FP8 = "KernelScheduleAuto", "KernelTmaWarpSpecialized{}FP8FastAccum"


@dataclass(frozen=True)
class Config:
    """A tile of Y, the bytes of its part of a row of X, and the CTAs of a cluster."""

    tile_n: int
    tile_m: int
    row_bytes: int = 256
    cluster_n: int = 1
    cluster_m: int = 1

    def defines(self, dtype: str) -> list[str]:
        """Return the macros of cutlass_sparse.cu; in fp8 accumulation is fast, as for cuBLAS.

        Otherwise CUTLASS chooses the schedule: cooperative, for 64 rows of W ping-pong.
        """
        output = ELEMENTS["bf16" if dtype == "fp8" else dtype]
        fast = FAST_FP8.format("Cooperative" if self.tile_n >= 128 else "Pingpong")
        schedule = fast if dtype == "fp8" else AUTOMATIC
        values = {
            **{"ELEMENT": ELEMENTS[dtype], "OUTPUT": output, "SCHEDULE": schedule},
            **{"TILE_N": self.tile_n, "TILE_M": self.tile_m},
            **{"TILE_K": self.row_bytes if dtype == "fp8" else self.row_bytes // 2},
            **{"CLUSTER_N": self.cluster_n, "CLUSTER_M": self.cluster_m},
        }
        return [f"-D{name}={value}" for name, value in values.items()]


CONFIGS = [
    Config(128, 128, cluster_m=2),
    Config(128, 256, cluster_n=2),
    Config(128, 64, cluster_n=2),
    Config(64, 32),
]


def prepare(operands: Operands) -> Launch:
    w = operands.weights["w"]
    assert isinstance(w, Spense)
    if w.sparse_shape != w.shape:
        split = f"{list(w.sparse_shape)} of {list(w.shape)}"
        raise Unsupported(f"CUTLASS expected all of W to be 2:4, found {split}")
    choices = pinned_or([asdict(config) for config in CONFIGS], operands)
    dtype = operands.problem["dtype"]
    with ThreadPoolExecutor(len(choices)) as pool:
        codes = list(pool.map(partial(built, dtype), [Config(**choice) for choice in choices]))
    inputs = w.to_dense(), operands.activations["x"], OUTPUTS[dtype]
    calls = [product(*inputs, code) for code in codes]
    return fastest_call(calls, choices, operands.device, cutlass=version())


def product(w: Tensor, x: Tensor, output: torch.dtype, code: ctypes.CDLL) -> Callable[[], Tensor]:
    """Compress W; return the call of one library. Raises Unsupported if it refuses the sizes."""
    (n, k), m = w.shape, len(x)
    counts = (ctypes.c_long * 3)()
    code.sizes(n, m, k, counts)
    values, metadata, space = (
        torch.zeros(count, dtype=torch.uint8, device=x.device) for count in counts
    )
    out = x.new_empty(m, n, dtype=output)
    packed = map(foreign_code.pointer, (w, values, metadata))
    if status := code.pack(foreign_code.stream_of(x.device), *packed, n, m, k):
        raise Unsupported(f"CUTLASS cannot compress W {n} x {k}: status {status}")
    torch.cuda.synchronize(x.device)  # before W is freed

    def run() -> Tensor:
        arrays = map(foreign_code.pointer, (values, metadata, x, out, space))
        if status := code.multiply(foreign_code.stream_of(x.device), *arrays, n, m, k):
            raise RuntimeError(f"CUTLASS refuses {(n, m, k)}: status {status}")
        return out

    return run


def headers() -> Path:
    package = find_spec(PACKAGE)
    assert package
    assert package.origin
    return Path(package.origin).parent / "source"


def version() -> str:
    """Return the version of the headers, such as 4.2.0."""
    return ".".join(metadata.version(DISTRIBUTION).split(".")[:3])


@cache
def built(dtype: str, config: Config) -> ctypes.CDLL:
    """Build or load the library of a tile. Raises Unsupported."""
    include = headers() / "include", headers() / "tools/util/include"
    flags = ["--expt-relaxed-constexpr", *(f"-I{folder}" for folder in include)]
    source, defines = Path(__file__).with_suffix(".cu"), config.defines(dtype)
    return foreign_code.library(source, version(), TARGET, *flags, *defines)


def unsupported(problem: Problem, device: torch.device) -> str | None:
    step, package = ALIGNED.get(problem["dtype"], 1), (PACKAGE, DISTRIBUTION)
    if reason := unmet(problem, device, HOPPER, *ELEMENTS, package=package, n=ROWS, k=step):
        return reason
    right = version().startswith(f"{MAJOR}.")
    return None if right else f"expected nvidia-cutlass {MAJOR}, found {version()}"


KERNEL = Kernel("linear", "spense", "cuda", prepare, unsupported)
