"""No kernel has host functions, which NVRTC refuses and nvcc, the compiler of tests, accepts."""

import re
from pathlib import Path

import pytest

from sparsebench.kernels._common import cuda

KERNELS = cuda.HEADERS.parent
SOURCES = [p for p in sorted(KERNELS.rglob("*.cu*")) if p.parent.name != "peers"]  # built by nvcc
HOSTS = re.compile(r"^(?:static |inline )*constexpr [\w ]+ \w+\(.*", re.M)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_a_constexpr_function_is_a_function_of_the_device(source: Path) -> None:
    assert HOSTS.findall(source.read_text()) == []  # __device__ constexpr int f() is none
