"""bench/correctness.py: which outputs are right, and which errors are usual."""

import re
from dataclasses import replace

import declare
import inexact
import pytest
import torch

from sparsebench.formats.bsr import Bsr
from sparsebench.formats.csr import Csr
from sparsebench.harness.bench import contest
from sparsebench.harness.bench.correctness import (
    FP8,
    FP32,
    TF32,
    Expected,
    bias,
    check,
    half_ulp,
)
from sparsebench.harness.catalog import declaration_of
from sparsebench.harness.inputs.bits import fill
from sparsebench.harness.ops.linear import definition, spread
from sparsebench.harness.plan.suite import expand
from sparsebench.kernels._kernel import DTYPES, OUTPUTS, Kernel, Launch, Lossy
from sparsebench.results.record import Contender, Problem, Row, Status
from sparsebench.results.tables.frame import frame
from tests.tools.devices import CPU
from tests.tools.tolerances import Product

M, N, K = 48, 40, 512
FLOATING = [name for name, dtype in DTYPES.items() if dtype.is_floating_point]  # test_int8.py


def expected(name: str, empty_row: bool = False) -> tuple[Expected, torch.Tensor]:
    draw, dtype = torch.Generator().manual_seed(5), DTYPES[name]
    w = (torch.randn(N, K, generator=draw) / K**0.5).to(dtype)
    if empty_row:
        w[3] = 0
    x = torch.randn(M, K, generator=draw).to(dtype)
    right = right_of(w, x, TF32 if name == "tf32" else 0.0, FP8 if name == "fp8" else FP32)
    return replace(right, dtype=OUTPUTS[name]), definition(w, x)


def right_of(
    w: torch.Tensor, x: torch.Tensor, products: float = 0.0, sums: float = FP32
) -> Expected:
    exact = w.double(), x.double()
    return Expected(definition(*exact), spread(*exact), w.dtype, w.shape[1], products, sums)


@pytest.mark.parametrize("name", FLOATING)
def test_torch_itself_is_right_in_every_dtype_and_scaled_outputs_are_wrong(name: str) -> None:
    right, out = expected(name)
    assert all(check(out * factor, right).reason for factor in (1.02, 0.0, -1.0))
    verdict = check(out, right)
    assert verdict.reason is None
    assert verdict.error_of_bound is not None
    assert verdict.error_of_bound <= 1


@pytest.mark.parametrize("name", FLOATING)
def test_one_wrong_element_of_two_thousand_is_wrong(name: str) -> None:
    right, out = expected(name)
    out[7, 11] += 0.5
    reason = check(out, right).reason
    assert reason
    assert "[7, 11]" in reason or "relative error" in reason


def rounded(operand: torch.Tensor) -> torch.Tensor:
    """To 10 bits of mantissa, the nearest, as cvt.rna.tf32.f32 does."""
    return cut((operand.view(torch.int32) + 0x1000).view(torch.float32))


def cut(operand: torch.Tensor) -> torch.Tensor:
    """Without what tensor cores do not read of an fp32 operand in TF32."""
    return (operand.view(torch.int32) & ~0x1FFF).view(torch.float32)


def test_tf32_allows_ten_bits_of_mantissa_and_no_fewer() -> None:
    draw = torch.Generator().manual_seed(5)
    w, x = (torch.randn(rows, K, generator=draw) for rows in (N, M))
    right = right_of(w, x, TF32)
    for form in (rounded, cut):
        assert check(definition(form(w), form(x)), right).reason is None
    assert check(definition(w.bfloat16().float(), x.bfloat16().float()), right).reason


