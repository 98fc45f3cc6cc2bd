"""CUTLASS's 2:4 product: what it refuses, and the macros of its tiles."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sparsebench.kernels._common import requirements
from sparsebench.kernels.peers import cutlass_sparse
from sparsebench.kernels.peers.cutlass_sparse import CONFIGS
from sparsebench.results.record import Problem
from tests.kernels.layers import problem_of

CUDA = torch.device("cuda")


def problem(**fields: Any) -> Problem:
    sizes = {"m": 3, "n": 128, "k": 256, "dtype": "bf16", "pattern": "two_four", "sparsity": 0.5}
    return problem_of("linear", **{**sizes, **fields})


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "include/cutlass/version.h"
    file.parent.mkdir(parents=True)
    file.write_text("".join(f"#define CUTLASS_{n} {i}\n" for n, i in version_of(4).items()))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(requirements, "find_spec", lambda name: True)
    monkeypatch.setattr(cutlass_sparse, "headers", lambda: tmp_path)
    cutlass_sparse.version.cache_clear()
    return file


def version_of(major: int) -> dict[str, int]:
    return {"MAJOR": major, "MINOR": 2, "PATCH": 0}


def test_another_version_of_the_headers_is_refused(package: Path) -> None:
    assert cutlass_sparse.unsupported(problem(), CUDA) is None
    package.write_text("".join(f"#define CUTLASS_{n} {i}\n" for n, i in version_of(3).items()))
    cutlass_sparse.version.cache_clear()
    assert "found 3.2.0" in (cutlass_sparse.unsupported(problem(), CUDA) or "")


def test_a_tile_has_as_many_bytes_of_k_in_every_dtype() -> None:
    for config in CONFIGS:
        depth = {dtype: config.defines(dtype)[5] for dtype in ("bf16", "fp8")}
        assert depth == {"bf16": "-DTILE_K=128", "fp8": "-DTILE_K=256"}
