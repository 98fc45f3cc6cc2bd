"""What the tests of many kernels check in the same way: refusals, and the replay of a launch."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from sparsebench.errors import Unsupported
from sparsebench.kernels._common import requirements
from sparsebench.kernels._kernel import Kernel, Launch, Operands, Output
from sparsebench.results.record import Problem


def refusal(call: Callable[[], object]) -> str:
    """Return the message of the Unsupported that a call raises."""
    with pytest.raises(Unsupported) as raised:
        call()
    return str(raised.value)


def assert_device_refusal(
    kernel: Kernel,
    device: str,
    capability: tuple[int, int],
    fields: dict[str, object],
    tokens: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check which reason a kernel has against a device and a problem; no tokens if none."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(requirements, "find_spec", lambda name: name)
    reason = kernel.unsupported(Problem("linear", fields), torch.device(device))
    assert (reason is None) == (not tokens)
    assert all(token in str(reason) for token in tokens)


def captured(
    prepare: Callable[[Operands], Launch], operands: Operands
) -> tuple[Launch, Output, torch.cuda.CUDAGraph]:
    """Return a launch, its output, and a graph of it; a pinned launch must make the same choice."""
    launch = prepare(operands)
    again = prepare(replace(operands, pinned=launch.choice))
    assert (again.choice, again.code) == (launch.choice, launch.code)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = launch()
    return launch, output, graph
