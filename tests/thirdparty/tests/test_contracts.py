"""This package against the contracts of sparsebench: a test for each sentence."""

import pytest
import torch

from sparsebench import testing

PROBLEM = "m=8 n=64 k=64 pattern=main_diagonal sparsity=0.984375"
CHECKS = [
    *testing.format_checks("diagonal", [torch.eye(64), torch.diag(torch.arange(5.0))]),
    *testing.kernel_checks("diagonal_torch", PROBLEM),
    *testing.kernel_checks("diagonal_relu", PROBLEM),
    *testing.op_checks("linear_relu"),
    *testing.pattern_checks("main_diagonal", n=64, k=64, sparsity=0.984375),
    *testing.figure_checks("fastest"),
]


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_a_contract_is_kept(check: testing.Check) -> None:
    check()
