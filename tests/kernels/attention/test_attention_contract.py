"""The contract of every kernel of attention and of its gradients, against fp64.

The kernels are those of the package that sparsebench finds by their files, in the configurations
that they offer. Without a GPU, Triton's interpreter runs what it can, in fp16 and fp32.
test_NAME.py has the tests that only one kernel needs.
"""

import math

import pytest
import torch
from torch import Tensor

from sparsebench.formats.block_mask import BlockMask
from tests.kernels.attention.cases import (
    Case,
    choices_of,
    flat,
    gradients,
    kernels_of,
    launches,
    rising,
    without,
)
from tests.tools.marks import sampled

ALLOWED = {"bf16": 6e-3, "fp16": 4e-3, "fp32": 1e-5}  # norm of the difference over the norm
UNSEEN = 1  # block of keys that no query selects, with NaN
# Odd lengths, an empty row, one block, all blocks, heads that share lists and keys, decoding.
SMALL = [
    Case((60, 90), 32, (4, 2), batch=2, lists=4, causal=True, head_dim=32),
    Case((45, 70), (24, 40), (2, 1), lists=2, causal=True, head_dim=32, dtype="fp32"),
    Case((50, 100), 16, (4, 2), lists=2, bits=True, head_dim=32),
    Case((50, 70), 16, (2, 2), lists=2, head_dim=48, density=0, dtype="fp32"),
    Case((64, 64), 64, (2, 2), lists=2, head_dim=48),
    Case((40, 40), 16, (4, 1), causal=True, density=1, head_dim=32),
    Case((33, 33), 48, (1, 1), bits=True, head_dim=32, dtype="fp32"),
    Case((1, 130), (1, 16), (8, 2), batch=3, lists=2, head_dim=32, dtype="fp32"),
    Case((1, 130), (16, 64), (8, 2), batch=3, lists=2, causal=True, head_dim=32),
    Case((3, 90), 16, (4, 1), batch=2, causal=True, head_dim=32, dtype="fp32"),
    Case((16, 50), 16, (2, 2), lists=2, bits=True, head_dim=32, dtype="fp32"),
]
LARGE = [
    Case((1000, 777), 128, (4, 4), lists=4, dtype="bf16"),
    Case((1000, 777), 64, (8, 2), batch=2, lists=8, causal=True, dtype="bf16"),
    Case((600, 1000), 64, (8, 1), batch=2, head_dim=64),
    Case((1000, 777), (64, 128), (4, 4), batch=2, lists=4, bits=True),
    Case((333, 500), 16, (8, 2), lists=2, causal=True, dtype="bf16"),
    Case((333, 500), 32, (4, 2), lists=2),
    Case((500, 700), (256, 192), (2, 1), dtype="bf16"),
    Case((500, 700), (64, 8), (2, 2), lists=2, bits=True, head_dim=64, dtype="bf16"),
    Case((500, 700), (16, 64), (4, 1), bits=True, head_dim=64, dtype="bf16"),
    Case((150, 301), (24, 40), (4, 1), lists=4, head_dim=96, bits=True),
    Case((130, 200), 32, (2, 2), head_dim=64, dtype="fp32", causal=True),
    Case((1, 1000), (16, 64), (8, 2), batch=3, lists=2, causal=True, dtype="bf16"),
    Case((1, 1000), 16, (8, 2), batch=3, lists=2, causal=True, dtype="bf16"),
    Case((333, 500), 64, (4, 2), lists=2, dtype="bf16", density=0),
    Case((333, 500), 64, (4, 2), lists=2, dtype="bf16", density=1),
]
CASES = [
    *sampled(SMALL, 0, 1, 2, 8),
    *(pytest.param(case, marks=pytest.mark.gpu) for case in LARGE),
]


Problem = tuple[BlockMask, list[Tensor], Tensor, Tensor, tuple[Tensor, ...]]


def problem(case: Case) -> Problem:
    """Return a mask, q, k, v and dO, and O, the LSE and the gradients in fp64.

    Keys and values are NaN in a block that no query selects, where a mask can have one.
    """
    mask, operands = case.mask(), case.operands()
    if case.bits or case.density == 1 or mask.shape[1] == 1:
        return mask, operands, *gradients(operands, mask)
    mask = without(mask, UNSEEN)
    expected = gradients(operands, mask)
    for x in operands[1:3]:
        x[:, UNSEEN * mask.block[1] : (UNSEEN + 1) * mask.block[1]] = torch.nan
    return mask, operands, *expected


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm; infinite if it is not finite."""
    ratio = float((actual.double().view(expected.shape) - expected).norm() / expected.norm())
    return ratio if math.isfinite(ratio) else math.inf


@pytest.mark.interpreted(also_compiled=True)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", kernels_of("attention"))
def test_o_and_lse_are_right_and_the_same_twice(name: str, case: Case) -> None:
    mask, operands, o, lse, _ = problem(case)
    check(name, case, mask, operands, o, lse)


@pytest.mark.interpreted(also_compiled=True)
@pytest.mark.parametrize("case", [SMALL[0], *CASES[len(SMALL) :][:4]], ids=str)
@pytest.mark.parametrize("name", kernels_of("attention"))
def test_scores_that_rise_along_a_list_are_right(name: str, case: Case) -> None:
    mask, operands = case.mask(), rising(case.operands())
    o, lse, _ = gradients(operands, mask)
    check(name, case, mask, operands, o, lse)


def check(
    name: str, case: Case, mask: BlockMask, operands: list[Tensor], o: Tensor, lse: Tensor
) -> None:
    """Compare O and the LSE of each configuration, whatever the outputs held."""
    for bound in launches(name, case, mask, [flat(x) for x in operands[:3]]):
        results = []
        for _ in range(2):  # counters return to zero
            for x in bound.outputs:
                x.fill_(torch.nan)
            bound.program()
            results.append([x.clone().cpu() for x in bound.outputs])
        assert all(map(torch.equal, *results))
        assert error(results[0][0], flat(o)) < ALLOWED[case.dtype]
        log_sum = results[0][1].double().view(lse.shape)
        torch.testing.assert_close(log_sum, lse, atol=1e-4, rtol=1e-5)


@pytest.mark.interpreted(also_compiled=True)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", kernels_of("attention_backward"))
def test_gradients_are_right_and_the_same_twice(name: str, case: Case) -> None:
    mask, operands, o, lse, expected = problem(case)
    q, k, v, do = (flat(x) for x in operands)
    inputs = q, k, v, flat(o.to(q.dtype)), lse.flatten(0, 1).float(), do
    for bound in launches(name, case, mask, inputs):
        results = []
        for _ in range(2):
            bound.program.out.fill_(torch.nan)
            bound.program()
            results.append([x.clone().cpu() for x in bound.outputs])
        assert all(map(torch.equal, *results))
        for actual, gradient in zip(results[0], expected, strict=True):
            assert error(actual, gradient) < 2 * ALLOWED[case.dtype]


@pytest.mark.parametrize("block", [16, 32, 64, 128, (1, 64), (24, 40)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", kernels_of("attention") + kernels_of("attention_backward"))
def test_a_block_has_at_most_eight_configurations_or_is_refused(name, block, dtype) -> None:
    for head_dim in (64, 128, 256):
        case = Case((512, 512), block, (8, 8), head_dim=head_dim, dtype=dtype)
        configs = choices_of(name, case, case.mask())
        assert len(configs) <= 8
        assert len(set(configs)) == len(configs)
        assert configs or "wgmma" in name  # the others run any block
