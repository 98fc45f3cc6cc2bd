"""spense_mma: the operands of mma.sp, its threads on a CPU, its machine code, and on a GPU.

On the CPU the kernel's own source runs thread by thread, with the arguments of its launch.
mma_on_cpu.h computes what the PTX ISA says that the instructions do.
"""

import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.formats.spense import VALUE_BYTES, Spense
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.declarations import arguments_of
from sparsebench.kernels.spense import spense_mma
from sparsebench.kernels.spense.spense_mma import Config
from tests.compiling.nvcc import assert_compiles_cleanly, by_nvcc
from tests.emulation.cuda_on_cpu import device_code, entry_point, library_of
from tests.kernels.spense.examples import CUOBJDUMP, ODD, SHAPES, call_of, example
from tests.tools.marks import needs_cupy, needs_gxx, sampled

KIB = {"sm_80": 164, "sm_86": 100, "sm_89": 100, "sm_90": 228, "sm_100": 228, "sm_120": 100}


def every(kib: int) -> list[Config]:
    """Return the configurations for any number of tokens, those that do not load ahead first."""
    listed = [spense_mma.configurations(tokens, kib) for tokens in spense_mma.TOKENS]
    return sorted(
        {c for configs in listed for c in configs}, key=lambda c: (c.ahead, c.rows, c.tokens)
    )


CONFIGS = every(KIB["sm_90"])
ALONE, AHEAD = CONFIGS[:4], CONFIGS[4:]
EVERY = [*SHAPES, *ODD]


# ---- metadata ----


def test_lanes_get_the_metadata_that_cutlass_packs_for_ampere() -> None:
    """PyTorch's conversion reorders metadata as CUTLASS does for mma.sp of sm_80."""
    conversions = pytest.importorskip("torch.sparse._semi_structured_conversions")
    torch.manual_seed(0)
    two = (torch.rand(64, 32, 4).argsort(-1) < 2).flatten(1)
    dense = torch.randn(64, 128).half().where(two, 0)
    _, theirs = conversions.sparse_semi_structured_from_dense_cutlass(dense)
    # A word per lane for 32 columns and 32 rows: rows 0 to 15 for the selector 0, then from 16 on.
    theirs = theirs.flatten().view(torch.int32).view(4, 2, 8, 2, 2)
    tile = Spense.from_dense(dense).sparse[0, 0, VALUE_BYTES:].view(torch.int32)
    ours = tile.view(2, 2, 8, 2, 4)  # 32 rows, 16 of them, lane / 4, lane % 2, product
    torch.testing.assert_close(ours.permute(4, 0, 2, 1, 3), theirs, rtol=0, atol=0)


# ---- its threads ----


