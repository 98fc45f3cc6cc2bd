"""The ops of attention: their definitions, their work, and contests with masks."""

import re
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.formats.block_mask import BlockMask
from sparsebench.harness.bench import contest
from sparsebench.harness.bench.contest_state import ContestOptions
from sparsebench.harness.bench.correctness import Expected
from sparsebench.harness.bench.operands import DenseOperands, Layers, operands, redraw
from sparsebench.harness.catalog import load_op
from sparsebench.harness.inputs.bits import digest
from sparsebench.harness.ops import _block_attention
from sparsebench.harness.ops._op import with_fields
from sparsebench.harness.plan.suite import expand
from sparsebench.harness.run.history import History
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.results.record import Case, Contender, Problem, Row, Status
from sparsebench.results.tables.frame import frame
from tests.tools.devices import CPU

FIELDS: dict[str, Any] = {
    "m": 40, "context": 56, "batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 16,
    "block": [8, 8], "dtype": "fp32", "pattern": "top_k_blocks", "sparsity": 0.3,
}  # fmt: skip
CASES: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "context": 24},  # the first 16 queries see nothing
    {"lists": "one", "kv_heads": 1, "scale": 0.3},
    {"lists": "kv_heads", "kv_heads": 4, "m": 1, "causal": True},
    {"pattern": "dense", "sparsity": 0.0, "context": None, "block": 64, "causal": True},
    {"sparsity": 0.7, "m": 45, "context": 61, "causal": True},
    {"context": 53, "block": [8, 24], "causal": True},  # the last key seen is within a block
]


@pytest.fixture(params=[(0.0, 512), (0.0, 8), (1.0, 8), (1.0, 24)], ids=str)
def rows_of_a_part(request, monkeypatch) -> None:
    """Expand few queries at a time, with all keys, or as if the mask were sparse with some."""
    for name, value in zip(("SPARSE", "ROWS"), request.param, strict=True):
        monkeypatch.setattr(_block_attention, name, value)


def problem(op: str = "attention", **fields: Any) -> Problem:
    loaded = load_op(op)
    return Problem(op, {**loaded.defaults, **FIELDS, **fields}, defaults=loaded.defaults)


