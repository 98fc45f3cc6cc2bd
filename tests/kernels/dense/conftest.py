"""Let the tests of dense layers run on a CPU."""

from contextlib import nullcontext

import pytest
import torch

from sparsebench.kernels.dense import _gemm


@pytest.fixture(autouse=True)
def _no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():  # a build of torch without cuBLASLt refuses its name
        monkeypatch.setattr(_gemm, "preferred", lambda library: nullcontext())
