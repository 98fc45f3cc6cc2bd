"""The table of what pruning costs, and the losses that an advice takes from it."""

from dataclasses import replace

import pytest

from sparsebench.reports.costs import COSTS, METHODS, costs, markdown
from sparsebench.results.advice.measured_layers import Evidence, of_pruning, packaged_evidence
from sparsebench.results.advice.pruning import advise
from sparsebench.results.model_files import Pruning, PruningOutcome
from sparsebench.results.model_shapes import read_shapes

SOURCE = "pruning/small.json"
ABOUT = "sparsebench/pruning@1", "small.gguf", "0", "a text", 4096, 2048, 2.0


def outcome(method: str, pattern: str, sparsity: float, loss: float) -> PruningOutcome:
    return PruningOutcome(method, "scored", 0.0, sparsity, {"output": 0.1}, loss, pattern)


@pytest.fixture(scope="module")
def pruning() -> Pruning:
    outcomes = [
        outcome("magnitude", "6:8", 0.25, 2.5),
        outcome("wanda", "6:8", 0.25, 2.25),
        outcome("wanda", "32x32", 0.8, 4.0),
        outcome("wanda", "4x4", 0.8, 3.0),
    ]
    return Pruning(*ABOUT, outcomes)  # type: ignore[arg-type]


def test_a_line_has_the_rises_by_method(pruning: Pruning) -> None:
    evidence = Evidence([], [], [], of_pruning(pruning, SOURCE))
    (table,) = costs(evidence)
    lines = {line[0]: line[1:] for line in table.lines}
    assert {*lines} < {*COSTS}
    assert [cell[0] for cell in lines["6:8"]] == ["+0.500", "+0.250"]
    assert [cell[0] for cell in lines["32 × 32 blocks, 80 % zeros"]] == ["–", "+2.000"]
    assert len(table.columns) == 1 + 2
    assert "over 2,048 held-out tokens" in markdown(evidence)


def test_an_advice_has_the_best_method_and_only_losses_per_token(pruning: Pruning) -> None:
    for unit, nats in (("token", 0.25), ("byte", None)):
        losses = of_pruning(replace(pruning, unit=unit), SOURCE)  # type: ignore[arg-type]
        answer = advise(Evidence([], [], [], losses), read_shapes("Llama-3-8B"), "A100", 16)
        assert [each.nats for each in answer.kinds if each.kind == "6:8"] == [nats]


def test_the_published_table_has_each_method_of_a_real_model() -> None:
    evidence = packaged_evidence()
    gemma = {each.method for each in evidence.losses if each.model.startswith("gemma-3-270m")}
    assert gemma == METHODS.keys()
