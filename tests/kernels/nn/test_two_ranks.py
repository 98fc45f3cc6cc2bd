"""Layers on two processes: DDP, FSDP2, checkpoints; on_two_ranks.py has what each test does."""

import on_two_ranks
import pytest
import torch.distributed


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return on_two_ranks.run()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.parametrize("name", [name for name, _ in on_two_ranks.checks()])
def test_on_two_ranks(name, found):
    assert not found[name], found[name]
