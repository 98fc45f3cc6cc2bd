"""What all tests of the repository share holds here, too: skips without a GPU, and a seed."""

from pathlib import Path

import pytest
import torch

from sparsebench import _discovery
from sparsebench.kernels._common import requirements
from sparsebench_authors import _builds

with pytest.MonkeyPatch.context() as patch:  # `tests` is a package of the checkout alone
    patch.syspath_prepend(Path(__file__).parents[2])
    from tests.conftest import no_waiting_for_disks, pytest_collection_modifyitems
    from tests.tools.fork_server import pytest_configure

__all__ = ["no_waiting_for_disks", "pytest_collection_modifyitems", "pytest_configure"]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let contests run these kernels here, where tests replace the authors' builds."""
    monkeypatch.setattr(_discovery, "OWN", _discovery.OF_THIS_REPOSITORY)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every checkout and library be there, on a Hopper GPU."""
    monkeypatch.setattr(requirements, "find_spec", lambda package: True)
    monkeypatch.setattr(_builds, "missing", lambda marker, repository: None)
    monkeypatch.setattr(_builds, "not_built", lambda *names: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
