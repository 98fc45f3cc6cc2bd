"""An advice shows measurements, and its intervals contain left-out ones."""

import json
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from math import exp, log
from pathlib import Path
from random import Random
from shlex import split
from types import SimpleNamespace
from typing import Any

import pytest

from sparsebench.reports import advice as presented
from sparsebench.reports.site import prune, quantize
from sparsebench.reports.site.pages import Site
from sparsebench.results.advice.curves import Curve
from sparsebench.results.advice.layer_estimates import (
    ACTIVATIONS,
    BLOCKS,
    DENSE,
    FOUR_BITS,
    FP8,
    QUANTIZED,
    TWO_FOUR,
    TWO_FOUR_FP8,
    Estimate,
    Estimator,
    Gpu,
    Layer,
)
from sparsebench.results.advice.measured_layers import Evidence, of_runs, packaged_evidence
from sparsebench.results.advice.pruning import (
    HALF,
    KINDS,
    MOST_LOSS,
    NO,
    QUANTIZE,
    TRAIN,
    UNMEASURED,
    UNUSABLE,
    WORTH,
    Advice,
    advise,
)
from sparsebench.results.advice.step_model import BOUND, MEASURED, Gain, StepModel
from sparsebench.results.model_shapes import MODELS, ModelShapes, read_shapes
from sparsebench.results.run import store
from sparsebench.results.tables.analysis import analyse
from tests.results.model_examples import config
from tests.tools.command_line import output, sparsebench
from tests.tools.marks import crossed
from tests.tools.paths import PUBLISHED


class CachedEstimator(Estimator):
    """Estimates with a cache by layer, which advice for 64 numbers of tokens asks for again."""

    @cached_property
    def values(self) -> dict[Any, Any]:
        return {}

    def estimate(self, layer: Layer, gpu: Gpu) -> Estimate | None:
        key = layer, gpu.name
        if key not in self.values:
            self.values[key] = super().estimate(layer, gpu)
        return self.values[key]

    def dense_us(self, layer: Layer, gpu: Gpu) -> float:
        key = layer, gpu.name, DENSE
        if key not in self.values:
            self.values[key] = super().dense_us(layer, gpu)
        return self.values[key]


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    packaged = packaged_evidence()
    vars(packaged)["layers"] = CachedEstimator(packaged.layers.gpus, packaged.measured)
    return packaged


def test_intervals_hold_nine_of_ten_layers_whose_shapes_were_left_out(evidence: Evidence) -> None:
    inside, predicted = evidence.layers.coverage
    assert predicted > 0.7 * len(evidence.measured)
    assert inside >= 0.9 * predicted


@pytest.mark.parametrize(("way", "widest"), [(TWO_FOUR, 1.25), (BLOCKS, 1.5), (ACTIVATIONS, 2.0)])
def test_intervals_are_as_narrow_as_the_rows_allow(way, widest, evidence: Evidence) -> None:
    assert exp(evidence.layers.half(way)) < widest


def test_estimates_hold_every_whole_model_that_was_left_out(evidence: Evidence) -> None:
    """Each step is predicted from layers of other shapes alone."""
    sizes_seen = set()
    for step in evidence.steps:
        sizes = {step.layer.n, step.layer.k, 2 * step.layer.n}
        rows = [row for row in evidence.measured if not {row.layer.n, row.layer.k} <= sizes]
        layers, gpu = Estimator(evidence.layers.gpus, rows), evidence.layers.gpus[step.gpu]
        model = StepModel(step.model, step.layer.m, step.context)
        gain = model.estimated(step.layer, layers, gpu)
        assert gain
        assert gain.low <= step.gain <= gain.high
        sizes_seen.add(step.model.hidden)
    assert len(sizes_seen) > 1


def test_the_packaged_rows_are_those_of_the_bundles(evidence: Evidence) -> None:
    names = ["nvidia-h200/spense-ffn", "nvidia-h200/decoder-look"]
    runs = [store.read(PUBLISHED / name) for name in names]
    mine = of_runs((analyse(run), name) for run, name in zip(runs, names, strict=True))
    assert mine.steps
    assert {row for row in evidence.measured if row.run == names[0]} <= {*mine.measured}
    assert [step for step in evidence.steps if step.run == names[1]] == mine.steps


