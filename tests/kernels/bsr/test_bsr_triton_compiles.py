"""Every configuration of the Triton kernels compiles ahead of time, without a GPU or a spill."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from triton.compiler import ASTSource

from sparsebench.kernels._common.triton import options, precision_of
from sparsebench.kernels.bsr import _triton, bsr_triton, bsr_triton_dgrad, bsr_triton_wgrad
from tests.compiling.triton_kernels import SHARED_BYTES, complaint_about

TOKENS = (1, 17, 64, 256, 4096)
FEW_AND_MANY = (17, 4096)  # in tf32, whose tiles are those of 16 bits; a compile takes 0.2 s
BLOCKS = ((1, 1), (10, 10), (16, 16), (32, 32), (64, 64), (128, 128), (256, 256), (200, 200))
ITEMSIZE = {"bf16": 2, "fp32": 4, "tf32": 4}  # fp16 takes the same registers and tiles as bf16
INDICES = {"columns", "offsets", "order", "places", "rows", "starts"}
CORES, STORED = 132, 10**5  # multiprocessors and blocks: they only affect the number of parts
FUNCTIONS = {
    "bsr_triton": bsr_triton._multiply,
    "bsr_triton_dgrad": bsr_triton_dgrad._multiply,
    "bsr_triton_wgrad": bsr_triton_wgrad._contract,
}
BOXES = {
    "bsr_triton": {
        "x": ("TOKENS", "DEPTH"),
        "w": ("FEATURES", "DEPTH"),
        "y": ("TOKENS", "FEATURES"),
    },
    "bsr_triton_dgrad": {
        "dy": ("TOKENS", "DEPTH"),
        "w": ("DEPTH", "FEATURES"),
        "dx": ("TOKENS", "FEATURES"),
    },
    "bsr_triton_wgrad": {"dy": ("TOKENS", "ROWS"), "x": ("TOKENS", "WIDTH")},
}


class Compile(NamedTuple):
    """One call of the compiler."""

    module: str
    constants: tuple[tuple[str, Any], ...]
    warps: int
    dtype: str
    capability: int
    aligned: bool  # Triton may assume that sizes are multiples of 16


def all_compiles() -> Iterator[Compile]:
    for capability in SHARED_BYTES:
        for path in ("tma", "pointers") if capability >= 90 else ("pointers",):
            for dtype in ITEMSIZE:
                for m in FEW_AND_MANY if dtype == "tf32" else TOKENS:
                    yield from compiles(m, dtype, capability, path)


def compiles(m: int, dtype: str, capability: int, path: Any) -> Iterator[Compile]:
    kind = ITEMSIZE[dtype], path, precision_of(tf32=dtype == "tf32")
    rest = dtype.replace("tf32", "fp32"), capability

    def each(module: str, config: Any, constants: dict[str, Any], aligned: bool) -> Compile:
        return Compile(module, tuple(constants.items()), config.warps, *rest, aligned)

    for block in BLOCKS:
        aligned = block[0] % 16 == 0
        if path == "tma" and (not aligned or block[0] & (block[0] - 1)):
            continue
        for bsr in bsr_triton.configurations(m, block, *kind):
            constants = bsr_triton.constants_of(bsr, *bsr_triton.packed_block(block, bsr))
            yield each("bsr_triton", bsr, constants, aligned)
        for dgrad in bsr_triton_dgrad.configurations(m, block, *kind):
            constants = bsr_triton_dgrad.constants_of(dgrad, block)
            yield each("bsr_triton_dgrad", dgrad, constants, aligned)
        if path == "pointers" or block[0] >= _triton.LEAST:
            for wgrad in wgrads(m, block, dtype, path):
                constants = bsr_triton_wgrad.constants_of(wgrad, block)
                yield each("bsr_triton_wgrad", wgrad, constants, aligned)


def wgrads(m: int, block: tuple[int, int], dtype: str, path: Any) -> list[Any]:
    sizes = m, block, STORED, ITEMSIZE[dtype], path, CORES, precision_of(tf32=dtype == "tf32")
    return bsr_triton_wgrad.configurations(*sizes)


def source_of(this: Compile) -> ASTSource:
    function, boxes = FUNCTIONS[this.module], BOXES[this.module]
    constants = dict(this.constants)
    signature, aligned = {}, []
    for name in function.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in boxes and constants["TMA"]:
            rows, columns = (constants[side] for side in boxes[name])
            signature[name] = f"tensordesc<{this.dtype}[{rows},{columns}]>"
        else:
            values = this.dtype if name in boxes or name == "out" else None
            pointer = "i32" if name in INDICES else values
            signature[name] = f"*{pointer}" if pointer else "i32"
            if pointer or (this.aligned and name != "token_tiles"):
                aligned.append(name)
    attributes = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    return ASTSource(function, signature, constants, attributes)


def assert_all_compile(those: list[Compile]) -> None:
    complaints = []
    for this in those:
        path = "tma" if dict(this.constants)["TMA"] else "pointers"
        how = options(this.warps, path)
        if complaint := complaint_about(source_of(this), this.capability, how):
            complaints.append(f"{complaint}: {this}")
    assert not complaints, "\n".join(complaints)


@pytest.fixture
def every(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Compile]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # compile, do not read a cache
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return [*dict.fromkeys(all_compiles())]


@pytest.mark.exhaustive
@pytest.mark.compiles
@pytest.mark.parametrize("capability", [*SHARED_BYTES])
@pytest.mark.parametrize("module", [*FUNCTIONS])
def test_every_configuration_compiles_without_a_spill(module, capability, every):
    key = module, capability
    assert_all_compile([c for c in every if (c.module, c.capability) == key])


@pytest.mark.compiles
@pytest.mark.parametrize("module", [*FUNCTIONS])
def test_a_configuration_of_each_path_and_dtype_compiles_for_hopper(module, every):
    sample = {
        (dict(c.constants)["TMA"], c.dtype): c
        for c in every
        if (c.module, c.capability) == (module, 90)
    }
    assert len(sample) == 4
    assert_all_compile([*sample.values()])


def test_no_problem_has_more_than_eight_configurations():
    for m in TOKENS:
        for path in ("tma", "pointers"):
            for dtype, itemsize in ITEMSIZE.items():
                kind = itemsize, path, precision_of(tf32=dtype == "tf32")
                for block in BLOCKS:
                    assert len(bsr_triton.configurations(m, block, *kind)) in range(1, 9)
                    assert len(bsr_triton_dgrad.configurations(m, block, *kind)) in range(1, 9)
                    assert len(wgrads(m, block, dtype, path)) in range(1, 9)
