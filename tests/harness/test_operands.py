"""Operands: bits drawn from a seed on any device, digests, and weights and patterns of files."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from sparsebench.errors import SuiteError, Unsupported
from sparsebench.harness.bench import contest
from sparsebench.harness.bench.operands import DenseOperands, operands, redraw
from sparsebench.harness.bench.tampering import COLUMNS, checksum
from sparsebench.harness.catalog import load_op
from sparsebench.harness.inputs import bits, sources
from sparsebench.harness.inputs.bits import UNIT, digest, fill, scores
from sparsebench.results.record import Contender, Problem, Source, Status, Value
from tests.tools.devices import CPU

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def hash32(index: int, key: str) -> int:
    """Wellons' lowbias32 with a keyed middle, in Python's integers: the specification."""
    words = hashlib.sha256(f"{key}/{index >> 32}".encode()).digest()
    x = (index % 2**32) ^ int.from_bytes(words[:4], "little")
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32 ^ int.from_bytes(words[4:8], "little")
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def integer(h: int) -> int:
    factor = h * 0x9E3779B1 % 2**32 >> 20 | 0x1001
    return (2 * sum(h.to_bytes(4)) - 1019) * factor


def drawn(*shape: int, dtype: torch.dtype = torch.float32, name: str = "w", **how: Any) -> Tensor:
    out = torch.empty(shape, dtype=dtype)
    fill(out, 0, name, **how)
    return out


def problem(source: Source | None = None, seed: int = 0, **fields: Value) -> Problem:
    base = {"m": 8, "n": 64, "k": 128, "dtype": "bf16", "pattern": "dense"}
    return Problem("linear", {**base, "sparsity": 0.0, "block": 1, **fields}, seed, source)


def largest_allocation(call: Callable[[], object]) -> int:
    """Return the most bytes that torch allocates at once, copies inside its kernels included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    return max(int(event.cpu_memory_usage) for event in record.events())


def built(spec: Problem, data: Path | None = None) -> DenseOperands:
    return operands(spec, load_op("linear"), CPU, data)


def test_elements_are_integers_made_of_a_hash() -> None:
    expected = [integer(hash32(i, "0/w/3")) for i in range(1000)]
    assert drawn(1000, draw=3, scale=1.0).tolist() == expected


def test_scores_are_31_bits_of_a_hash() -> None:
    expected = [hash32(i, "7/w scores") % 2**31 for i in range(1000)]
    assert scores(7, "w", 1000, CPU).tolist() == expected


def test_the_bits_of_published_operands_never_change() -> None:
    assert drawn(6, scale=1.0).tolist() == [2783955, 857515, 4264095, -1358973, -1906591, -971677]
    spec = problem(pattern="blocks", sparsity=0.75, block=16)
    assert built(spec).digest == built(spec).digest == "c4fa922529546ccb"
    assert built(problem()).digest != built(problem(seed=1)).digest


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_size_of_a_chunk_changes_no_bit(monkeypatch, dtype) -> None:
    whole = drawn(1001, dtype=dtype)
    ordered, summed = scores(0, "w", 1001, CPU), digest({"w": whole})
    monkeypatch.setitem(bits.CHUNK, "cpu", 64)
    assert torch.equal(drawn(1001, dtype=dtype), whole)
    assert torch.equal(scores(0, "w", 1001, CPU), ordered)
    assert digest({"w": whole}) == summed


@pytest.mark.gpu
def test_a_checksum_of_two_pieces_is_that_of_a_cpu_and_copies_one() -> None:
    out = torch.empty((1 << 28) + 6, dtype=torch.bfloat16, device="cuda")
    fill(out, 0, "w")
    checksum(out, 0)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    total = int(checksum(out, 0))
    assert torch.cuda.max_memory_allocated() - before < 1.1 * 8 * bits.CHUNK["cuda"]
    assert int(checksum(out.cpu(), 0)) == total


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
def test_a_draw_and_its_sums_allocate_one_chunk_at_a_time(monkeypatch, dtype) -> None:
    monkeypatch.setitem(bits.CHUNK, "cpu", COLUMNS)
    out = torch.empty(100, COLUMNS, dtype=dtype)
    for step in (lambda: fill(out, 0, "w"), lambda: digest({"w": out}), lambda: checksum(out, 0)):
        assert 4 * COLUMNS <= largest_allocation(step) <= 8 * COLUMNS


WIDTHS = [(dtype, width) for dtype in DTYPES for width in (1, 128, 65536)]


@pytest.mark.parametrize(("dtype", "width"), [*WIDTHS, (torch.float8_e4m3fn, None)])
def test_values_are_never_zero_and_rounded_once(dtype: torch.dtype, width: int | None) -> None:
    scale = {"scale": UNIT * 2.0 ** -round(width.bit_length() / 2)} if width else {}
    exact, result = drawn(100_000, **scale), drawn(100_000, dtype=dtype, **scale)
    assert (result.float() != 0).all()
    assert torch.equal(result.float(), exact.to(dtype).float())