def on_cpu(config: Config, dtype: torch.dtype, dense: bool, late: bool) -> Any:
    """Build the kernel's source for this machine."""
    call = """
        if (shared_bytes != (size_t)STAGES * STAGE_BYTES) abort();
        multiply_tiles(at<Activations>(0), at<Weights>(1), at<u16*>(2), at<const WorkItem*>(3),
                       at<const int*>(4), at<float4*>(5), at<int*>(6), at<int>(7));
    """
    source = '#include "mma_on_cpu.h"\n' + device_code("spense_mma.cu") + entry_point(call)
    return library_of(source, spense_mma.constants_of(config, dtype, dense), late)


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let products be planned without a GPU."""

    def load(name: str, function: str, constants: cuda.Constants, shared: int, *_: Any) -> Any:
        return cuda.CudaKernel(None, "code", arguments_of(name, function, constants), 0, shared)

    monkeypatch.setattr(cuda, "load", load)
    monkeypatch.setattr(cuda, "target_of", lambda device: "cpu")
    return monkeypatch


def emulated(
    x: Tensor, w: Spense, config: Config, workers: int, patch: pytest.MonkeyPatch, late: bool = True
) -> Tensor:
    """Run the product twice, because it must reset its counters; plan it for a few more tokens."""
    (n, _), counts = w.shape, torch.zeros(4096, dtype=torch.int32)
    kernel = on_cpu(config, x.dtype, w.dense.numel() > 0, late)

    def launch(loaded: cuda.Loaded, args: Any, out: Tensor, *owners: object) -> Tensor:
        kernel.call(args[0], loaded.grid, ctypes.c_size_t(loaded.shared_bytes))
        return out

    patch.setattr(spense_mma, "workers", lambda device, config, shared: workers)
    patch.setattr(cuda, "launch", launch)
    patch.setattr(spense_mma, "workspace", lambda x, count: torch.full((max(count, 1),), torch.nan))
    patch.setattr(spense_mma, "counters", lambda x, count: counts)
    product = spense_mma.plan(w, call_of(w, len(x) + 3), config)
    outputs = [torch.full((len(x), n), torch.nan, dtype=x.dtype) for _ in range(2)]
    for out in outputs:
        assert product.run(x, w.sparse, w.dense, out=out) is out
        assert not counts.any()
    torch.testing.assert_close(*outputs, rtol=0, atol=0, equal_nan=True)
    return outputs[0]


@needs_gxx
@pytest.mark.parametrize(
    ("shape", "config", "workers", "late"),
    sampled(
        [
            *((shape, ALONE[i % 4], 5, True) for i, shape in enumerate(EVERY)),
            *((shape, ALONE[i % 4 - 2], 2, False) for i, shape in enumerate(EVERY)),
            *((EVERY[i], config, 5, True) for i, config in enumerate(AHEAD)),
            *((EVERY[(i + 6) % 11], config, 2, False) for i, config in enumerate(AHEAD)),
        ],
        *(1, 3, 21, 23, 26, 30),
    ),
    ids=str,
)
def test_its_threads_give_the_product_on_a_cpu(shape, config, workers, late, patch):
    dtype = torch.float16 if config.tokens in (16, 128) else torch.bfloat16
    x, w = example(shape, dtype)
    right = (x.float() @ w.to_dense().float().T).to(dtype)
    y = emulated(x, w, config, workers, patch, late)
    torch.testing.assert_close(y, right, rtol=0, atol=0)


@needs_gxx
def test_nan_is_where_the_definition_has_it_at_any_stride(patch) -> None:
    x, w = example((20, 136, 528, 0.25, "columns"), torch.float16)
    wide = torch.full((x.shape[0], x.shape[1] + 24), float("nan")).half()[:, : x.shape[1]]
    x = wide.copy_(x)
    dense = w.to_dense()
    dense[1, 0:4] = torch.tensor([float("nan"), 0.0, -0.0, 0.0])
    dense[2, 500] = float("nan")
    dense[3] = -0.0  # two of four in the sparse part
    dense[3, :384].view(-1, 4)[:, 2:] = 0
    x[4, 520] = float("inf")  # every feature reads it in the dense part
    w = Spense.from_dense(dense, dense_fraction=0.25, split="columns")
    y = emulated(x, w, Config(16), 7, patch)
    right = (x.float() @ dense.float().T).half()
    torch.testing.assert_close(y, right, rtol=0, atol=0, equal_nan=True)
    assert right.isnan().any(0)[:4].tolist() == [False, True, True, True]


# ---- configurations and machine code ----


@pytest.mark.parametrize("m", [1, 16, 17, 64, 65, 128, 129, 8192])
def test_the_tile_that_holds_all_tokens_is_tried_first(m: int) -> None:
    configs = spense_mma.configurations(m, KIB["sm_90"])
    assert 2 <= len(configs) <= 6
    assert configs[0].tokens >= min(m, 128)
    assert not configs[0].ahead
    assert all(config in CONFIGS and config.tokens < max(2 * m, 17) for config in configs)


@needs_cupy
@pytest.mark.parametrize("target", KIB)
def test_nvrtc_compiles_it_for_every_target(target: str) -> None:
    constants = spense_mma.constants_of(CONFIGS[4], torch.float16, dense=True)
    assert cuda.compiled("spense_mma", constants, target).startswith(b"\x7fELF")


@pytest.mark.parametrize("target", KIB)
@pytest.mark.parametrize("dense", [True, False])
def test_its_stages_fit_into_what_the_multiprocessor_has(target: str, dense: bool) -> None:
    for config in every(KIB[target]):
        held = config.shared_bytes(dense) + 1024
        assert held <= KIB[target] * 1024
        assert not config.ahead or held * config.ctas <= KIB[target] * 1024
        assert config.stages(dense) >= spense_mma.LEAST_STAGES


COMPILED = [
    (config, dense, target)
    for target in KIB
    for config in every(KIB[target])
    for dense in ([True, False] if config.ahead else [True])
]


@by_nvcc
@pytest.mark.parametrize(("config", "dense", "target"), sampled(COMPILED, 0, -1), ids=str)
def test_it_compiles_without_a_spill(config, dense, target, tmp_path) -> None:
    dtype = torch.float16 if config.tokens == 64 else torch.bfloat16
    constants = spense_mma.constants_of(config, dtype, dense)

    def look(code: Path, log: str) -> None:
        (registers,) = re.findall(r"Used (\d+) registers", log)
        assert int(registers) * config.threads * config.ctas <= 2**16  # of a multiprocessor
        if CUOBJDUMP.exists():
            sass = subprocess.check_output([CUOBJDUMP, "-sass", code], text=True)
            products = 2 * 128 * config.tokens // (16 * 8) // 4  # of a box, by each warp
            assert sass.count(" HMMA.SP.16832") == products
            assert sass.count(" CALL.") < products, "products go through a function"

    assert_compiles_cleanly("spense_mma", constants, tmp_path, look=look, target=target)
