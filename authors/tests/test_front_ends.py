"""Every kernel has a time wherever its authors' front end gives an answer.

The calls were tried on an H200 (torch 2.11). Without a GPU the test asks `unsupported` alone; on a
GPU it measures, and skips what is not built.
"""

import pytest
import torch

from sparsebench.harness.bench.prepare import unsupported
from tests.kernels.peers.front_ends import Answers, assert_timed, cases, tokens

CUDA = torch.device("cuda:0")
FEW_UNITS = {"activation": "relu", "active": 29}
IN_4_BITS = {"weight_bits": 4}
TWO_FOUR_IN_4_BITS = {**IN_4_BITS, "pattern": "two_four", "sparsity": 0.5}
EXPERTS = {"experts": 4, "top_k": 2}
HALVES = "fp16", "bf16"
ANSWERS = {
    # No Python front end: a C function of the checkout, for n and k in multiples of 64.
    "spinfer": [Answers("SpMM_SplitK_API_bitmap_v3", ("fp16",), tokens(128, 256))],
    "macko": [Answers("macko_spmv.multiply", ("fp16",), tokens(40, 200, 1))],
    # n in multiples of 256.
    "marlin": [Answers("marlin.mul", ("fp16",), tokens(256, 384, 1, 37, 130), fields=IN_4_BITS)],
    "sparse_marlin": [
        Answers(
            "marlin.mul_2_4", ("fp16",), tokens(256, 384, 1, 37, 130), fields=TWO_FOUR_IN_4_BITS
        )
    ],
    # Any sizes.
    "scattermoe": [
        Answers("scattermoe.mlp.GLUMLP", HALVES, tokens(96, 40, 3, 50), fields=EXPERTS),
    ],
    # k 2048, n 5632 and 8192; their kernels take multiples of 256 tokens.
    "twell_authors": [
        Answers("twell.TwELLGatedMLP", ("bf16",), tokens(5632, 2048, 50, 256), fields=FEW_UNITS)
    ],
    "twell_authors_mlp": [
        Answers("twell.TwELLMLP", ("bf16",), tokens(8192, 2048, 50, 256), fields=FEW_UNITS)
    ],
    "twell_authors_step": [
        Answers("ff_forward_gated", ("bf16",), tokens(5632, 2048, 50, 256), fields=FEW_UNITS)
    ],
}
CASES = [
    pytest.param(f"sparsebench_authors.{name}", answers, id=name)
    for name, every in ANSWERS.items()
    for answers in every
]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("name", "answers"), CASES)
def test_no_kernel_refuses_what_its_front_end_answers(name: str, answers: Answers) -> None:
    for problem, contender in cases(name, answers):
        assert unsupported(problem, contender, CUDA) is None, problem


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # TwELL's kernels refuse a capture
@pytest.mark.parametrize(("name", "answers"), CASES)
def test_a_kernel_has_a_time_where_its_front_end_answers(name: str, answers: Answers) -> None:
    assert_timed(name, answers, CUDA)
