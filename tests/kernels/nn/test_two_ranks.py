"""Layers on two processes: DDP, FSDP2 and checkpoints (checks in two_ranks.py).

All checks are one test, so that the processes start only once.
"""

import pytest
import torch.distributed

from tests.kernels.nn import two_ranks


@pytest.mark.exhaustive
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_every_check_passes_on_two_ranks():
    assert len(two_ranks.CHECKS) >= 10
    two_ranks.run()
