"""The page "Prune or quantize?": kinds of fewer weights and of fewer bits, for each listed model.

    MODEL ▾ GPU ▾
    decoding, 16 tokens: quantize, do not prune ...     at equal quality, then at equal memory
    kind      decoding    gain     prompts    gain    weights   quality
    dense     4.55 ms     1×       87.8 ms    1×      16.1 GB   –
    fp8       3.06 ms     ≈1.49×   46.9 ms    ≈1.9×   9.08 GB   perplexity × 1.03
    folded: commands that measure what was not, and how the answers are made

The answers and the table are those of "Should I prune?" (prune.py).
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import exp
from typing import Any

from sparsebench.reports import advice
from sparsebench.reports.page import render
from sparsebench.reports.site.pages import Site, safe
from sparsebench.results.advice.measured_layers import packaged_evidence
from sparsebench.results.advice.pruning import BEGINS, KINDS, UNUSABLE, Answer, advise
from sparsebench.results.advice.step_model import BOUND
from sparsebench.results.model_shapes import MODELS

PAGE = "quantize.html"
TOKENS = (16, 4096)  # that decode, and of prompts


def page(site: Site, first: dict[str, str]) -> str:
    """Return the page; it shows the `model` and the `gpu` of `first` first."""
    evidence = packaged_evidence()
    gpus = sorted(evidence.layers.gpus, reverse=True)
    pairs = [[advise(evidence, *of, m) for m in TOKENS] for of in product(MODELS, gpus)]
    values = {"cases": [*map(_case, pairs)], "notes": advice.basis(evidence, gpus[0])}
    return render("site_quantize.html", site=site, models=MODELS, gpus=gpus, first=first, **values)


def _case(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return what the page shows of a model on a GPU."""
    model, gpu = answers[0].model.name, answers[0].gpu
    unmeasured = [
        (f"{each.kind}, {advice.of_load(answer)}", advice.command_of(answer, each.kind))
        for answer in answers
        for each in answer.kinds
        if each.step.basis == BOUND and KINDS[each.kind][0] in advice.MEASURING
    ]
    return {
        "id": safe(f"{model}-{gpu}").lower(),
        "choice": {"model": model, "gpu": gpu},
        "findings": [(advice.of_load(answer), *_findings(answer)) for answer in answers],
        "table": replace(advice.table(*answers, every=True), title="").html(),
        "unmeasured": unmeasured,
        "answer": answers[0],
        "about": advice.rests_on(answers[0]),
        "runs": advice.sources(*answers),
    }


def _findings(answer: Answer) -> tuple[str, str]:
    """Say what is best at equal quality, and at equal memory: that of fp8."""
    same = "Nothing that keeps the quality is known to be faster."
    if best := answer.best:
        begins = BEGINS.get(answer.word, "Prune and train")
        where = f" on {best.loss.subject}" if best.loss else ""
        same = f"{begins}: {best.step.text} as fast with {best.kind}, {best.quality}{where}."
    most = min(each.gigabytes for each in answer.kinds if each.kind == "fp8")
    small = [e for e in answer.kinds if e.gigabytes <= most and e.step.basis != BOUND]
    usable = [each for each in small if each.nats is not None and each.nats <= UNUSABLE]
    fit = max(usable, key=lambda each: each.step.value, default=None)
    words = f"In the memory of fp8, and at a perplexity up to × {exp(UNUSABLE):.1f}, the fastest is"
    return same, f"{words} {fit.kind}: {fit.step.text}, {fit.quality}." if fit else ""