def by_head(x: Tensor, problem: Problem, heads: int) -> Tensor:
    """Return [batch, heads, tokens, head_dim], with KV heads repeated for their groups."""
    split = x.view(problem["batch"], -1, heads, problem["head_dim"]).transpose(1, 2)
    return split.repeat_interleave(problem["heads"] // heads, 1)


def plain(q: Tensor, k: Tensor, v: Tensor, p: Problem, allowed: Tensor) -> Tensor:
    """Return O by torch, with 0 where a query sees nothing."""
    q, k, v = (by_head(x, p, p["heads" if x is q else "kv_heads"]) for x in (q, k, v))
    scale = p["scale"] or p["head_dim"] ** -0.5
    scores = (q @ k.mT * scale).masked_fill(~allowed, -1e300)
    weights = scores.softmax(-1) * allowed.any(-1, True)
    o: Tensor = weights @ v
    return o.transpose(1, 2).reshape(p["batch"] * p["m"], -1)


@pytest.mark.parametrize("fields", CASES, ids=str)
@pytest.mark.usefixtures("rows_of_a_part")
def test_the_definition_is_attention_over_the_allowed_elements(fields: dict[str, Any]) -> None:
    p, op = problem(**fields), load_op("attention")
    drawn = operands(p, op, CPU, None)
    mask = BlockMask.from_dense(drawn.weights["mask"], **op.format_params(p.fields))
    allowed = mask.expand(p["heads"])
    q, k, v = (drawn.activations[name].double() for name in "qkv")
    o = with_fields(op.definition, p)(drawn.weights["mask"].double(), q, k, v)
    assert torch.allclose(o, plain(q, k, v, p, allowed), atol=1e-12)
    assert drawn.nnz["mask"] == int(allowed.sum())
    groups = allowed.unflatten(1, (p["kv_heads"], -1))
    assert drawn.nnz["keys"] == int(groups.any(2).any(2).sum())
    assert op.flops(p, drawn.nnz) == 4 * p["head_dim"] * int(allowed.sum())


@pytest.mark.parametrize("fields", CASES, ids=str)
@pytest.mark.usefixtures("rows_of_a_part")
def test_the_gradients_are_those_of_autograd(fields: dict[str, Any]) -> None:
    p, op = problem("attention_backward", **fields), load_op("attention_backward")
    drawn = operands(p, op, CPU, None)
    mask = BlockMask.from_dense(drawn.weights["mask"], **op.format_params(p.fields))
    every = {name: x.double() for name, x in drawn.activations.items()}
    q, k, v = (every[name].clone().requires_grad_() for name in "qkv")
    o = plain(q, k, v, p, mask.expand(p["heads"]))
    assert torch.allclose(every["o"], o.detach(), atol=1e-5)
    gradients = torch.autograd.grad(o, (q, k, v), every["do"])
    result = with_fields(op.definition, p)(drawn.weights["mask"].double(), **every)
    right = torch.cat([g.reshape(-1, p["head_dim"]) for g in gradients])
    assert torch.allclose(result, right, atol=1e-4)
    assert sum(op.parts(p)) == len(result)
    empty = every["lse"] == -torch.inf
    assert torch.equal(empty, ~mask.expand(p["heads"]).any(-1).view(empty.shape))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("m", [45, 48])
def test_a_head_of_few_queries_is_one_part(m: int, causal: bool) -> None:
    p = problem(m=m, block=[16, 8], causal=causal)
    mask = torch.ones(2 * 4 * 3, 7)
    assert [part.row[1] for part in _block_attention.parts(mask, p.fields)] == [slice(0, m)] * 8


def test_work_is_counted_by_elements_and_dense_work_without_the_mask() -> None:
    p, op = problem(causal=True), load_op("attention")
    cells = torch.ones(2 * 4 * 5, 7)
    assert op.nonzeros(p, {"mask": cells}) == op.elements(p)
    seen = sum(min(q + 1 + 16, 56) for q in range(40))
    assert op.elements(p) == {"mask": 8 * seen, "keys": 2 * 2 * 56}
    backward = problem("attention_backward", causal=True)
    whole = op.elements(p)
    assert load_op("attention_backward").flops(backward, whole) == 2.5 * op.flops(p, whole)


def outputs(p: Problem, inputs: DenseOperands) -> list[Tensor]:
    """Return the definition and the spread of all operands, with those that follow from others."""
    op, every = load_op(p.op), {**inputs.weights, **inputs.activations}
    op.derive(p, inputs.weights, every)
    return [with_fields(function, p)(**every) for function in (op.definition, op.spread)]


@pytest.mark.parametrize("unselected", ["absent", "future"])
@pytest.mark.parametrize("operand", ["k", "v"])
@pytest.mark.parametrize("name", ["attention", "attention_backward"])
def test_a_key_that_no_query_selects_reaches_no_output(name, operand, unselected) -> None:
    """The block 2 of keys is absent, or present only for queries that are before it."""
    fields = {"lists": "kv_heads", "batch": 1, "context": 40, "causal": True}
    p, op = problem(name, **fields, pattern="dense", sparsity=0.0), load_op(name)
    drawn = operands(p, op, CPU, None)
    rows = slice(2 if unselected == "future" else 0, None)
    drawn.weights["mask"].view(2, 5, 5)[1, rows, 2] = 0  # of the KV head 1

    clean = outputs(p, drawn)
    drawn.activations[operand][16:24, 16:] = float("nan")
    assert all(map(torch.equal, outputs(p, drawn), clean))


@pytest.mark.parametrize("operand", ["k", "v"])
@pytest.mark.parametrize("name", ["attention", "attention_backward"])
def test_a_key_behind_all_queries_that_select_its_block_reaches_no_output(name, operand) -> None:
    """The queries 0 to 7 of KV head 1 alone select its block of keys 0 to 23."""
    fields = {"lists": "kv_heads", "batch": 1, "context": 40, "causal": True, "block": [8, 24]}
    p, op = problem(name, **fields, pattern="dense", sparsity=0.0), load_op(name)
    drawn = operands(p, op, CPU, None)
    drawn.weights["mask"].view(2, 5, 2)[1, 1:, 0] = 0
    seen = _block_attention.selected_keys(drawn.weights["mask"], p.fields)[0]
    assert seen[:, 0].all()
    assert (~seen[:, 1]).nonzero().flatten().tolist() == [*range(8, 24)]

    clean = outputs(p, drawn)
    drawn.activations[operand][8:24, 16:] = float("nan")
    assert all(map(torch.equal, outputs(p, drawn), clean))


def test_derived_operands_follow_each_draw_and_leave_the_digest() -> None:
    p, op = problem("attention_backward", causal=True), load_op("attention_backward")
    drawn = operands(p, op, CPU, None)
    first = {name: x.clone() for name, x in drawn.activations.items()}
    assert drawn.digest == digest({**drawn.weights, **{n: first[n] for n in ("q", "k", "v", "do")}})
    redraw(p, op, drawn.activations, 7, weights=drawn.weights)
    assert not torch.equal(drawn.activations["o"], first["o"])
    redraw(p, op, drawn.activations, 0, weights=drawn.weights)
    assert all(torch.equal(drawn.activations[name], x) for name, x in first.items())


def run(p: Problem, *contenders: Contender) -> list[Row]:
    rows, _ = contest.run(p, list(contenders), CPU, None)
    return rows


DENSE = Contender("dense", "torch_dense", baseline=True)
MASKED = Contender("block_mask", "sdpa_masked")
REFERENCE = Contender("block_mask", "reference")


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_contest_judges_dense_attention_without_the_mask(dtype: str) -> None:
    p = problem(dtype=dtype, causal=True, context=48)
    dense, masked, reference = run(p, DENSE, MASKED, REFERENCE)
    assert [row.status for row in (dense, masked, reference)] == [Status.OK] * 3
    assert masked.sparsity == pytest.approx(0.3, abs=0.1)
    assert masked.flops is not None
    assert masked.dense_flops is not None
    assert masked.flops < masked.dense_flops
    assert masked.stored_bytes is not None
    assert masked.stored_bytes < 4 * 8 * (5 * 7 + 5)


def test_a_backward_contest_judges_three_gradients() -> None:
    dense, sparse = run(problem("attention_backward", causal=True, dtype="bf16"), DENSE, REFERENCE)
    assert (dense.status, sparse.status) == (Status.OK, Status.OK)


MANY_HEADS = {"heads": 32, "kv_heads": 16, "head_dim": 8, "m": 24, "context": 40, "dtype": "bf16"}
SPOILED = {"halves one head": (1, 0), "halves all heads, later": (32, 5)}  # heads; after calls


def _wrong(operands: Operands, *, fault: str) -> Launch:
    cells, fields = operands.weights["mask"].to_dense(), dict(operands.problem.fields)
    if fault == "computes all blocks":
        cells.fill_(1)
    elif fault == "skips one block":
        cells[tuple(cells.nonzero()[7])] = 0
    elif fault == "computes partial blocks in full":
        fields["causal"] = False
    elif fault == "scales by 0.2":
        fields["scale"] = 0.2  # and not 16 ** -0.5
    heads, after = SPOILED.get(fault, (0, 0))
    calls = count()

    def run() -> Tensor:
        out = operands.definition(cells, **operands.activations, fields=fields)
        if next(calls) >= after:
            out.view(len(out), fields["heads"], -1)[:, :heads].mul_(0.5)
        return out

    return Launch(run)


WRONG = Kernel("attention", "block_mask", "cpu", _wrong)
FAULTS = (
    "computes all blocks",
    "skips one block",
    "computes partial blocks in full",
    "scales by 0.2",
)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_contender_that_computes_another_attention_is_wrong(fault: str) -> None:
    wrong = Contender("block_mask", f"{__name__}:WRONG", options={"fault": fault})
    _, row = run(problem(causal=True, dtype="bf16"), DENSE, wrong)
    assert row.status is Status.WRONG


@pytest.mark.parametrize("heads", [{}, {"heads": 8, "kv_heads": 4, "block": [1, 8]}], ids=str)
@pytest.mark.parametrize("lists", ["heads", "kv_heads", "one"])
@pytest.mark.parametrize("op", ["attention", "attention_backward"])
def test_a_sample_has_the_answer_of_its_part(op: str, lists: str, heads, monkeypatch) -> None:
    p, loaded = problem(op, **MANY_HEADS | heads, lists=lists, causal=True), load_op(op)
    drawn = operands(p, loaded, CPU, None)
    every = {**drawn.weights, **drawn.activations}
    assert loaded.sample(p, every, 0) is None  # the whole answer is cheap
    monkeypatch.setattr(_block_attention, "CHEAP", 0)
    parts = set[str]()
    for seed in range(3):
        sample = loaded.sample(p, every, seed)
        assert sample
        parts.add(sample.text)
        for function in (loaded.definition, loaded.spread):
            whole = with_fields(function, p)(**{n: x.double() for n, x in every.items()})
            part = with_fields(function, sample.problem)(
                **{name: x.double() for name, x in sample.operands.items()}
            )
            assert whole.shape == sample.shape
            torch.testing.assert_close(sample.part(whole), part)
        assert sum(loaded.parts(sample.problem)) == len(part)
    assert len(parts) > 1


@pytest.mark.parametrize(
    ("fault", "checked"),
    [
        ("halves one head", False),  # no earlier process has seen this configuration
        ("halves all heads, later", True),
    ],
)
def test_a_later_process_compares_some_heads_of_what_was_right(fault, checked, monkeypatch) -> None:
    monkeypatch.setattr(_block_attention, "CHEAP", 0)
    p = problem(**MANY_HEADS)
    wrong = Contender("block_mask", f"{__name__}:WRONG", options={"fault": fault})
    right = ["[{}, null]"]
    options = ContestOptions(
        replicate=1, checked={Case(p, c).id: right for c in (wrong, MASKED) if checked}
    )
    rows, _ = contest.run(p, [DENSE, MASKED, wrong], CPU, None, options)
    assert [row.status for row in rows[:2]] == [Status.OK] * 2
    assert rows[0].samples_us
    assert rows[2].status is Status.WRONG


def test_a_mask_that_is_too_large_to_expand_is_unsupported() -> None:
    p = problem(m=2**15, context=None, heads=32, dtype="bf16", sparsity=0.9)
    row = run(p, replace(MASKED, baseline=True))[0]
    assert row.status is Status.UNSUPPORTED


def test_a_mask_can_come_from_a_file(tmp_path: Path) -> None:
    """A row of blocks may be empty there."""
    (tmp_path / "mask.smtx").write_text("4, 4, 4\n0 1 3 3 4\n0 0 1 2\n")
    text = """
schema: sparsebench/suite@1
title: t
problems:
  - op: attention
    source: {file: mask.smtx}
    pattern: file
    m: 60
    heads: 2
    kv_heads: 1
    head_dim: 8
    lists: one
    dtype: fp32
    block: 16
contenders: [{format: block_mask, kernel: sdpa_masked}]
baselines: [{format: dense, kernel: torch_dense}]
"""
    (planned,) = expand("t", text, tmp_path).contests
    assert planned.problem["sparsity"] == 0.75
    rows, _ = contest.run(planned.problem, list(planned.contenders), CPU, tmp_path)
    assert [row.status for row in rows] == [Status.OK, Status.OK]
    drawn = operands(planned.problem, load_op("attention"), CPU, tmp_path)
    assert drawn.weights["mask"].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0] * 4, [0, 0, 1, 0]]


def test_a_part_is_judged_and_named_if_the_whole_answer_takes_too_much_memory(monkeypatch):
    expected = contest.right_answers

    def crowded(layers: Layers, contender: Contender, seed: int | None) -> list[Expected]:
        if seed is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return expected(layers, contender, seed)

    monkeypatch.setattr(contest, "right_answers", crowded)
    monkeypatch.setattr(_block_attention, "CHEAP", 0)
    dense = Contender("dense", "torch_dense", baseline=True)
    (row,) = contest.run(problem(), [dense], CPU, None)[0]
    assert row.status is Status.OK
    assert re.fullmatch(r"KV heads \d", row.judged_part)
    assert frame([row]).marks[0] == "check of a part"
    history = History()
    history.remember([row])
    assert not history.checked, "a later process compares the whole output, if it can"
