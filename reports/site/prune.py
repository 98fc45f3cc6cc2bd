"""The page "Should I prune?": every listed model on every published GPU, with TOKENS at once.

    MODEL ▾ GPU ▾ tokens ▾    a select shows one answer; without JavaScript the grid does
    verdict, table, runs      as `sparsebench advise` prints them
    models × tokens           a grid for each GPU, whose cells lead to the answers
    what pruning costs: losses by method beside the gains of layers
    how good the estimates are: models that were measured, beside their estimates

The answers rest on the packaged rows (measured_layers.py). Links lead to those of their runs that
are on the site.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

from sparsebench.reports import advice, costs
from sparsebench.reports.page import render
from sparsebench.reports.site.cards import Card
from sparsebench.reports.site.pages import Site, safe
from sparsebench.reports.tables import html_table
from sparsebench.results.advice.measured_layers import Step, packaged_evidence
from sparsebench.results.advice.pruning import (
    MOST_LOSS,
    NO,
    TRAIN,
    TRY,
    WORTH,
    Answer,
    advise,
    leave_one_out,
)
from sparsebench.results.formatting import between, times
from sparsebench.results.model_shapes import MODELS, model_name
from sparsebench.results.statistics.ratio import FEWEST

PAGE = "prune.html"
TOKENS = (1, 16, 64, 256, 4096)
CLASSES = {TRY: "worth", TRAIN: "look", NO: "lost"}
UNDER = {"half of each MLP 2:4": "half 2:4"}  # short names of kinds
FIRST = "Llama-3-8B", "NVIDIA H200", 16


def in_brief() -> dict[str, str]:
    """Return the short answer for each published GPU, by its name."""
    evidence = packaged_evidence()
    return {gpu: advice.in_brief(evidence, gpu) for gpu in evidence.layers.gpus}


def applies(runs: Iterable[tuple[str, str]]) -> bool:
    """Return whether the answers rest on one of these runs: pairs of a GPU and a name."""
    names = {_key(*run) for run in runs}
    return any(row.run in names for row in packaged_evidence().measured)


def pages(cards: Sequence[Card], site: Site) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of the page."""
    evidence = packaged_evidence()
    links = {_key(card.gpu, card.name): f"{card.address}/" for card in cards}
    gpus = sorted(evidence.layers.gpus, reverse=True)
    answers = [advise(evidence, *case) for case in product(MODELS, gpus, TOKENS)]
    losses = {loss.text for loss in evidence.losses}  # stand below each answer that shows a loss
    common = [
        note
        for note in answers[0].notes
        if note not in losses and all(note in each.notes for each in answers)
    ]
    steps = [
        [
            step.run,
            model_name(step.model.hidden, step.model.intermediate, step.model.layers),
            advice.layer_text(step.layer),
            _measured(step),
            f"{gain.value:.2f}× [{gain.low:.2f}, {gain.high:.2f}]",
            "yes" if gain.low <= step.gain <= gain.high else ("no", "bad"),
        ]
        for step, gain in leave_one_out(evidence)
    ]
    heads = ["run", "model", "kind of sparsity", "measured", "estimate", "inside"]
    yield (
        PAGE,
        render(
            "site_prune.html",
            site=site,
            models=MODELS,
            gpus=gpus,
            tokens=TOKENS,
            worth=WORTH,
            dear=MOST_LOSS,
            first=_id(*FIRST),
            cases=[_case(answer, links, common) for answer in answers],
            grids=[(gpu, _grid([each for each in answers if each.gpu == gpu])) for gpu in gpus],
            notes=common,
            costs=[(table.title, table.html()) for table in costs.costs(evidence, FIRST[1])],
            cost_notes=costs.notes(evidence, FIRST[1]),
            coverage=evidence.layers.coverage,
            steps=html_table(heads, steps, "stacked"),
            inside=sum(line[-1] == "yes" for line in steps),
            count=len(steps),
        ),
    )


def _measured(step: Step) -> str:
    """Write a measured gain; a look has no interval."""
    if step.processes < FEWEST:
        return f"{step.gain:.2f}× (look)"
    return between(step.gain, step.low, step.high)


def _key(gpu: str, name: str) -> str:
    return f"{safe(gpu).lower()}/{name}"


def _id(model: str, gpu: str, tokens: int) -> str:
    return safe(f"{model}-{gpu}-{tokens}").lower()


def _case(answer: Answer, links: dict[str, str], common: Sequence[str]) -> dict[str, Any]:
    """Return what the page shows of an answer."""
    table = advice.table(answer)
    return {
        "id": _id(answer.model.name, answer.gpu, answer.tokens),
        "answer": answer,
        "title": table.title,
        "table": html_table(advice.COLUMNS, table.lines, "stacked"),
        "notes": [note for note in answer.notes if note not in common],
        "runs": [(_short(run, answer), links.get(run, "")) for run in advice.sources(answer)],
    }


def _short(run: str, answer: Answer) -> str:
    """Return a run's name, with its GPU if that is not the one of the answer."""
    gpu, _, name = run.rpartition("/")
    return name if gpu in ("whole", safe(answer.gpu).lower()) else run


def _under(answer: Answer) -> str:
    """Return the words below a gain: the kind that is worth trying, or that it needs training."""
    if answer.word == TRY and answer.best:
        return UNDER.get(answer.best.kind, answer.best.kind)
    return "if trained" if answer.word == TRAIN else ""


def _grid(answers: Sequence[Answer]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return a line of cells for each model: the gain of the kind that the verdict is about."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for answer in answers:
        cell = {
            "id": _id(answer.model.name, answer.gpu, answer.tokens),
            "classes": CLASSES[answer.word],
            "text": times(answer.best.step.value) if answer.best else "no",
            "under": _under(answer),
            "title": answer.verdict,
        }
        rows.setdefault(answer.model.name, []).append(cell)
    return [*rows.items()]
