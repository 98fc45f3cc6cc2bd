"""CUTLASS's 2:4 product: what it refuses, and the macros of its tiles."""

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


@pytest.mark.parametrize(("version", "reason"), [("4.2.0.0", None), ("3.2.0.0", "found 3.2.0")])
def test_another_version_of_the_headers_is_refused(version, reason, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(requirements, "find_spec", lambda name: True)
    monkeypatch.setattr(cutlass_sparse.metadata, "version", lambda name: version)
    refusal = cutlass_sparse.unsupported(problem(), CUDA)
    assert refusal is None if reason is None else reason in str(refusal)


def test_a_tile_has_as_many_bytes_of_k_in_every_dtype() -> None:
    for config in CONFIGS:
        depth = {dtype: config.defines(dtype)[5] for dtype in ("bf16", "fp8")}
        assert depth == {"bf16": "-DTILE_K=128", "fp8": "-DTILE_K=256"}
