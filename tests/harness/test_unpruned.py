"""Dense contenders with unpruned weights: which contests have them, and what they multiply."""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from sparsebench.harness.bench import contest
from sparsebench.harness.bench import prepare as prepare_module
from sparsebench.harness.bench.operands import Layers, operands, unpruned
from sparsebench.harness.catalog import load_op
from sparsebench.harness.plan.selection import planned_contests
from sparsebench.harness.plan.suite import Suite, expand
from sparsebench.harness.plan.unpruned import BOUND, intensity, prunes_weights, with_unpruned
from sparsebench.harness.run.run_json import Flags
from sparsebench.results.record import Case, Contender, Problem, Row, Source, Status
from tests.tools.devices import CPU

SUITE = """
schema: sparsebench/suite@1
title: t
problems:
  - {op: [OP], m: [16, 4096], n: 4096, k: 4096, dtype: bf16, block: 64, pattern: PATTERN,
     sparsity: LEVEL}
contenders:
  - {format: bsr, params: {block: 64}}
  - {format: dense, kernel: torch_compile}
baselines:
  - {format: dense, kernel: cublas}
  - {format: dense, kernel: torch_dense}
"""


def suite(op: str = "linear", pattern: str = "blocks", level: str = "0.9") -> Suite:
    text = SUITE.replace("[OP]", op).replace("PATTERN", pattern).replace("LEVEL", level)
    return expand("s", text)


def labels(*about: str) -> list[list[str]]:
    contests = with_unpruned(suite(*about).contests)
    return [[c.label for c in contest.contenders] for contest in contests]


def problem(op: str = "linear", **fields: object) -> Problem:
    loaded = load_op(op)
    every = {"m": 8, "n": 32, "k": 64, "dtype": "fp32", "pattern": "blocks", "block": 8}
    every = {**loaded.defaults, **every, "sparsity": 0.5, **fields}
    return Problem(op, every, seed=3, defaults=loaded.defaults)


def test_a_product_bound_by_flops_has_each_dense_contender_twice() -> None:
    by_memory, by_flops = labels()
    assert not any("unpruned" in label for label in by_memory)
    assert by_flops == [
        "dense/cublas, unpruned weights",
        "dense/torch_dense, unpruned weights",
        "dense/cublas",
        "dense/torch_dense",
        "dense/torch_compile, unpruned weights",
        "bsr/default",
        "dense/torch_compile",
    ]


@pytest.mark.parametrize("op", ["linear_dgrad", "linear"])
def test_ops_that_multiply_a_pruned_weight_have_one(op: str) -> None:
    assert "dense/cublas, unpruned weights" in labels(op)[1]


def test_nothing_is_added_where_dense_multiplies_no_zeros() -> None:
    for each in (*labels("linear_wgrad"), *labels("linear", "dense", "0.0")):
        assert not any("unpruned" in label for label in each)


def test_attention_has_no_pruned_weight() -> None:
    fields = {"heads": 2, "kv_heads": 1, "head_dim": 16, "m": 64, "batch": 1}
    op = load_op("attention")
    every = {**op.defaults, **fields, "dtype": "bf16", "pattern": "blocks", "sparsity": 0.5}
    every |= {"block": 16}
    every = {n: v for n, v in every.items() if n in op.fields.model_fields}
    assert not prunes_weights(Problem("attention", every, defaults=op.defaults))


def test_intensity_is_that_of_the_dense_product() -> None:
    m, n, k = 512, 1024, 2048
    flops, moved = 2 * m * n * k, 2 * (m * n + m * k + n * k)
    sizes = {"m": m, "n": n, "k": k, "dtype": "bf16"}
    levels = [intensity(problem(**sizes, sparsity=level)) for level in (0.0, 0.5, 0.9)]
    assert levels == [pytest.approx(flops / moved)] * 3
    assert flops / moved > BOUND


def test_twins_and_selections_see_the_unpruned_contender() -> None:
    planned = planned_contests(suite(), "cuda:0", "m=4096 kernel=default")
    (contest,) = [each for each in planned if not each.reference]
    shown = [c.label for c in contest.contenders if not c.twin]
    assert shown[:2] == ["dense/cublas, unpruned weights", "dense/torch_dense, unpruned weights"]
    assert "dense/cublas, unpruned weights (twin)" in [c.label for c in contest.contenders]
    case = Case(contest.problem, contest.contenders[0]).id
    assert planned_contests(suite(), "cuda:0", f"case={case}")
    before = planned_contests(suite(), "cuda:0", unpruned=False)
    assert not any(c.is_unpruned for each in before for c in each.contenders)


