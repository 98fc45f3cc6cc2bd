"""Triton kernels over rows read and write 16 bytes at a time, and casts to fp8 saturate."""

from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparsebench.kernels._common import elementwise
from sparsebench.kernels.dense import _layers
from sparsebench.kernels.dense.cublas import ACTIVATIONS

TILES = {"TOKENS": elementwise.TOKENS, "FEATURES": elementwise.FEATURES}
BF16 = {"products": "*bf16", "h": "*bf16"}
FP8 = {"products": "*bf16", "h": "*fp8e4nv"}
BACKWARD = dict.fromkeys(("products", "dh", "h", "gradients"), "*bf16")
SCALED = {"x": "*bf16", "out": "*fp8e4nv", "scales": "*fp32"}
CASES: list[Any] = [
    *(
        (elementwise._activate, BF16, TILES | {"ACTIVATION": activation, "SCALE": 1.0})
        for activation in ACTIVATIONS
    ),
    (elementwise._activate, FP8, TILES | {"ACTIVATION": "silu", "SCALE": 2.0**-6}),
    (elementwise._quantise, {"x": "*bf16", "out": "*fp8e4nv"}, TILES),
    (elementwise._scale, SCALED, {"COLUMNS": 8192}),
    (
        _layers._backward,
        BACKWARD,
        {"TOKENS": _layers.TOKENS, "FEATURES": _layers.FEATURES, "SQUARED": False},
    ),
]


@pytest.mark.parametrize(("function", "pointers", "constants"), CASES)
def test_memory_is_read_in_16_bytes_and_casts_saturate(
    function, pointers, constants, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kinds = dict.fromkeys(function.arg_names, "i32") | dict.fromkeys(constants, "constexpr")
    names = [name for name in function.arg_names if name not in (*constants, "m")]
    aligned = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in names}
    source = ASTSource(function, kinds | pointers, constants, aligned)
    code = triton.compile(source, GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert code.count("ld.global.v4") == code.count("ld.global") > 0
    words = code.count("st.global.b32")  # a scale
    assert words <= ("scales" in pointers)
    wide = "st.global.v4" if "*fp8e4nv" not in pointers.values() else "st.global.v"
    assert code.count(wide) == code.count("st.global") - words > 0
    assert code.count("cvt.rn.satfinite.e4m3x2.f32") == code.count("e4m3x2")
    assert ("e4m3x2" in code) == ("*fp8e4nv" in pointers.values())