def test_a_gain_between_measured_batches_lies_on_the_line_between_them(evidence: Evidence) -> None:
    """Decoding steps of Llama-3-8B were measured with 1, 16 and 64 tokens."""
    ends = [of_half(evidence, "Llama-3-8B", "H100", tokens).step for tokens in (1, 16)]
    assert [end.basis for end in ends] == [MEASURED, MEASURED]
    between = of_half(evidence, "Llama-3-8B", "H100", 4).step
    share = log(4) / log(16)
    assert between.value == pytest.approx(ends[0].value ** (1 - share) * ends[1].value ** share)
    assert (between.basis, between.part) == (MEASURED, "8 of 32 layers")
    assert "interpolated" in between.cell
    of_ends = f"between {ends[0].short} at 1 and {ends[1].short} at 16 tokens"
    assert between.caveat == f"extrapolated from 8 of 32 layers, {of_ends}"


def test_a_gain_of_some_of_the_layers_is_extrapolated_and_says_so(evidence: Evidence) -> None:
    pruned = without_bits(evidence)
    answer = advise(pruned, read_shapes("Llama-3-8B"), "H200", 16)
    assert answer.best
    step = answer.best.step
    assert (step.basis, step.part) == (MEASURED, "8 of 32 layers")
    assert step.caveat == "extrapolated from 8 of 32 layers"
    assert step.cell == f"{step.text} (extrapolated)"
    look = advise(evidence, read_shapes("Qwen3-32B"), "H200", 16).kinds[3].step
    assert look.cell == f"{look.text} (look, extrapolated)"
    for text in (answer.verdict, presented.in_brief(pruned, "NVIDIA H200")):
        assert "extrapolated from 8 of 32 layers" in text
    assert "fewer of these layers" in presented.markdown(answer, evidence)  # how


def without_bits(evidence: Evidence) -> Evidence:
    """Return the evidence without the quality of fewer bits, so that none is an answer."""
    losses = [loss for loss in evidence.losses if loss.way not in QUANTIZED]
    return replace(evidence, losses=losses)


def of_half(evidence: Evidence, model: str, gpu: str, tokens: int) -> Advice:
    answer = advise(evidence, read_shapes(model), gpu, tokens)
    return next(each for each in answer.kinds if each.kind == HALF)


@pytest.mark.parametrize(
    ("model", "gpu"), crossed([model.name for model in MODELS], ["H100", "H200"])
)
def test_a_verdict_changes_only_where_a_curve_crosses(model, gpu, evidence: Evidence) -> None:
    """It may change once between two neighbouring points, if the answers at them differ."""
    assert {step.layer.m for step in evidence.steps if step.layer.m <= 64} <= {*POINTS}
    words = [advise(evidence, read_shapes(model), gpu, tokens).word for tokens in range(1, 65)]
    assert not flips(words)


POINTS = 1, 16, 32, 64  # tokens of estimates, and every batch of a whole model


def flips(words: list[str]) -> list[list[str]]:
    """Return the parts between two of POINTS in which words change and return, or change twice."""
    parts = [words[left - 1 : right] for left, right in pairwise(POINTS)]
    changes = [sum(one != other for one, other in pairwise(part)) for part in parts]
    return [p for p, count in zip(parts, changes, strict=True) if count != (p[0] != p[-1])]


