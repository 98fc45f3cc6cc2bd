"""What the tests of many kernels check in the same way: refusals."""

from collections.abc import Callable

import pytest
import torch

from sparsebench.errors import Unsupported
from sparsebench.kernels._common import requirements
from sparsebench.kernels._kernel import Kernel
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
