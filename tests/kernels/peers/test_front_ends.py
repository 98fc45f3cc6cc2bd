"""Every peer has a time wherever its library's public Python front end gives an answer.

`ANSWERS` lists for each peer the calls that were tried on an H200 (torch 2.11, cuSPARSELt 0.8.0,
cuSPARSE 12.6, STK 0.7.1), and what each front end refuses. Without a GPU the test asks
`unsupported` alone; on a GPU it measures, and skips what is not installed.
"""

import pytest
import torch

from sparsebench.harness.bench.prepare import unsupported
from sparsebench.harness.catalog import load_kernel, names
from tests.kernels.peers.front_ends import Answers, assert_timed, cases, tokens

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


HALVES, FLOATS = ("fp16", "bf16"), ("fp16", "bf16", "fp32")
DEFAULT_ALONE = {"options": {"search": False}}
LINEAR, MM = "torch.nn.functional.linear(x, w)", "cusparseSpMM through nvmath"
IN_4_BITS = {"weight_bits": 4}

ANSWERS: dict[str, list[Answers]] = {
    # Sides of 16, in 8 bits of 32; torch pads tokens in 16 bits, and its users do so in 8.
    "cusparselt": [
        Answers(f"{LINEAR}, semi-structured", HALVES, tokens(256, 512), **DEFAULT_ALONE),
        Answers(f"{LINEAR}, semi-structured", HALVES, tokens(48, 80, 50), **DEFAULT_ALONE),
        Answers("torch._scaled_mm(w, x.t())", ("fp8",), tokens(96, 96), **DEFAULT_ALONE),
    ],
    # Multiples of 16 bytes of what is kept of a row, and of Y's rows.
    "cutlass_sparse": [
        Answers("GemmUniversalAdapter", HALVES, tokens(72, 80, 3, 50)),
        Answers("GemmUniversalAdapter", ("fp8",), tokens(72, 96, 3)),
    ],
    # Square blocks of any size that divide W, and any number of tokens.
    "torch_bsr": [
        Answers(f"{LINEAR}, BSR", ("bf16", "fp32"), tokens(320, 320, 5, 37, 64), block)
        for block in (8, 10, 32, 64)
    ]
    + [Answers("bsr_dense_addmm", ("bf16",), tokens(256, 512, 37, 64), 32, {"tuned": True})],
    "torch_bsr_dgrad": [Answers(f"{LINEAR}, BSR", ("bf16",), tokens(320, 320, 37), 10)],
    # Blocks of powers of two from 16 on; torch.sparse.sampled_addmm itself refuses BSR.
    "torch_sampled_bsr": [
        Answers("torch.sparse._triton_ops.sampled_addmm", FLOATS, tokens(512, 512, 5, 37), 32)
    ],
    # STK asserts multiples of 128, for dW of 32; MegaBlocks, its user, pads. fp32 becomes TF32.
    "stk": [Answers("stk.ops.dds", (*HALVES, "tf32"), tokens(256, 384, 3, 100, 128), 128)],
    "stk_dgrad": [Answers("stk.ops.dds", HALVES, tokens(256, 384, 100), 128)],
    "stk_wgrad": [Answers("stk.ops.sdd", (*HALVES, "tf32"), tokens(256, 384, 32, 100), 128)],
    "cusparse_csr": [Answers(MM, FLOATS, tokens(96, 200, 1, 37))],
    "cusparse_csr_dgrad": [Answers(MM, FLOATS, tokens(96, 200, 37))],
    # NOT_SUPPORTED for CSR in bf16.
    "cusparse_csr_wgrad": [Answers("cusparseSDDMM", ("fp16", "fp32"), tokens(96, 200, 37))],
    # Square blocks; the library multiplies fp32 Blocked-ELL in TF32.
    "cusparse_bsr": [Answers(MM, FLOATS, tokens(96, 200, 1, 37), block) for block in (5, 32)],
    "cusparse_bsr_wgrad": [Answers("cusparseSDDMM", FLOATS, tokens(96, 200, 37), 32)],
    "cusparse_bell": [Answers(MM, (*HALVES, "tf32"), tokens(96, 200, 1, 37), 32)],
    "cusparse_bell_dgrad": [Answers(MM, HALVES, tokens(96, 200, 37), 32)],
    # cuBLASLt refuses n and k that are no multiples of 16 in fp8.
    "cublas": [
        Answers("torch.mm", (*FLOATS, "tf32"), tokens(40, 72, 1, 37)),
        Answers("torch._scaled_mm", ("fp8",), tokens(48, 64, 3)),
    ],
    "cublas_masked": [Answers("torch.mm", HALVES, tokens(96, 200, 37), 32)],
    "torch_compile": [Answers("torch.compile", ("bf16",), tokens(40, 72, 37))],
    # Weights in 4 bits; n in multiples of 8.
    "torch_int4": [
        Answers("aten._weight_int4pack_mm", ("bf16",), tokens(264, 384, 1, 37), fields=IN_4_BITS)
    ],
    # scipy.sparse refuses fp16 and has no bf16.
    "scipy_csr": [Answers("csr_array @ x", ("fp32", "tf32"), tokens(13, 11, 1, 7))],
    "scipy_csr_dgrad": [Answers("csr_array @ x", ("fp32",), tokens(13, 11, 7))],
    "scipy_bsr": [Answers("bsr_array @ x", ("fp32", "tf32"), tokens(13, 11, 1, 7), 3)],
    "scipy_bsr_dgrad": [Answers("bsr_array @ x", ("fp32",), tokens(13, 11, 7), 3)],
    "torch_dense": [Answers("torch.nn.functional.linear", FLOATS, tokens(13, 11, 7))],
}
WITHOUT_A_FRONT_END = {
    *(
        "cusparselt_dense",
        "cusparselt_hybrid",
        "decoder_dense",
        "ffn_dense_triton",
        "reference",
    ),
    *("torch_decoded", "torch_twell"),
}
"""Programs of this repository: no other front end answers for them."""

ELSEWHERE = "attention", "attention_backward", "experts", "experts_ffn", "experts_decoder"
"""Their peers are tested in tests/kernels/attention, beside this file or in other folders."""

CASES = [
    pytest.param(name, answers, id=f"{name}-{'-'.join(answers.dtypes)}-{answers.block}")
    for name, every in ANSWERS.items()
    for answers in every
]
OF_THE_CPU = [case for case in CASES if load_kernel(str(case.values[0])).device == "cpu"]


def test_every_peer_has_a_front_end_in_the_table() -> None:
    kernels = {name: load_kernel(name) for name in names("kernels")}
    peers = {
        name
        for name, kernel in kernels.items()
        if {"peers", "dense"} & set(kernel.prepare.__module__.split("."))
        and kernel.op not in ELSEWHERE
    }
    assert peers == {*ANSWERS, *WITHOUT_A_FRONT_END}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("name", "answers"), CASES)
def test_no_peer_refuses_what_its_front_end_answers(name, answers, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = CPU if load_kernel(name).device == "cpu" else CUDA
    for problem, contender in cases(name, answers):
        assert unsupported(problem, contender, device) is None, problem


@pytest.mark.parametrize(("name", "answers"), OF_THE_CPU)
def test_a_peer_of_the_cpu_has_a_time_where_its_front_end_answers(name, answers) -> None:
    assert_timed(name, answers, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "answers"), CASES)
def test_a_peer_has_a_time_where_its_front_end_answers(name: str, answers: Answers) -> None:
    assert_timed(name, answers, CPU if load_kernel(name).device == "cpu" else CUDA)
