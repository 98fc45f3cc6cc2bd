"""What kernels refuse: the devices, problems and operands that they cannot run, each with a reason.

`unsupported` decides from the problem, before anything is drawn; `prepare` from the operands,
before anything is compiled. test_catalog.py has the refusal of a CPU by every kernel of ours.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.formats._format import Format
from sparsebench.formats.bitmap import Bitmap
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.csr import Csr
from sparsebench.formats.slide import Slide
from sparsebench.formats.spense import Spense
from sparsebench.harness.catalog import load_kernel
from sparsebench.kernels._kernel import Operands
from sparsebench.results.record import Problem
from tests.kernels.contract import refusal
from tests.kernels.layers import problem_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HALF, BF16, FP32, FP8 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn
SIZES = {
    "attention": {"m": 256, "heads": 4, "kv_heads": 4, "head_dim": 64, "block": 64},
    "decoder": {"m": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "context": 20}
    | {"intermediate": 256, "vocab": 40, "layers": 3, "activation": "relu", "active": 6},
}
USUAL = {"m": 16, "n": 512, "k": 256}
IN_4_BITS = {"weight_bits": 4, "pattern": "two_four", "sparsity": 0.5}
SPENSE_FFN = {"n": 2048, "k": 512, "activation": "silu"}

# Kernels, fields of a problem, and a token of the reason; none if the kernel accepts it. The GPU
# has compute capability 9.0, unless `capability` says otherwise or is None, which stands for a CPU.
PROBLEMS: list[tuple[str, dict[str, Any], str]] = [
    ("attention_wgmma", {"head_dim": 128}, ""),
    ("attention_wgmma", {"head_dim": 96}, "found 96"),
    ("attention_wgmma", {"scale": -1.0}, "-1"),
    ("attention_wgmma", {"dtype": "fp32"}, "fp32"),
    ("bitmap_mma", {"m": 256}, ""),
    ("bitmap_mma", {"m": 1, "dtype": "fp8"}, ""),
    ("bitmap_mma", {"m": 257}, "found 257"),
    ("bitmap_mma", {"capability": (8, 0)}, "found 8.0"),
    ("bitmap_mma", {"dtype": "fp32"}, "found fp32"),
    ("bitmap_pairs", {"m": 128}, ""),
    ("bitmap_pairs", {"m": 129}, "found 129"),
    ("bitmap_pairs", {"capability": (8, 0)}, "found 8.0"),
    ("bitmap_pairs", {"dtype": "fp8"}, "found fp8"),
    ("bsr_triton", {"dtype": "fp8", "capability": (8, 9)}, ""),
    ("bsr_triton", {"dtype": "fp8", "capability": (8, 6)}, "8.9 or newer"),
    ("bsr_triton", {"capability": (7, 5)}, "8.0 or newer"),
    ("bsr_fp32", {"dtype": "fp32", "capability": (8, 0)}, ""),
    ("bsr_fp32", {"dtype": "tf32", "capability": (12, 0)}, ""),
    ("bsr_fp32", {"dtype": "fp32", "capability": (7, 5)}, "8.0 or newer, found 7.5"),
    ("bsr_fp32", {"dtype": "bf16"}, "expected fp32 or tf32, found bf16"),
    ("csr_cuda", {"capability": (7, 5)}, "found 7.5"),
    ("csr_cuda", {"dtype": "fp8", "capability": (8, 0)}, "found fp8"),
    ("spense_mma", {"capability": (7, 5)}, "8.0 or newer, found 7.5"),
    ("spense_mma", {"dtype": "fp8"}, "fp8"),
    ("spense_mma", {"dtype": "fp16", "capability": (8, 0)}, ""),
    ("spense_mma", {"capability": (12, 0)}, ""),
    ("spense_wgmma", {"capability": (8, 0)}, "9.0, found 8.0"),
    ("spense_wgmma", {"dtype": "fp32"}, "fp32"),
    ("spense_wgmma", {"dtype": "fp8"}, ""),
    ("spense_ffn", {"dtype": "fp8", **SPENSE_FFN, "capability": None}, "9.0, found cpu"),
    ("ffn_sparse", {"activation": "silu"}, "expected activation relu or relu2, found silu"),
    ("ffn_sparse", {"activation": "relu", "k": 2052}, "multiples of 8"),
    ("ffn_sparse", {"activation": "relu", "k": 8192}, "up to 4096, found 8192"),
    ("ffn_few", {"activation": "relu", "m": 65}, "expected 1 to 64 tokens, found 65"),
    ("ffn_few", {"activation": "relu", "n": 60}, "found n 60 and k 256"),
    ("ffn_few", {"activation": "relu", "m": 64, "n": 14336, "k": 4096}, ""),
    ("mlp_few", {"activation": "relu", "m": 65}, "expected 1 to 64 tokens, found 65"),
    ("decoder_few", {"activation": "silu", "active": None}, "relu or relu2, found silu"),
    ("decoder_few", {"hidden": 5120}, "expected hidden up to 4096, found 5120"),
    ("decoder_few", {"m": 65}, "expected 1 to 64 tokens, found 65"),
    ("decoder_few", {"dtype": "fp32"}, "expected fp16 or bf16, found fp32"),
    ("linear_few", {"m": 5}, "5"),
    # peers
    ("cublas", {"dtype": "fp8", "n": 2056, "op": "ffn"}, "multiples of 16 in fp8, found n 2056"),
    *(
        ("cublas", {"op": "linear", "dtype": dtype, **fields}, token)
        for dtype, fields, token in (
            ("fp8", {}, ""),
            ("fp8", {"n": 250}, "multiples of 16 in fp8, found n 250"),
            ("fp8", {"capability": (8, 0)}, "8.9 or newer, found 8.0"),
            ("fp8", {"capability": None}, "need an NVIDIA GPU, found cpu"),
            ("int8", {"capability": (8, 0)}, ""),
            ("int8", {"n": 250}, "multiples of 16 in int8, found n 250"),
            ("int8", {"capability": (7, 5)}, "8.0 or newer, found 7.5"),
            ("int8", {"capability": None}, "need an NVIDIA GPU, found cpu"),
        )
    ),
    *(
        (name, {"dtype": "fp8", "capability": None, **SPENSE_FFN, "op": "ffn"}, "found cpu")
        for name in ("cublas", "torch_compile")
    ),
    *(
        (name, {**fields, "pattern": "two_four", "sparsity": 0.5}, token)
        for name in ("cusparselt", "cusparselt_hybrid")
        for fields, token in (
            ({"dtype": "fp32"}, "found fp32"),
            ({"n": 40}, "multiples of 16 in bf16, found 40 and 256"),
            ({"n": 48, "dtype": "fp8"}, "multiples of 32 in fp8, found 48 and 256"),
            ({"dtype": "fp8", "capability": (8, 0)}, "8.9 or newer, found 8.0"),
            ({"capability": None}, "expected an NVIDIA GPU"),
        )
    ),
    *(
        (name, {"dtype": "int8", "pattern": "two_four", "sparsity": 0.5}, "or fp8, found int8")
        for name in ("cusparselt_hybrid", "spense_wgmma", "slide_wgmma")
    ),
    *(
        ("cutlass_sparse", {"pattern": "two_four", "sparsity": 0.5, **fields}, "expected")
        for fields in ({"dtype": "fp32"}, {"n": 100}, {"k": 24})
    ),
    *(
        (name, {"capability": None}, "found device cpu")
        for name in ("cusparse_csr", "cusparse_bsr", "cusparse_bell", "torch_bsr", "stk")
    ),
    ("cusparse_bell", {"dtype": "fp32"}, "expected dtype tf32"),
    ("cusparse_bell", {"dtype": "tf32"}, ""),
    ("scipy_csr", {"dtype": "bf16", "capability": None}, "found bf16"),
    ("scipy_bsr", {"dtype": "fp16", "capability": None}, "found fp16"),
    ("stk", {"dtype": "fp32"}, "found fp32"),
    ("stk", {"n": 64, "dtype": "fp16"}, "found 64 and 256"),
    ("stk", {"k": 32768 + 128, "dtype": "fp16"}, "at most 32768"),
    ("stk", {"m": 2**18, "n": 2**13, "dtype": "fp16"}, "less than 2^31 elements"),
    ("torch_int4", {"dtype": "fp16", **IN_4_BITS}, "expected"),
    ("torch_int4", {"n": 100, **IN_4_BITS}, "expected"),
    ("torch_int4", {"weight_bits": None}, "weight_bits"),
]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("name", "fields", "token"), PROBLEMS)
def test_a_problem_is_refused_with_its_reason(name, fields, token, monkeypatch) -> None:
    rest = {"dtype": "bf16", "capability": (9, 0), "op": load_kernel(name).op} | fields
    capability, op = rest.pop("capability"), rest.pop("op")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    problem = problem_of(op, **SIZES.get(op, USUAL) | rest)
    reason = load_kernel(name).unsupported(problem, CUDA if capability else CPU)
    assert token in str(reason)
    assert (reason is None) == (not token)


def x(k: int, dtype: torch.dtype = HALF, m: int = 4) -> Tensor:
    return torch.zeros(m, k).to(dtype)


def packed(kind: Any, n: int, k: int, dtype: torch.dtype = HALF, **params: Any) -> Any:
    return kind.from_dense(torch.zeros(n, k).to(dtype), **params)


def bsr(n: int, k: int, block: Any, dtype: torch.dtype = HALF) -> Bsr:
    block = [*block] if isinstance(block, tuple) else block
    return Bsr.from_dense(torch.ones(n, k).to(dtype), block=block)


OPERANDS: list[tuple[str, Callable[[], tuple[Tensor, Format]], str]] = [
    ("bsr_fp32", lambda: (x(96), bsr(64, 96, 32)), "expected fp32 operands, found torch.float16"),
    ("bsr_resident", lambda: (x(96, FP32), bsr(60, 96, (6, 12), FP32)), "found torch.float32"),
    ("bsr_resident", lambda: (x(96), bsr(60, 96, 9)), "even numbers, found 9x9"),
    ("bsr_resident", lambda: (x(96), bsr(60, 96, 66)), "even numbers, found 66x66"),
    ("bsr_resident", lambda: (x(90), bsr(60, 90, 6)), "of 8 and of Y of 2, found 90 and 60"),
    ("bsr_small", lambda: (x(96, FP32), bsr(64, 96, 16, FP32)), "found torch.float32"),
    ("bsr_small", lambda: (x(96), bsr(64, 96, 24)), "found 24x24"),
    ("bsr_small", lambda: (x(96), bsr(60, 96, 16)), "8 to write, found 96 and 60"),
    ("bsr_small", lambda: (x(128, m=257), bsr(128, 128, 64)), "up to 256 tokens, found 288"),
    ("bsr_strips", lambda: (x(96, FP32), bsr(120, 96, 24, FP32)), "found torch.float32"),
    ("bsr_strips", lambda: (x(96), bsr(120, 96, 8)), "even sides from 10 on, found 8x8"),
    ("bsr_strips", lambda: (x(90), bsr(120, 90, 24)), "8 to write, found 90 and 120"),
    ("bsr_strips_dgrad", lambda: (x(60), bsr(60, 96, 24)), "8 to write, found 60 and 96"),
    ("bsr_wgmma", lambda: (x(128, FP32), bsr(64, 128, 64, FP32)), "found torch.float32"),
    ("bsr_wgmma", lambda: (x(128), bsr(124, 128, 64)), "8 to write, found 128 and 124"),
    ("bsr_wgmma", lambda: (x(128), bsr(64, 128, (32, 64))), "64 rows and columns, found 32x64"),
    ("bsr_wgmma_dgrad", lambda: (x(64, FP8), bsr(64, 128, 64, FP8)), "found torch.float8"),
    ("csr_cuda", lambda: (x(8, FP8), packed(Csr, 4, 8, FP8)), "found torch.float8_e4m3fn"),
    ("csr_cuda_dgrad", lambda: (x(4, FP8), packed(Csr, 4, 8, FP8)), "found torch.float8_e4m3fn"),
    ("bitmap_mma", lambda: (x(128, FP32), packed(Bitmap, 64, 128, FP32)), "found torch.float32"),
    ("bitmap_mma", lambda: (x(132), packed(Bitmap, 64, 132)), "of 8 columns of X, found 132"),
    ("bitmap_mma", lambda: (x(136, FP8), packed(Bitmap, 9, 136, FP8)), "of 16 columns of X, found"),
    ("bitmap_mma", lambda: (x(128, m=257), packed(Bitmap, 16, 128)), "1 to 256 tokens, found 288"),
    ("bitmap_pairs", lambda: (x(128, FP8), packed(Bitmap, 64, 128, FP8)), "found torch.float8"),
    ("bitmap_pairs", lambda: (x(132), packed(Bitmap, 64, 132)), "of 8 columns of X, found 132"),
    ("bitmap_pairs", lambda: (x(128, m=129), packed(Bitmap, 16, 128)), "128 tokens, found 144"),
    ("spense_mma", lambda: (x(128, FP8), packed(Spense, 64, 128, FP8)), "torch.float8_e4m3fn"),
    ("spense_wgmma", lambda: (x(136, FP8), packed(Spense, 64, 136, FP8)), "found 136 and 64"),
    *(
        row
        for name in ("spense_mma", "spense_wgmma")
        for row in (
            (name, lambda: (x(132), packed(Spense, 64, 132)), "found 132 and 64"),
            (name, lambda: (x(128), packed(Spense, 63, 128)), "found 128 and 63"),
        )
    ),
    ("slide_wgmma", lambda: (x(252), packed(Slide, 64, 252)), "found 252 and 64"),
    ("slide_wgmma", lambda: (x(240), packed(Slide, 64, 240, kept=4, group=6)), "found 4 of 6"),
    ("torch_bsr", lambda: (x(64, m=64), bsr(80, 64, 32)), "divide W, found 32x32 in 80x64"),
    ("torch_bsr", lambda: (x(64, m=64), bsr(64, 64, (16, 32))), "square blocks, found 16x32"),
    ("torch_bsr_dgrad", lambda: (x(80, m=64), bsr(80, 64, 32)), "found 32x32 in 64x80"),
    ("stk", lambda: (x(256, m=128), bsr(384, 256, 64)), "blocks of 128x128, found 64x64"),
    (
        "cutlass_sparse",
        lambda: (x(256, BF16), packed(Spense, 256, 256, BF16, dense_fraction=0.5)),
        "all of W",
    ),
]


@pytest.mark.parametrize(("name", "draw", "token"), OPERANDS)
def test_operands_are_refused_before_anything_is_built(name, draw, token) -> None:
    (activations, w), kernel = draw(), load_kernel(name)
    by_name = {"dy" if kernel.op == "linear_dgrad" else "x": activations}
    problem = Problem(kernel.op, {"dtype": "fp16"})
    operands = Operands(problem, {"w": w}, by_name, torch.matmul)
    assert token in refusal(lambda: kernel.prepare(operands))


def both(m: int = 4, n: int = 128, k: int = 192, dtype: torch.dtype = HALF) -> tuple[Tensor, ...]:
    return torch.zeros(m, n).to(dtype), torch.zeros(m, k).to(dtype)


BLOCKS = {  # taken, not taken
    "bsr_wgrad": (64, (64, 32)),
    "bsr_wgrad_mma": (16, (32, 16)),
    "bsr_wgrad_small": (32, (32, 12)),
}
GRADIENTS: list[tuple[str, Callable[[], tuple[Any, ...]], str]] = [
    *(
        row
        for name, (side, odd) in BLOCKS.items()
        for row in (
            (name, lambda s=side: (*both(), bsr(128, 192, s, FP32)), "found torch.float32"),
            (name, lambda s=side: (*both(n=60), bsr(60, 192, s)), "found 60 and 192"),
            (name, lambda o=odd: (*both(), bsr(128, 192, o)), f"found {odd[0]}x{odd[1]}"),
        )
    ),
    ("csr_cuda_wgrad", lambda: (*both(2, 4, 8, FP32), packed(Csr, 4, 8, FP32)), "a non-zero"),
    ("torch_sampled_bsr", lambda: (*both(64, 80, 64), bsr(80, 64, 8)), "two >= 16, found 8x8"),
    ("torch_sampled_bsr", lambda: (*both(64, 80, 64), bsr(80, 64, 32)), "found 32x32 in 80x64"),
]


@pytest.mark.parametrize(("name", "draw", "token"), GRADIENTS)
def test_operands_of_a_gradient_are_refused_before_anything_is_built(name, draw, token) -> None:
    dy, x, pattern = draw()
    problem = Problem("linear_wgrad", {"dtype": "fp16"})
    operands = Operands(problem, {}, {"dy": dy, "x": x}, torch.matmul, None, pattern)
    assert token in refusal(lambda: load_kernel(name).prepare(operands))