def test_a_run_that_does_not_record_the_flag_is_measured_again_without() -> None:
    state = {"flags": {"device": "cpu", "replicates": 3, "only": ""}}
    assert not Flags.from_state(state).unpruned
    assert Flags("cpu").unpruned
    assert Flags.from_state({"flags": Flags("cpu").published}).unpruned


def test_only_unpruned_weights_enter_the_id() -> None:
    pruned = Contender("dense", "cublas")
    assert Case(problem(), pruned).id == "83700f65e7672980"
    assert Case(problem(), replace(pruned, weights="original")).id != "83700f65e7672980"
    stored = {"format": "dense", "kernel": "cublas"}
    assert Contender.from_json(stored) == pruned


@pytest.mark.parametrize("op", ["linear", "linear_dgrad", "ffn", "mlp"])
def test_originals_have_the_same_numbers_where_the_pattern_keeps_them(op: str) -> None:
    dense = operands(problem(op), load_op(op), CPU, None, originals=True)
    assert dense.originals.keys() == dense.weights.keys()
    for name, weight in dense.weights.items():
        pattern = weight != 0
        assert not pattern.all()
        assert (dense.originals[name] != 0).all()
        assert torch.equal(dense.originals[name][pattern], weight[pattern])


def test_originals_are_built_only_if_a_contender_multiplies_them() -> None:
    layers = Layers(problem(), load_op("linear"), CPU, None, count=2)
    assert not any(layer.dense.originals for layer in layers.each)
    layers = Layers(problem(), load_op("linear"), CPU, None, count=2, originals=True)
    first, second = layers.each
    assert "the unpruned operand w of layer 1" in second.arrays
    whole = first.with_weights_of(Contender("dense", "cublas", weights="original"))
    assert whole.dense.weights["w"] is first.dense.originals["w"]
    assert first.with_weights_of(Contender("dense", "cublas")) is first


@pytest.mark.parametrize("op", ["linear", "linear_dgrad", "ffn"])
def test_a_contest_checks_each_dense_contender_against_its_own_weights(op: str) -> None:
    pruned = Contender("dense", "torch_dense", baseline=True)
    both = replace(pruned, weights="original"), pruned
    rows, _ = contest.run(problem(op), both, CPU, None)
    assert [row.status for row in rows] == [Status.OK] * 2
    assert len({row.digest for row in rows}) == 1  # of the problem, which both share
    assert all((row.error or 0.0) < 1e-5 for row in rows)


def test_a_contender_that_multiplies_the_zeros_in_place_of_its_weights_is_wrong() -> None:
    unpruned_one = Contender("dense", "torch_dense", weights="original")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_module, "weights_in_format", of_pruned(prepare_module))
        (row,), _ = contest.run(problem(), [unpruned_one], CPU, None)
    assert row.status is Status.WRONG


def of_pruned(module: ModuleType) -> Callable[..., Any]:
    """Return what converts weights, for a contender that gets pruned ones."""
    convert = module.weights_in_format
    return lambda layer, contender: convert(layer, replace(contender, weights="pruned"))


def test_a_biased_gate_has_the_biases_of_its_unpruned_row() -> None:
    """With `active`, column 0 of the gate follows from how many terms a row has."""
    fields = {"activation": "relu", "active": 4, "n": 64, "k": 256}
    dense = operands(problem("ffn", **fields), load_op("ffn"), CPU, None, originals=True)
    whole = operands(unpruned(problem("ffn", **fields)), load_op("ffn"), CPU, None)
    assert torch.equal(dense.originals["wg"], whole.weights["wg"])


def test_the_distribution_of_every_operand_is_named() -> None:
    def values(op: str, **fields: object) -> dict[str, str]:
        return load_op(op).distributions(problem(op, **fields))

    assert values("linear") == {"w": "normal", "x": "normal"}
    assert values("linear_wgrad") == {"w": "unread", "dy": "normal", "x": "normal"}
    sparse = values("linear_active", active=8, pattern="dense")
    assert sparse == {"w": "normal", "x": "normal, with zeros"}
    source = Source("a.safetensors", "0" * 64, "layer")
    of_file = replace(problem(), source=source)
    assert load_op("linear").distributions(of_file) == {"w": "file", "x": "normal"}
    layers = Layers(problem(), load_op("linear"), CPU, None)
    assert layers.facts["values"] == values("linear")
    assert Row(Case(problem(), Contender("dense", "cublas")), Status.OK).values == {}