def test_values_are_bell_shaped_about_zero() -> None:
    x = drawn(1_000_000)
    assert abs(float(x.mean())) < 0.01
    assert abs(float(x.std()) - 0.882) < 0.005
    assert abs(float(((x / x.std()) ** 4).mean()) - 3.07) < 0.03  # 3 for a normal distribution


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**63), st.sampled_from(["w", "x"]), st.integers(0, 3))
def test_other_seeds_names_and_draws_are_uncorrelated(seed: int, name: str, draw: int) -> None:
    if (seed, name, draw) == (0, "w", 0):
        return
    one, other = drawn(40_000), torch.empty(40_000)
    fill(other, seed, name, draw)
    assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.03  # 6 sd
    assert not torch.equal(one.sort().values, other.sort().values)  # not a permutation either


def test_outputs_are_about_one() -> None:
    result = built(problem(m=64, n=64, k=65536, dtype="fp16"))
    y = result.activations["x"].float() @ result.weights["w"].float().T
    assert 0.5 < float(y.std()) < 2.5


def test_activations_are_drawn_again_in_place() -> None:
    spec, result = problem(), built(problem())
    x, first = result.activations["x"], result.activations["x"].clone()
    redraw(spec, load_op("linear"), result.activations, 1)
    assert result.activations["x"] is x
    assert (x != first).float().mean() > 0.9
    redraw(spec, load_op("linear"), result.activations, 0)
    assert torch.equal(x, first)


def test_pruned_elements_are_counted_and_are_plus_zero() -> None:
    result = built(problem(pattern="blocks", sparsity=0.75, block=16))
    w = result.weights["w"]
    assert result.nnz["w"] == 64 * 128 // 4
    assert result.sparsity == 0.75
    assert int((w.view(torch.int16) != 0).sum()) == result.nnz["w"]


def test_a_digest_sees_every_bit_its_place_and_its_name() -> None:
    w = drawn(16, 16, dtype=torch.bfloat16)
    swapped, flipped = w.clone(), w.clone()
    swapped[0, 0], swapped[0, 1] = w[0, 1], w[0, 0]
    flipped.view(torch.int16)[3, 5] ^= 1
    others = [{"w": swapped}, {"w": flipped}, {"v": w}, {"w": w.view(8, 32)}]
    assert digest({"w": w}) not in {digest(other) for other in others}


@pytest.fixture
def weights(tmp_path: Path) -> Source:
    path = tmp_path / "model.safetensors"
    real = drawn(64, 128, dtype=torch.bfloat16, name="real")
    save_file({"layer": real, "hot": torch.full((64, 128), 1e6)}, path)
    return Source(path.name, sources.sha256(path), "layer")


def test_real_weights_keep_their_largest_elements(weights: Source, tmp_path: Path) -> None:
    before = sources.sha256(tmp_path / weights.path)
    spec = problem(weights, pattern="unstructured", sparsity=0.9, dtype="fp16")
    result = built(spec, tmp_path).weights["w"]
    real = drawn(64, 128, dtype=torch.bfloat16, name="real").half()
    assert int((result != 0).sum()) == 819
    assert torch.equal(result[result != 0], real[result != 0])
    assert real[result == 0].abs().max() <= result[result != 0].abs().min()
    assert sources.sha256(tmp_path / weights.path) == before


def test_minus_zero_in_a_file_is_not_stored(tmp_path: Path) -> None:
    path = tmp_path / "masked.safetensors"
    mask = (torch.rand(4, 8) < 0.5).repeat_interleave(16, 0).repeat_interleave(16, 1)
    save_file({"layer": drawn(64, 128, dtype=torch.bfloat16, name="real") * mask}, path)
    source = Source(path.name, sources.sha256(path), "layer")
    result = built(problem(source, pattern="dense", sparsity=0.0), tmp_path)
    assert result.nnz["w"] == int(mask.sum())
    assert result.sparsity == 1 - int(mask.sum()) / mask.numel()


def in_file(folder: Path, weight: Tensor) -> Source:
    path = folder / "w.safetensors"
    save_file({"fc": weight}, path)
    return Source(path.name, sources.sha256(path), "fc")


