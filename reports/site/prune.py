"""The page "Should I prune?": every listed model on every published GPU, with TOKENS at once.

    MODEL ▾ GPU ▾ tokens ▾     a select shows one answer; without JavaScript the grid does
    verdict, chart, commands   as `sparsebench advise` prints them
    folded: the numbers; a grid of models × tokens for each GPU, whose cells lead to the answers;
    what pruning costs, by method; how the answers are made

The answers rest on the packaged rows (measured_layers.py). Links lead to those of their runs that
are on the site.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import exp
from typing import Any

from sparsebench.reports import advice, costs
from sparsebench.reports.page import render
from sparsebench.reports.site import quantize
from sparsebench.reports.site.cards import Card
from sparsebench.reports.site.pages import Site, safe
from sparsebench.results.advice.measured_layers import packaged_evidence
from sparsebench.results.advice.pruning import (
    MOST_LOSS,
    NO,
    QUANTIZE,
    TRAIN,
    TRY,
    UNMEASURED,
    WORTH,
    Answer,
    advise,
)
from sparsebench.results.advice.step_model import DECODED
from sparsebench.results.formatting import times
from sparsebench.results.model_shapes import MODELS

PAGE = "prune.html"
TOKENS = (1, 4, 8, 16, 64, 256, 4096)
CLASSES = {TRY: "worth", QUANTIZE: "worth", TRAIN: "look", NO: "lost", UNMEASURED: "lost"}
FIRST = {"model": "Llama-3-8B", "gpu": "NVIDIA H200", "tokens": "16"}
CONSTANTS = {"tokens": TOKENS, "worth": WORTH, "dear": exp(MOST_LOSS), "decoded": DECODED}
CONSTANTS |= {"first": FIRST}


def in_brief() -> dict[str, str]:
    """Return the short answer for each published GPU, by its name."""
    evidence = packaged_evidence()
    return {gpu: advice.in_brief(evidence, gpu) for gpu in evidence.layers.gpus}


def applies(runs: Iterable[tuple[str, str]]) -> bool:
    """Return whether the answers rest on one of these runs: pairs of a GPU and a name."""
    names = {_key(*run) for run in runs}
    return any(row.run in names for row in packaged_evidence().measured)


def pages(cards: Sequence[Card], site: Site) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of this page, and of "Prune or quantize?" (quantize.py)."""
    evidence = packaged_evidence()
    links = {_key(card.gpu, card.name): f"{card.address}/" for card in cards}
    yield quantize.PAGE, quantize.page(site, FIRST)
    gpus = sorted(evidence.layers.gpus, reverse=True)
    answers = [advise(evidence, *case) for case in product(MODELS, gpus, TOKENS)]
    yield (
        PAGE,
        render(
            "site_prune.html",
            site=site,
            models=MODELS,
            gpus=gpus,
            **CONSTANTS,
            cases=[_case(answer, links) for answer in answers],
            grids=[(gpu, _grid([each for each in answers if each.gpu == gpu])) for gpu in gpus],
            notes=advice.basis(evidence, FIRST["gpu"]),
            costs=[(table.title, table.html()) for table in costs.costs(evidence)],
            cost_notes=costs.notes(evidence),
        ),
    )


def _key(gpu: str, name: str) -> str:
    return f"{safe(gpu).lower()}/{name}"


def _id(model: str, gpu: str, tokens: str) -> str:
    return safe(f"{model}-{gpu}-{tokens}").lower()


def _case(answer: Answer, links: dict[str, str]) -> dict[str, Any]:
    """Return what the page shows of an answer."""
    table = advice.table(answer)
    choice = {"model": answer.model.name, "gpu": answer.gpu, "tokens": str(answer.tokens)}
    return {
        "id": _id(*choice.values()),
        "choice": choice,
        "answer": answer,
        "chart": advice.chart(answer),
        "steps": [*advice.commands(answer).items()],
        "title": table.title,
        "table": replace(table, title="").html(),
        "about": advice.about(answer),
        "runs": [(run, links.get(run, "")) for run in advice.sources(answer)],
    }


def _grid(answers: Sequence[Answer]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return a line of cells for each model: the gain of the kind that the verdict is about."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for answer in answers:
        id_ = _id(answer.model.name, answer.gpu, str(answer.tokens))
        text = times(answer.best.step.value) if answer.best else "no"
        text = "?" if answer.word == UNMEASURED else text
        cell = {"id": id_, "classes": CLASSES[answer.word], "text": text, "title": answer.verdict}
        rows.setdefault(answer.model.name, []).append(cell)
    return [*rows.items()]