@pytest.mark.parametrize("seed", range(3))
def test_no_verdict_flips_for_models_and_gpus_that_are_not_listed(seed: int, evidence) -> None:
    """Draw a model, with the GPU of one published run alone, a listed one, and one without rows.

    In another trial, 40 such models with all batches from 1 to 256 had no flip.
    """
    draw = Random(seed)
    heads, hidden = draw.choice([4, 8, 16, 24, 32, 40, 64]), 64 * draw.randint(8, 128)
    sizes = hidden, 64 * draw.randint(hidden // 64, 5 * hidden // 64), draw.randint(8, 80)
    per_head = draw.choice([64, 128, 256]), draw.choice([32000, 128256, 262144])
    model = ModelShapes("drawn", *sizes, heads, heads // draw.choice([1, 2, 4]), *per_head)
    mine = of_runs([(analyse(store.read(PUBLISHED / "nvidia-h200" / "core-h200")), "mine")])
    mine = replace(mine, losses=evidence.losses)
    gpu = draw.choice(["RTX 4090", "B200", "A100", "L40S"])
    batches = sorted({1, 16, 32, 64, *draw.sample(range(1, 65), 20)})
    for known, name in ((mine, "H200"), (evidence, "H100"), (evidence, gpu)):
        words = {m: advise(known, model, name, m).word for m in batches}
        assert not flips([words[max(b for b in batches if b <= m)] for m in range(1, 65)]), model


def test_a_curve_that_crosses_changes_the_verdict_once_between_its_points() -> None:
    steep = Curve({1: Gain(1.2, 1.1, 1.3, MEASURED), 64: Gain(0.9, 0.8, 1.0, MEASURED)}, Fraction)
    above = [steep.at(tokens).value >= WORTH for tokens in range(1, 65)]
    assert above == sorted(above, reverse=True)
    assert {*above} == {True, False}


@pytest.mark.parametrize(
    ("model", "gpu", "tokens", "word", "begins"),
    [
        ("Llama-3-8B", "H100", 16, QUANTIZE, "Quantize, do not prune"),
        ("Qwen3-32B", "H200", 4096, QUANTIZE, "Quantize, do not prune"),
        ("Gemma-3-270m", "H200", 4096, TRAIN, "Do not prune without training"),
        ("Gemma-3-270m", "H200", 1, NO, "Do not prune"),
        ("Llama-3-8B", "A100", 16, UNMEASURED, "Not measured"),
        ("Llama-3-8B", "H20", 16, UNMEASURED, "Not measured"),
    ],
)
def test_the_verdict_comes_first(model, gpu, tokens, word, begins, evidence) -> None:
    answer = advise(evidence, read_shapes(model), gpu, tokens)
    assert answer.word == word
    assert presented.markdown(answer, evidence).startswith(f"**{begins}")


def test_the_commands_for_a_gpu_that_was_not_measured_can_be_copied(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    arguments = ["advise", "Llama-3-8B", "--gpu", "RTX 4090", "--batch", "16"]
    lines = sparsebench(*arguments).stdout.splitlines()
    survey, again = (split(line) for line in lines if line.startswith("  sparsebench "))
    folder = survey[survey.index("--out") + 1]
    assert again == ["sparsebench", *arguments, "--run", f"{folder}/screen"]


def test_the_choice_is_the_fastest_kind_that_keeps_the_quality(evidence: Evidence) -> None:
    answer = advise(evidence, read_shapes("Qwen3-8B"), "H100", 8)
    cheap = [each for each in answer.kinds if each.nats is not None and each.nats <= MOST_LOSS]
    cheap = [each for each in cheap if each.step.basis != BOUND]
    assert answer.best == max(cheap, key=lambda each: each.step.value)
    faster = [each for each in answer.kinds if each.step.value > answer.best.step.value]
    destroyed = [each for each in faster if each.nats is not None and each.nats > UNUSABLE]
    assert {KINDS[each.kind][0] for each in destroyed} == {BLOCKS}
    assert not {*map(id, destroyed)} & {*map(id, presented.shown(answer))}
    assert all(each.kind in presented.markdown(answer, evidence) for each in destroyed)


def test_the_quality_of_another_model_is_named_and_that_of_the_model_is_not_invented(evidence):
    other = advise(evidence, read_shapes("Qwen3-8B"), "H100", 8).verdict
    small = "gemma-3-270m (from a 4-bit file)"
    assert f"its quality was not measured, and on {small} perplexity rose ×" in other
    same = advise(evidence, read_shapes("Gemma-3-270m"), "H200", 4096)
    assert same.word == TRAIN
    assert "not measured" not in same.verdict
    assert "but on gemma-3-270m (from a 4-bit file) perplexity rose × 1.53" in same.verdict
    assert same.best
    assert same.best.nats == 0.4257


def test_fewer_zeros_stand_for_a_loss_that_was_not_measured(evidence: Evidence) -> None:
    fewer = [loss for loss in evidence.losses if (loss.way, loss.sparsity) != (TWO_FOUR, 0.5)]
    rest = replace(evidence, losses=fewer, recoveries=[])
    answer = advise(rest, read_shapes("Qwen3-8B"), "H100", 8)
    assert answer.kinds[0].quality.startswith("perplexity more than ×")
    none = advise(replace(evidence, losses=[]), read_shapes("Qwen3-8B"), "H100", 8)
    assert none.word == TRAIN
    assert "its loss by pruning was not measured" in none.verdict


def test_an_estimate_from_few_layers_names_them_and_has_no_interval(evidence: Evidence) -> None:
    for tokens in (1, 8, 16):
        answer = advise(evidence, read_shapes("Llama-3-8B"), "H200", tokens)
        (gain,) = [each.step for each in answer.kinds if each.kind == "weights in 4 bits"]
        assert gain.text.startswith("≈")
        assert "[" not in gain.text
        assert gain.cell.endswith("(rough)")
        assert "torch_int4" in gain.rough
        assert gain.rough in " ".join(presented.about(answer))
        (fp8,) = [each.step for each in answer.kinds if each.kind == "fp8"]
        assert "[" in fp8.text
        assert not fp8.rough


def test_fewer_bits_count_every_product_of_a_layer_and_pruning_the_mlps(evidence: Evidence) -> None:
    step = StepModel(MODELS[0], 16, 1024)
    of_fp8, of_both, of_pruned = (
        [layer.way for _, layer in step.products(step.mlp(way, 0.5))]
        for way in (FP8, TWO_FOUR_FP8, TWO_FOUR)
    )
    assert of_fp8 == [FP8, FP8, FP8, DENSE]  # the MLP, wqkv, wo; the head keeps its bits
    assert of_both == [TWO_FOUR_FP8, FP8, FP8, DENSE]
    assert of_pruned == [TWO_FOUR, DENSE, DENSE, DENSE]
    assert step.bound(step.mlp(FP8)) < 2 < step.bound(step.mlp(FOUR_BITS))
    layers, gpu = evidence.layers, evidence.layers.gpus["NVIDIA H200"]
    assert step.estimated(step.mlp(FP8), layers, gpu)
    assert step.estimated(step.mlp(FOUR_BITS), layers, gpu)
    prompt = replace(step, tokens=4096)
    assert prompt.estimated(prompt.mlp(FOUR_BITS), layers, gpu) is None  # was not measured


def test_gains_of_fp8_are_over_16_bits_in_the_same_processes() -> None:
    """A step of Qwen3-32B in fp8 was measured in the run of its step in bf16."""
    path = PUBLISHED / "nvidia-h200" / "decoder"
    (cases,) = [analyse(store.read(path)).timed]
    of_runs_ = of_runs([(analyse(store.read(path)), "nvidia-h200/decoder")])
    for step in of_runs_.steps:
        if step.layer.way == FP8:
            same = cases[(cases.m == step.layer.m) & (cases.kind == "dense")]
            same = same[same.pattern == "spense_hidden"]
            times = {str(d): t for d, t in zip(same.dtype, same.median_us, strict=True)}
            assert step.gain == pytest.approx(times["bf16"] / times["fp8"], rel=0.01)
            assert step.processes == 3
    assert sum(step.layer.way == FP8 for step in of_runs_.steps) == 3


def test_a_gpu_without_fp8_has_no_kind_of_it(evidence: Evidence) -> None:
    for gpu, has in (("A100", False), ("RTX 4090", True), ("H200", True)):
        kinds = {each.kind for each in advise(evidence, MODELS[0], gpu, 16).kinds}
        assert ("fp8" in kinds) == has
        assert "weights in 4 bits" in kinds


def test_what_was_not_measured_says_so_with_the_command_that_measures_it(evidence) -> None:
    page = quantize.page(Site(), prune.FIRST)
    part = page.partition('id="llama-3-8b-nvidia-h200"')[2].partition("</section>")[0]
    assert "weights in 4 bits, prompts, 4,096 tokens" in part
    assert "sparsebench try torch_int4 op=linear dtype=bf16 weight_bits=4 m=4096 n=14336" in part
    answer = advise(evidence, read_shapes("Llama-3-8B"), "H200", 16)
    assert answer.best
    assert f"Quantize, do not prune: {answer.best.step.text} as fast with fp8" in part
    assert all(kind.kind in part for kind in answer.kinds)


def test_an_answer_ends_with_lines_to_prune_load_and_measure(evidence: Evidence) -> None:
    lines = presented.commands(advise(evidence, read_shapes("Qwen3-8B"), "H100", 8))
    assert [*lines] == ["load, in Python, with torchao", "measure"]
    assert "TorchAoConfig(Float8DynamicActivation" in lines["load, in Python, with torchao"]
    assert "from_pretrained('Qwen/Qwen3-8B'," in lines["load, in Python, with torchao"]
    assert lines["measure"] == "sparsebench try cublas op=ffn dtype=fp8 m=8 n=12288 k=4096"
    pruned = presented.commands(advise(without_bits(evidence), read_shapes("Qwen3-8B"), "H100", 8))
    assert [*pruned] == ["prune", "load, in Python", "measure"]
    assert "sparsebench prune Qwen3-8B --pattern 2:4 --dense 0 --out" in pruned["prune"]
    assert "spense_ffn dtype=bf16 m=8 n=12288 k=4096 pattern=two_four" in pruned["measure"]
    for load in (lines["load, in Python, with torchao"], pruned["load, in Python"]):
        compile(load, "load", "exec")
    shown = output("advise", "Qwen3-8B", "--gpu", "H100", "--batch", 8)
    assert all(line in shown.splitlines() for line in (f"  {each}" for each in lines.values()))


def test_a_gpu_without_rows_has_bounds_and_the_command_that_measures_it() -> None:
    shown = output("advise", "Qwen3-8B", "--gpu", "A100", "--batch", 16)
    assert "≈" not in shown
    assert "sparsebench new-gpu" in shown
    assert "NVIDIA H100 80GB HBM3 and NVIDIA H200" in shown  # the published ones


def test_rows_of_kinds_that_nobody_would_use_are_no_reason_not_to_prune(evidence: Evidence) -> None:
    gpu = replace(evidence.gpus[0], name="NVIDIA L40S", capability="8.9")
    for ways in ({BLOCKS}, {FOUR_BITS}):
        rows = [replace(r, gpu=gpu.name) for r in evidence.measured if r.layer.way in ways]
        one_format = replace(evidence, gpus=[gpu], measured=rows, steps=[])
        answer = advise(one_format, read_shapes("Llama-3-8B"), "L40S", 16)
        assert answer.word == UNMEASURED
        assert [*presented.commands(answer)] == ["measure"]


def test_no_estimate_exceeds_what_bytes_and_flops_allow(evidence: Evidence) -> None:
    bounds = advise(evidence, MODELS[0], "B200", 16).kinds
    assert {kind.step.basis for kind in bounds} == {BOUND}
    for kind, bound in zip(advise(evidence, MODELS[0], "H100", 16).kinds, bounds, strict=True):
        assert kind.layers.high <= bound.layers.value * 1.001
        assert kind.step.low <= kind.step.value <= kind.step.high
        assert kind.gigabytes == bound.gigabytes


def test_more_zeros_of_a_kind_never_take_more_memory(evidence: Evidence) -> None:
    answer = advise(evidence, MODELS[1], "H200", 16)
    gigabytes = {kind.kind: kind.gigabytes for kind in answer.kinds}
    both, half, most, blocks, more_blocks, fewest_blocks, anywhere, more, active, *bits = (
        gigabytes.values()
    )
    assert bits == sorted(bits, reverse=True)
    assert half > bits[0] > answer.dense_gigabytes / 2
    assert answer.dense_gigabytes == active > most > half > both
    assert both > blocks > more_blocks > fewest_blocks
    assert both == anywhere > more


def test_command_and_page_show_the_same_answer(tmp_path: Path, evidence: Evidence) -> None:
    folder = tmp_path / "Llama-3-8B"
    folder.mkdir()
    answer = advise(evidence, read_shapes(str(config(folder))), "H200", 16)
    linked, other = presented.sources(answer)[0].removeprefix("nvidia-h200/"), "not-cited"
    cards: list[Any] = [
        SimpleNamespace(gpu="NVIDIA H200", name=name, address=f"h200/{name}")
        for name in (linked, other)
    ]
    (other_path, _), (path, page) = prune.pages(cards, Site())
    assert (other_path, path) == (quantize.PAGE, prune.PAGE)
    assert "We found no larger one as a package, and another one may lose more or less" in page
    section = page.partition('id="llama-3-8b-nvidia-h200-16"')[2].partition("</section>")[0]
    printed = sparsebench("advise", folder, "--gpu", "h200", "--batch", 16, "--markdown").stdout
    for text in [answer.verdict, *(kind.step.text for kind in presented.shown(answer))]:
        assert text in section
        assert text in printed.replace("\\", "")
    assert f'href="h200/{linked}/index.html"' in section
    assert other not in section


def test_a_site_without_published_runs_has_no_page_about_them() -> None:
    assert not prune.applies([("NVIDIA H200", "mine")])
    assert prune.applies([("NVIDIA H200", "mine"), ("NVIDIA H200", "ffn")])


def test_a_run_of_ones_own_counts_too() -> None:
    run = PUBLISHED / "nvidia-h200" / "spense-ffn"
    done = sparsebench(
        "advise", "Qwen3-32B", "--gpu", "H200", "--batch", 64, "--run", run, "--json"
    )
    assert json.loads(done.stdout)["word"] == QUANTIZE, done.stderr