def summed_as_on_hopper(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """X @ W.T of 32 products at a time, cut off 13 bits below the largest of them and the sum."""
    total = torch.zeros(len(x), len(w), 1, dtype=torch.float64)
    for w_part, x_part in zip(w.double().split(32, 1), x.double().split(32, 1), strict=True):
        terms = torch.cat([total, x_part[:, None] * w_part], dim=2)
        total = below(terms, terms.abs().amax(2, keepdim=True)).sum(2, keepdim=True)
        total = below(total, total)
    return total.squeeze(2).bfloat16()


def below(terms: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Cut off what is less than 2^-13 of the power of two at the head of the largest."""
    last = torch.ldexp(torch.ones_like(largest), largest.frexp().exponent - 14)
    return (terms / last).trunc() * last


def fp8(k: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.empty(8, k, dtype=torch.float8_e4m3fn), torch.empty(4, k, dtype=DTYPES["fp8"])
    for name, tensor in zip("wx", drawn, strict=True):
        fill(tensor, 0, name)
    return drawn


@pytest.mark.parametrize("k", [512, 4096, 25600])
def test_fp8_allows_sums_of_thirteen_bits(k: int) -> None:
    w, x = fp8(k)
    right = replace(right_of(w, x, sums=FP8), dtype=torch.bfloat16)
    verdict = check(summed_as_on_hopper(w, x), right)
    assert verdict.reason is None
    assert verdict.error_of_bound is not None
    assert verdict.error_of_bound < 0.8
    shorter = w.float().to(torch.float8_e5m2).float()
    assert check(definition(shorter, x.float()).bfloat16(), right).reason


@pytest.mark.parametrize(("depth", "right"), [(12800, True), (64, False)])
def test_a_long_sum_may_be_truncated_before_it_is_rounded(depth: int, right: bool) -> None:
    """An output of cuBLAS on an H200, with 12,800 terms: their sum lost 8.8e-5 and was rounded."""
    exact, out = torch.ones(16, 16, dtype=torch.float64), torch.ones(16, 16, dtype=torch.bfloat16)
    exact[3, 5], out[3, 5] = 2.03915, 2.03125
    answer = Expected(exact, torch.full_like(exact, 0.7), torch.bfloat16, depth)
    reason = check(out, answer).reason
    assert (reason is None) is right, reason


def test_an_empty_row_must_be_exactly_zero() -> None:
    right, out = expected("fp16", empty_row=True)
    assert check(out, right).reason is None
    out[0, 3] = 1e-7
    assert check(out, right).reason


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda out: None, "expected a tensor, found NoneType"),
        (lambda out: out[1:], "expected shape"),
        (lambda out: out.float(), "expected torch.float16, found torch.float32"),
        (lambda out: out.T.contiguous().T, "expected a contiguous output"),
        (lambda out: out.index_fill(0, torch.tensor([0]), float("nan")), "that are not"),
        (lambda out: out.index_fill(0, torch.tensor([0]), float("inf")), "that are not"),
        (torch.zeros_like, "all zero"),
    ],
)
def test_a_wrong_output_has_a_reason(spoil, reason: str) -> None:
    right, out = expected("fp16")
    assert reason in str(check(spoil(out), right).reason)


@pytest.mark.parametrize("pattern", [Csr, Bsr])
def test_a_packed_output_is_compared_where_the_pattern_stores_elements(pattern: type) -> None:
    right, out = expected("fp16")
    w = pattern.from_dense(out.where(out > 0.5, 0))  # blocks of 32 stick out of 48 x 40
    verdict = check(w.sample(out), right, w)
    assert verdict.reason is None
    assert check(w.sample(out * 1.02), right, w).reason
    assert check(w.sample(out.neg()), right, w).reason
    empty = pattern.from_dense(torch.zeros_like(out))
    assert check(empty.sample(out), right, empty).reason is None
    if pattern is Bsr:  # padding outside the matrix must be exactly zero
        gradient = Bsr.from_dense(out, block=32).sample(out)
        gradient.values[-1, -1, -1] = 1e-7
        assert "[3, 31, 31]" in str(check(gradient, right, Bsr.from_dense(out, block=32)).reason)


def test_a_packed_output_of_another_kind_is_wrong() -> None:
    right, out = expected("fp16")
    w = Bsr.from_dense(out, block=16)
    packed = w.sample(out)
    for other, reason in [
        (out, r"expected Bsr \[48, 40\], packed like the weight, found Tensor \[48, 40\]"),
        (Csr.from_dense(out), r"found Csr \[48, 40\]"),
        (replace(packed, shape=(48, 48)), r"found Bsr \[48, 48\]"),
        (replace(packed, columns=packed.columns.long()), "expected the columns of"),
        (replace(packed, offsets=packed.offsets + 1), "expected the offsets of"),
        (Bsr.from_dense(out, block=48), "expected the offsets of"),
        (replace(packed, values=packed.values.float()), "expected torch.float16"),
        (replace(packed, values=packed.values[1:]), "expected shape"),
    ]:
        assert re.search(reason, str(check(other, right, w).reason))
    assert "expected a tensor, found Bsr [48, 40]" in str(check(packed, right).reason)


FIELDS = {"m": 64, "n": 96, "k": 2048, "pattern": "unstructured", "sparsity": 0.9, "block": 1}
NAMES = declare.names(inexact)


def rows(dtype: str, *contenders: Contender, **fields: object) -> list[Row]:
    problem = Problem("linear", {**FIELDS, "dtype": dtype, **fields})
    return contest.run(problem, list(contenders), CPU, None)[0]


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "tf32", "fp8"])
def test_every_inexact_kernel_is_wrong_or_marked(dtype: str) -> None:
    right = Contender("csr", "scipy_csr") if dtype == "fp32" else Contender("dense", "torch_dense")
    result = rows(dtype, right, *(Contender("dense", name) for name in NAMES))
    marks = frame(result).marks
    assert result[0].status is Status.OK
    assert marks[0] == ""
    for row, mark in zip(result[1:], marks[1:], strict=True):
        exact = dtype == "fp8" and row.case.contender.kernel == "inexact:five_bits"  # e4m3 has 3
        accepted = row.status is Status.OK and mark == ""
        assert accepted == exact, f"{row.case.contender.label}: {row.error} of {row.usual_error}"


def test_a_larger_error_is_wrong_unless_the_suite_allows_it() -> None:
    rounded = Contender("dense", "inexact:scaled")
    (wrong,) = rows("bf16", rounded)
    assert wrong.status is Status.WRONG
    assert "a suite can allow it" in wrong.detail
    (right,) = rows("bf16", replace(rounded, error={"at_most": 0.01, "why": "a test"}))
    assert right.status is Status.OK
    assert right.samples_us
    assert "larger error allowed" in frame([right]).marks[0]
    (still,) = rows("bf16", replace(rounded, error={"at_most": 0.005, "why": "a test"}))
    assert still.status is Status.WRONG
    assert wrong.case.id == right.case.id  # an allowed error does not change the id of a case
    eight_bits = Contender("dense", "inexact:int8_weights", error={"at_most": 0.02, "why": "8"})
    assert rows("fp32", eight_bits)[0].status is Status.OK
    (contest_,) = expand(
        "s.yaml", SUITE.format(error="{at_most: 0.01, why: 8 bits}"), None
    ).contests
    assert contest_.contenders[0].error == {"at_most": 0.01, "why": "8 bits"}


def test_an_output_in_16_bits_is_as_near_as_one_rounding() -> None:
    """In bf16, 0.02 % of the elements may be zero, and a row scaled by 0.5 %, at most."""
    product = Product("bf16", 256)
    assert product.accepts(product.right)
    assert not product.accepts(product.without_smallest(product.right, 2e-4))
    assert not product.accepts(product.scaled(0.005, slice(7, 8), slice(None)))
    assert not product.accepts(product.off(0.01))


def test_half_an_ulp_is_that_of_the_binade() -> None:
    sizes = torch.tensor([0.0, 1.0, 1.99, 2.0, 3.5, 1e-7], dtype=torch.float64)
    assert half_ulp(sizes, torch.float16).tolist() == [
        *(2.0**-25, 2.0**-11, 2.0**-11, 2.0**-10, 2.0**-10, 2.0**-25)
    ]
    assert half_ulp(sizes, torch.int8).eq(0.5).all()


LOSSY = Kernel("linear", "dense", "cpu", lambda _: Launch(int), lossy=Lossy({"bf16": 0.1}, "t"))
KEPT = {"at_most": 0.008, "why": "cuSPARSE keeps some sums in 16 bits"}


def test_only_a_kernel_of_this_repository_may_declare_that_it_is_lossy() -> None:
    assert declaration_of("kernels", "cusparse_csr").error("bf16") == KEPT
    assert declaration_of("kernels", "cusparse_csr").error("fp32") is None
    assert declaration_of("kernels", "scipy_csr").error("bf16") is None
    assert declaration_of("kernels", f"{__name__}:LOSSY").error("bf16") is None


@pytest.mark.parametrize(
    ("stated", "error"),
    [("", KEPT), (", error: {at_most: 0.01, why: t}", {"at_most": 0.01, "why": "t"})],
)
def test_a_suite_overrides_what_a_lossy_kernel_declares(stated: str, error: object) -> None:
    dense = "dense, kernel: torch_dense, error: {error}"
    text = SUITE.replace(dense, "csr, kernel: cusparse_csr{0}")
    (planned,) = expand("s.yaml", text.format(stated), None).contests
    assert planned.contenders[0].error == error


def test_a_small_bias_is_marked_where_the_error_is_not() -> None:
    draw = torch.Generator().manual_seed(3)
    reference = torch.randn(256, 512, generator=draw, dtype=torch.float64)
    errors = reference.bfloat16().double() - reference
    assert abs(bias(errors, reference)) < 1e-5
    assert bias(errors + 1e-3 * reference, reference) == pytest.approx(1e-3, rel=0.1)
    assert bias(errors + 1e-3, reference) == pytest.approx(1e-3, rel=0.1)
    assert bias(errors[:4] + reference[:4], reference[:4]) == 0  # 4 tokens tell none


def test_chance_is_no_bias() -> None:
    """6 standard errors: none in 2,000 outputs of 16 x 32 whose errors share a cause by row."""
    draw = torch.Generator().manual_seed(4)
    reference = torch.randn(2000, 16, 32, generator=draw, dtype=torch.float64)
    shared = 1e-3 * torch.randn(2000, 16, 1, generator=draw, dtype=torch.float64)
    result = [bias(s * r, r) for s, r in zip(shared, reference, strict=True)]
    assert sum(b != 0 for b in result) <= 2


SUITE = """schema: sparsebench/suite@1
title: t
problems: [{{op: linear, m: 8, n: 16, k: 16, dtype: bf16}}]
contenders: [{{format: dense, kernel: torch_dense, error: {error}}}]
"""