BAD_VALUES = {
    "infinite in fp16": torch.full((64, 128), 1e5),
    "infinite": torch.full((64, 128), float("inf")),
    "not a number": torch.full((64, 128), float("nan")),
    "all zero": torch.zeros(64, 128),
    "all -0.0": torch.full((64, 128), -0.0),
    "zero in fp16": torch.full((64, 128), 1e-30),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_values_of_a_file_that_cannot_be_measured_are_a_row(name, tmp_path):
    spec = problem(in_file(tmp_path, BAD_VALUES[name]), dtype="fp16")
    with pytest.raises(Unsupported, match=r"^w\.safetensors:fc") as raised:
        built(spec, tmp_path)
    rows, _ = contest.run(spec, [Contender("dense", "torch_dense")], CPU, tmp_path)
    assert [(row.status, row.detail) for row in rows] == [
        (Status.UNSUPPORTED, f"operands: {raised.value}")
    ]


def test_a_weight_of_one_row_is_measured_at_the_level_of_its_zeros(tmp_path: Path) -> None:
    weight = torch.zeros(1, 128)
    weight[0, ::10] = 1.0
    fields = {"n": 1, "pattern": "unstructured", "sparsity": 0.5, "dtype": "fp32"}
    spec = problem(in_file(tmp_path, weight), **fields)
    contenders = [Contender("dense", "torch_dense"), Contender("csr", "scipy_csr")]
    rows, _ = contest.run(spec, contenders, CPU, tmp_path)
    assert [(row.status, row.detail) for row in rows] == [(Status.OK, "")] * 2
    assert {row.sparsity for row in rows} == {1 - 13 / 128}


SIZES = [("fp32", 1e-30), ("fp32", 1e-37), ("fp32", 1e36), ("bf16", 1e36)]


@pytest.mark.parametrize(("dtype", "size"), SIZES)
def test_right_results_stay_right_however_small_or_large_the_weights(dtype, size, tmp_path) -> None:
    spec = problem(in_file(tmp_path, torch.randn(64, 128) * size), dtype=dtype)
    rows, _ = contest.run(spec, [Contender("dense", "torch_dense")], CPU, tmp_path)
    assert [(row.status, row.detail) for row in rows] == [(Status.OK, "")]


def test_an_answer_that_no_output_can_hold_is_unsupported(tmp_path: Path) -> None:
    spec = problem(in_file(tmp_path, torch.full((64, 128), 6e4)), dtype="fp16")
    (row,), _ = contest.run(spec, [Contender("dense", "torch_dense")], CPU, tmp_path)
    assert row.status is Status.UNSUPPORTED
    assert "fits torch.float16" in row.detail


def test_a_block_with_a_tiny_value_is_chosen_before_one_of_zeros(tmp_path: Path) -> None:
    weight = torch.zeros(32, 32)
    weight[0, 0], weight[17, 17] = 1.0, 1e-30
    spec = problem(in_file(tmp_path, weight), n=32, k=32, dtype="fp32")
    fields = {"pattern": "blocks", "block": 16, "sparsity": 0.5}
    result = built(replace(spec, fields={**spec.fields, **fields}), tmp_path)
    assert result.nnz["w"] == 2


@pytest.mark.parametrize(
    ("change", "changed_fields", "message"),
    [
        ({}, {"dtype": "fp8"}, "16 or 32 bits for weights from a file, found fp8"),
        ({}, {"dtype": "int8"}, "16 or 32 bits for weights from a file, found int8"),
        ({"sha256": "0"}, {}, "expected SHA-256 0, .*it has changed"),
        ({}, {"n": 32}, r"expected \[32, 128\], found \[64, 128\]"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(weights, tmp_path, change, changed_fields, message):
    spec = problem(replace(weights, **change), **changed_fields)
    with pytest.raises(SuiteError, match=message):
        built(spec, tmp_path)
    (row,), _ = contest.run(spec, [Contender("dense", "torch_dense")], CPU, tmp_path)
    assert row.status is Status.FAILED


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_a_pattern_file_gives_the_pattern_and_the_seed_the_values(dtype, tmp_path) -> None:
    path = tmp_path / "p.smtx"
    path.write_text("2, 4, 3\n0 2 3\n0 3 1\n")
    source = Source(path.name, sources.sha256(path))
    result = built(problem(source, n=2, k=4, pattern="file", sparsity=0.625, dtype=dtype), tmp_path)
    assert (result.weights["w"].float() != 0).tolist() == [[1, 0, 0, 1], [0, 1, 0, 0]]
    assert result.sparsity == 0.625
    with pytest.raises(SuiteError, match="expected 'file'"):
        built(problem(source, n=2, k=4, pattern="blocks"), tmp_path)
    with pytest.raises(SuiteError, match="found 'file' with no source"):
        built(problem(pattern="file"))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "pattern"), [("fp8", "two_four"), ("int8", "six_eight")])
def test_operands_of_8_bits_have_the_same_bits_on_a_gpu(dtype: str, pattern: str) -> None:
    level = {"two_four": 0.5, "six_eight": 0.25}[pattern]
    spec = problem(n=256, k=512, dtype=dtype, pattern=pattern, sparsity=level)
    there = operands(spec, load_op("linear"), torch.device("cuda:0"), None)
    assert there.digest == built(spec).digest
