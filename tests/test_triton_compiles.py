"""Every configuration of the Triton kernels compiles ahead of time, without a GPU or a spill."""

import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any, NamedTuple

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparsebench.kernels import bsr_triton, dense_triton
from sparsebench.kernels._triton import options

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # an SM's, for one program
TOKENS = (1, 17, 64, 256, 4096)
BLOCKS = ((1, 1), (10, 10), (16, 16), (32, 32), (64, 64), (128, 128), (256, 256), (200, 200))
ITEMSIZE = {"bf16": 2, "fp32": 4}  # fp16 takes the same registers and tiles as bf16
INDICES = {"columns", "offsets", "order"}


class Compile(NamedTuple):
    """One call of the compiler."""

    module: str
    constants: tuple[tuple[str, int], ...]
    warps: int
    dtype: str
    capability: int
    aligned: bool  # sizes are multiples of 16, and Triton knows


def all_compiles() -> Iterator[Compile]:
    for capability in SHARED_BYTES:
        for path in ("tma", "pointers") if capability >= 90 else ("pointers",):
            for dtype in ITEMSIZE:
                for m in TOKENS:
                    yield from compiles(m, dtype, capability, path)


def compiles(m: int, dtype: str, capability: int, path: Any) -> Iterator[Compile]:
    for dense in dense_triton.configurations(m, ITEMSIZE[dtype], path):
        constants = tuple(dense_triton.constants_of(dense).items())
        for aligned in {True, path == "tma"}:
            yield Compile("dense_triton", constants, dense.warps, dtype, capability, aligned)
    for block in BLOCKS:
        aligned = block[0] % 16 == 0
        if path == "tma" and (not aligned or block[0] & (block[0] - 1)):
            continue
        for bsr in bsr_triton.configurations(m, block, ITEMSIZE[dtype], path):
            constants = tuple(
                bsr_triton.constants_of(bsr, *bsr_triton.packed_block(block, bsr)).items()
            )
            yield Compile("bsr_triton", constants, bsr.warps, dtype, capability, aligned)


def source_of(this: Compile) -> ASTSource:
    function = {"bsr_triton": bsr_triton, "dense_triton": dense_triton}[this.module]._multiply
    constants = dict(this.constants)
    rows = {"x": "TOKENS", "w": "FEATURES", "y": "TOKENS"}
    columns = {"x": "DEPTH", "w": "DEPTH", "y": "FEATURES"}
    signature, aligned = {}, []
    for name in function.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in rows and constants["TMA"]:
            box = f"[{constants[rows[name]]},{constants[columns[name]]}]"
            signature[name] = f"tensordesc<{this.dtype}{box}>"
        else:
            pointer = "i32" if name in INDICES else this.dtype if name in rows else None
            signature[name] = f"*{pointer}" if pointer else "i32"
            if pointer or (this.aligned and name != "token_tiles"):
                aligned.append(name)
    attributes = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    return ASTSource(function, signature, constants, attributes)


def complaint_about(this: Compile) -> str | None:
    """Compile, and say what is wrong with the result."""
    target = GPUTarget("cuda", this.capability, 32)
    path = "tma" if dict(this.constants)["TMA"] else "pointers"
    compiled = triton.compile(source_of(this), target, options(this.warps, path))
    if compiled.metadata.shared > SHARED_BYTES[this.capability]:
        return f"{compiled.metadata.shared} bytes of shared memory: {this}"
    with TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        command = [str(BIN / "cuobjdump"), "--dump-resource-usage", str(binary)]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    spilled = re.search(r"STACK:(\d+) .*LOCAL:(\d+)", usage)
    assert spilled, usage
    return f"{usage.split('REG')[1][:40]}: {this}" if any(map(int, spilled.groups())) else None


@pytest.fixture
def parses_take_turns(monkeypatch):
    """CPython 3.11's parser shares a recursion counter between threads (cpython issue 106905)."""
    parse, turn = triton.JITFunction.parse, Lock()

    def parse_alone(function):
        with turn:
            return parse(function)

    monkeypatch.setattr(triton.JITFunction, "parse", parse_alone)


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("parses_take_turns")
def test_every_configuration_compiles_without_a_spill(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # a compile, not a memory of one
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    todo = list(dict.fromkeys(all_compiles()))
    with ThreadPoolExecutor(2) as pool:
        complaints = [text for text in pool.map(complaint_about, todo) if text]
    assert not complaints, "\n".join(complaints)


def test_no_problem_has_more_than_eight_configurations():
    for m in TOKENS:
        for path in ("tma", "pointers"):
            for itemsize in ITEMSIZE.values():
                assert len(dense_triton.configurations(m, itemsize, path)) in range(1, 9)
                for block in BLOCKS:
                    found = bsr_triton.configurations(m, block, itemsize, path)
                    assert len(found) in range(1, 9)
