"""The table of what pruning costs, and the losses that an advice takes from it."""

from dataclasses import replace

import pytest

from sparsebench.reports import advice
from sparsebench.reports.costs import COSTS, METHODS, costs, markdown
from sparsebench.reports.tables import split_style
from sparsebench.results.advice.measured_layers import of_pruning, packaged_evidence
from sparsebench.results.advice.pruning import advise
from sparsebench.results.model_files import Pruning, PruningOutcome, RecoveryTraining
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
    evidence = of_pruning(pruning, SOURCE)
    (table,) = costs(evidence)
    lines = {line[0]: line[1:] for line in table.lines}
    assert {*lines} < {*COSTS}
    assert [cell[0] for cell in lines["6:8"]] == ["+0.500", "+0.250"]
    assert [cell[0] for cell in lines["32 × 32 blocks, 80 % zeros"]] == ["–", "+2.000"]
    assert len(table.columns) == 1 + 2
    assert "over 2,048 held-out tokens" in markdown(evidence)


def test_an_advice_has_the_best_method_and_only_losses_per_token(pruning: Pruning) -> None:
    for unit, nats in (("token", 0.25), ("byte", None)):
        evidence = of_pruning(replace(pruning, unit=unit), SOURCE)  # type: ignore[arg-type]
        answer = advise(evidence, read_shapes("Llama-3-8B"), "A100", 16)
        assert [each.nats for each in answer.kinds if each.kind == "6:8"] == [nats]


@pytest.fixture
def trained() -> Pruning:
    """Return two trainings of a model after pruning to 2:4."""
    training = RecoveryTraining(2.2, 0.15, 0.25, "a library", 10**7, 10**8, 600.0, "NVIDIA H200")
    outcomes = [
        replace(outcome("wanda", "2:4", 0.5, 4.0), recovery=replace(training, loss=2.3)),
        replace(outcome("spensegpt", "2:4", 0.5, 2.5), recovery=training),
    ]
    return Pruning(*ABOUT, outcomes)  # type: ignore[arg-type]


def test_a_table_has_the_rises_before_and_after_training(trained: Pruning) -> None:
    evidence = of_pruning(trained, SOURCE)
    assert not evidence.losses
    (table,) = costs(evidence)
    assert [[split_style(cell)[0] for cell in line] for line in table.lines] == [
        ["2:4", "Wanda", "+2.000", "+0.300 [0.150, 0.250]", "10.0"],
        ["2:4", "SpenseGPT", "+0.500", "+0.200 [0.150, 0.250]", "10.0"],
    ]
    assert "a library, which has none of the 2,048 held-out tokens" in markdown(evidence)


def test_an_advice_says_what_the_best_training_left(trained: Pruning) -> None:
    untrained = replace(trained, outcomes=[replace(e, recovery=None) for e in trained.outcomes])
    evidence = of_pruning(trained, SOURCE) + of_pruning(untrained, SOURCE)
    answer = advise(evidence, read_shapes("Llama-3-8B"), "A100", 16)
    (each,) = [each for each in answer.kinds if each.kind == "2:4"]
    assert each.quality == "perplexity × 1.65, × 1.22 after 10 min of training"
    about = " ".join(advice.about(answer))
    assert "dense 2.00, trained on a library" in about
    assert "2:4 2.50, then 2.20 [2.15, 2.25] after 10.0 minutes" in about
    assert "2:4, trained" in advice.chart(answer)
    other = of_pruning(replace(untrained, weights="worse.gguf", loss=1.5), "pruning/worse.json")
    answer = advise(evidence + other, read_shapes("Llama-3-8B"), "A100", 16)
    assert [e.recovery for e in answer.kinds if e.kind == "2:4"] == [None]  # of another model


def test_the_longest_training_of_a_method_counts_whatever_its_file(trained: Pruning) -> None:
    def lasting(seconds: float, loss: float, place: int) -> Pruning:
        before = trained.outcomes[place]
        after = replace(before.recovery, seconds=seconds, loss=loss)  # type: ignore[type-var]
        return replace(trained, outcomes=[replace(before, recovery=after)])

    untrained = replace(trained, outcomes=[replace(e, recovery=None) for e in trained.outcomes])
    evidence = of_pruning(untrained, SOURCE)
    for number, training in enumerate(((120.0, 2.2, 1), (780.0, 2.24, 1), (780.0, 2.4, 0))):
        evidence += of_pruning(lasting(*training), f"pruning/{number}.json")
    answer = advise(evidence, read_shapes("Llama-3-8B"), "A100", 16)
    (recovery,) = [each.recovery for each in answer.kinds if each.kind == "2:4"]
    assert recovery
    assert (recovery.pruned.method, recovery.minutes, recovery.rise) == ("spensegpt", 13.0, 0.24)


def test_the_largest_held_out_text_of_a_model_counts(trained: Pruning) -> None:
    small = replace(trained, held_out=512, outcomes=[outcome("wanda", "2:4", 0.5, 2.1)])
    evidence = of_pruning(small, SOURCE) + of_pruning(trained, "pruning/recovered.json")
    answer = advise(evidence, read_shapes("Llama-3-8B"), "A100", 16)
    assert [each.nats for each in answer.kinds if each.kind == "2:4"] == [0.5]


def test_the_published_table_has_each_method_of_a_real_model() -> None:
    evidence = packaged_evidence()
    gemma = {each.method for each in evidence.losses if each.model.startswith("gemma-3-270m")}
    assert gemma == METHODS.keys()
