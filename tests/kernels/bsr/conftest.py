"""Plans without a GPU: what a plan would load on a Hopper is listed."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsebench.kernels._common import cuda


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let plans on a CPU be those of a Hopper; return the list of (name, macros, target)."""
    properties = SimpleNamespace(
        shared_memory_per_block_optin=227 * 1024, multi_processor_count=132
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for place, module in [*sys.modules.items()]:
        if place.startswith("sparsebench.kernels.bsr.") and hasattr(module, "multiprocessors"):
            monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    listed: list[Any] = []

    def load(name, function, constants, shared_bytes, device, target=cuda.SM_90A) -> Any:
        assert shared_bytes <= 227 * 1024
        listed.append((name, constants, target))
        return SimpleNamespace(ptr=1), "code"

    monkeypatch.setattr(cuda, "load", load)
    monkeypatch.setattr(cuda, "target_of", lambda device: "sm_90")
    return listed
