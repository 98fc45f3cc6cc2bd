"""What the tests of the Triton kernels share: to compile one without a GPU, and to judge it."""

import ast
import re
import subprocess
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas_version
from triton.compiler import ASTSource
from triton.language import constexpr
from triton.runtime.jit import JITCallable
from triton.tools.tensor_descriptor import TensorDescriptor

from sparsebench.kernels._common.source_code import bare_python
from sparsebench.kernels._common.triton import BoundKernel, Template
from tests.compiling.record import in_record

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # an SM's, for one program
ELEMENTS = {
    torch.bool: "i1",
    **{torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"},
    **{torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.uint8: "u8"},
}


def source_of(program: BoundKernel) -> tuple[ASTSource, dict[str, Any]]:
    """Return what Triton compiles for a launch, and its options.

    None and integers of 1 are constants; Triton may assume that pointers, and integers that are
    multiples of 16, are aligned.
    """
    params, values = program.kernel.params, dict(program.constants)
    names = [param.name for param in params]
    options = {name: values.pop(name) for name in (*values,) if name not in names}
    signature, aligned = {}, {}
    for place, value in enumerate(program.args):
        whole = isinstance(value, int) and not params[place].do_not_specialize
        if value is None or (whole and value == 1):
            kind = "constexpr"
            values[names[place]] = value
        elif isinstance(value, TensorDescriptor):
            kind = f"tensordesc<{ELEMENTS[value.base.dtype]}{value.block_shape}>"
        elif isinstance(value, Tensor):
            kind = f"*{ELEMENTS[value.dtype]}"
        else:
            kind = "i32" if isinstance(value, int) else "fp32"
        if isinstance(value, Tensor) or (whole and value != 1 and value % 16 == 0):
            aligned[(place,)] = [["tt.divisibility", 16]]
        signature[names[place]] = kind
    signature |= dict.fromkeys(values, "constexpr")
    return ASTSource(program.kernel, signature, values, aligned), options


def complaint_about_launch(program: BoundKernel, capability: int) -> str | None:
    """Compile a launch for a capability, and say what is wrong with it, or None."""
    source, options = source_of(program)
    return complaint_about(source, capability, options)


def programs_of_templates(patch: pytest.MonkeyPatch) -> list[BoundKernel]:
    """Return a list that gets what templates would compile from now on."""
    programs: list[BoundKernel] = []
    patch.setattr(Template, "__init__", lambda self, bound, *_: programs.extend(bound))
    return programs


def assert_all_compile(programs: Iterable[BoundKernel], capability: int) -> None:
    """Compile launches, and those that each has before it."""
    for program in programs:
        for launch in filter(None, (program.before, program)):
            complaint = complaint_about_launch(launch, capability)
            assert complaint is None, (launch.kernel.__name__, launch.constants, complaint)


def complaint_about(source: ASTSource, capability: int, options: Mapping[str, Any]) -> str | None:
    """Compile, unless the record knows the result, and say what is wrong with it, or None."""
    limit = SHARED_BYTES[capability]
    function = source.fn
    family = function.__module__.split(".")[2]
    launch = source.signature, source.constants, source.attrs, options
    if in_record(
        *(f"{family}/{function.__name__}", "triton", f"sm_{capability}", triton.__version__),
        *(*map(get_ptxas_version, (80, 100)), code_of(function), limit),
        *(sorted((str(name), str(value)) for name, value in part.items()) for part in launch),
    ):
        return None
    compiled = triton.compile(source, GPUTarget("cuda", capability, 32), dict(options))
    if compiled.metadata.shared > limit:
        return f"expected at most {limit} bytes of shared memory, found {compiled.metadata.shared}"
    with TemporaryDirectory() as scratch:
        binary = Path(scratch) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        command = [str(BIN / "cuobjdump"), "--dump-resource-usage", str(binary)]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    spilled = re.search(r"STACK:(\d+) .*LOCAL:(\d+)", usage)
    assert spilled, usage
    clean = not any(map(int, spilled.groups()))
    return None if clean else f"expected no spill, found REG{usage.split('REG')[1][:40]}"


@cache
def code_of(function: JITCallable) -> str:
    """Return the code of a kernel and of what it calls, and the constants of their modules."""
    code = dedent("".join(function.raw_src))
    parts = {}
    for name, value in sorted(names_in(code, function.__globals__).items()):
        if isinstance(value, JITCallable) and not value.__module__.startswith("triton."):
            parts[name] = code_of(value)
        elif isinstance(value, (bool, int, float, str, constexpr)):
            parts[name] = str(value)
    return f"{bare_python(code)} {parts}"


def names_in(code: str, scope: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a module's names, and of MODULE.name, that code reads."""
    values = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name) and node.id in scope:
            values[node.id] = scope[node.id]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = scope.get(node.value.id)
            if isinstance(module, ModuleType) and hasattr(module, node.attr):
                values[f"{node.value.id}.{node.attr}"] = getattr(module, node.attr)
    return values
