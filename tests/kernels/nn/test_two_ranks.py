"""Layers on two processes: DDP, FSDP2, checkpoints; two_ranks.py has the checks.

One test, because the processes start once.
"""

import pytest
import torch.distributed

from tests.kernels.nn import two_ranks


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_every_check_passes_on_two_ranks():
    found = two_ranks.run()
    assert len(found) > 10
    failed = [f"{name}:\n{said}" for name, said in found.items() if said]
    assert not failed, "\n".join(failed)
