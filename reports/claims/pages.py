"""A page a claim, a table of all of them, and a badge each: in a folder of their own or in a site.

claims/index.html        every claim with its verdict on each GPU
claims/NAME.html         quote, verdict, conditions beside ours, bound, cells, what would change
badges/claims/NAME.svg   the verdict

verdicts ─> lines (a table of verdicts)     conditions ─> published beside ours, ≠ marked

What says most comes first: title, badge and tables agree. Where a cell is real, no simulated one
judges.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup, escape

from sparsebench.reports.claims.forest import forest, where
from sparsebench.reports.claims.losses import losses
from sparsebench.reports.claims.sheets import STYLES
from sparsebench.reports.figures._html import folded
from sparsebench.reports.figures._svg import distinct
from sparsebench.reports.page import render
from sparsebench.reports.site.pages import Site, stylesheet
from sparsebench.reports.tables import html_table, without_dashes
from sparsebench.results.claims.cells import Cell, judging_cells, largest_value, value_text
from sparsebench.results.claims.decision import Word, cell_state
from sparsebench.results.claims.metrics import SIGNS
from sparsebench.results.claims.planned import PlannedClaim
from sparsebench.results.claims.schema import Claim, Condition, Test
from sparsebench.results.claims.verdict import TestVerdict, Verdict
from sparsebench.results.formatting import amount, capital, plain
from sparsebench.results.model_files import Pruning

MOST_VALUES = 6  # of a field, in one cell of the table of conditions
BADGE = {
    Word.REPRODUCED: "#00694c",
    Word.PARTLY: "#5a6b00",
    Word.REFUTED: "#a3261c",
    Word.NOT_CARRIED_OVER: "#8a4b00",
    Word.INCONCLUSIVE: "#0a58a8",
    Word.NOT_TESTABLE: "#5d6369",
}


@dataclass(frozen=True)
class Entry:
    """A claim with what was found: its cells and, by `asked`, its verdicts; losses if there are."""

    asked: PlannedClaim
    cells: Sequence[Cell] = ()
    pruning: Pruning | None = None
    verdicts: Sequence[Verdict] = field(default_factory=list)


def entries(
    claims: Sequence[PlannedClaim],
    cells: Mapping[str, Sequence[Cell]],
    pruning: Pruning | None = None,
) -> list[Entry]:
    """Judge claims by their cells, by name; by simulated ones only where all are."""
    known = judging_cells(
        {each.name: [*cells.get(each.name, ()), *each.model_cells] for each in claims}
    )
    return [
        Entry(each, known[each.name], pruning, each.verdicts(known[each.name])) for each in claims
    ]


def pages(found: Sequence[Entry], site: Site) -> Iterator[tuple[str, str]]:
    """Yield path and text of every page and badge of some claims."""
    yield "claims/index.html", render("claims.html", site=site, lines=lines(found))
    for entry in found:
        page = render(
            "claim.html",
            site=site,
            claim=entry.asked.claim,
            name=entry.asked.name,
            verdicts=[(each, STYLES[each.word]) for each in entry.verdicts],
            conditions=conditions(entry),
            bounds=_bounds(entry.asked),
            tests=[_test(entry, test) for test in entry.asked.claim.tests],
            commands=_commands(entry.asked),
            prose=prose,
            runs=sorted(
                {(cell.run, cell.commit, amount(cell.processes, "process")) for cell in entry.cells}
            ),
        )
        yield f"claims/{entry.asked.name}.html", distinct(page)
        yield f"claims/{entry.asked.name}.svg", badge(entry)


def alone(found: Sequence[Entry], version: str) -> Iterator[tuple[str, str]]:
    """Yield the pages with the style that they need beside them: a folder of their own."""
    site = Site(version=version, feed=False)
    yield "style.css", stylesheet()
    yield from pages(found, site)


def prose(text: str) -> Markup:
    """Return a line of a claim with a capital, and what stands in backticks as code."""
    parts = capital(text).split("`")
    code = Markup("<code>%s</code>")
    return Markup("").join(code % part if i % 2 else escape(part) for i, part in enumerate(parts))


def lines(found: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return a line a claim and device, for the tables of all claims."""
    return [
        {
            "name": entry.asked.name,
            "title": entry.asked.claim.title,
            "source": entry.asked.claim.source,
            "device": each.device.removeprefix("NVIDIA "),
            "simulated": each.simulated,
            "word": str(each.word),
            "style": STYLES[each.word],
            "basis": str(each.basis),
            "tendency": str(each.tendency or ""),
            "why": each.why,
        }
        for entry in found
        for each in entry.verdicts
    ]


def badge(entry: Entry) -> str:
    """Return a claim's verdict as an image: the first, on the device that says most."""
    first = entry.verdicts[0]
    right = str(first.word) + (f" (tends to {first.tendency})" if first.tendency else "")
    right += f" · {first.device.removeprefix('NVIDIA ')}" if first.device else ""
    right += " · simulated" if first.simulated else ""
    left = entry.asked.name
    widths = [round(6.6 * len(text)) + 16 for text in (left, right)]
    colour = BADGE[first.word]
    return render("site_badge.svg", left=left, right=right, widths=widths, colour=colour)


def _commands(asked: PlannedClaim) -> list[str]:
    """Return what measures a claim again, and judges it, a line each."""
    tests, made = asked.claim.tests, []
    if not tests or not all(test.of_file for test in tests):
        made += [f"sparsebench claims check {asked.name} --replicates 8"]
    if asked.claim.commands:
        made += asked.claim.commands
    elif any(test.trained for test in tests):
        made += ["sparsebench train-lm --pattern small_world,uniform --seeds 8 --out trained.json"]
    elif any(test.whole for test in tests):
        made += ["sparsebench whole --energy 30 --out whole.json"]
    if any(test.of_file for test in tests):
        files = [word for line in made for word in line.split() if word.endswith(".json")]
        made += [f"sparsebench claims report {asked.name} --from {' --from '.join(files)}"]
    return made


def conditions(entry: Entry) -> list[tuple[str, str, str, str]]:
    """Return name, published, ours and a mark of each condition: =, ≠ or ?."""
    known = [cell for cell in entry.cells if not cell.reason]
    found = []
    for name, condition in entry.asked.claim.conditions.items():
        published = "unknown" if condition.published is None else plain(condition.published)
        ours = _ours(name, condition, known)
        found.append((name, published, ours, _mark(condition, published, ours)))
    return found


def _ours(name: str, condition: Condition, cells: Sequence[Cell]) -> str:
    if condition.ours is not None:
        return condition.ours
    if not cells:
        return "not measured"
    if condition.field is None and name.lower() == "gpu":
        values = {cell.device for cell in cells}
    else:
        named = condition.field or name
        values = {plain(cell.fields[named]) for cell in cells if named in cell.fields} or {"–"}
    few = sorted(values, key=lambda text: (len(text), text))
    more = f" and {len(few) - MOST_VALUES} more" if len(few) > MOST_VALUES else ""
    return ", ".join(few[:MOST_VALUES]) + more


def _mark(condition: Condition, published: str, ours: str) -> str:
    if condition.published is None:
        return "?"
    if condition.same is not None:
        return "=" if condition.same else "≠"
    return "=" if published.casefold() in map(str.casefold, ours.split(", ")) else "≠"


def _bounds(asked: PlannedClaim) -> list[str]:
    """Return a sentence a bound: of the arithmetic that was given, and of the tests' own cells."""
    lines = []
    for bound in asked.claim.bounds:
        part = f", with {100 * bound.share:.3g} % of the whole" if bound.share < 1 else ""
        why = f" ({bound.share_from})" if bound.share_from else ""
        lines.append(f"{bound.of}: at most {bound.most:.3g}×{part}{why}.")
    for test in asked.claim.tests:
        known = asked.bounds.get(test.name, {}).values()
        if known:
            ends = " to ".join(dict.fromkeys(f"{end:.3g}" for end in (min(known), max(known))))
            short = " No kernel as efficient as the baseline can meet the threshold."
            beyond = short if test.name in asked.unreachable else ""
            lines.append(f"{test.name}: at most {ends}× at the efficiency of dense.{beyond}")
    return lines


def _test(entry: Entry, test: Test) -> dict[str, Any]:
    judged = [(v, j) for v in entry.verdicts for j in v.tests if j.test.name == test.name]
    parts = [_part(entry, verdict, each) for verdict, each in judged]
    return {"test": test, "parts": parts}


def _part(entry: Entry, verdict: Verdict, judged: TestVerdict) -> dict[str, Any]:
    """Return what the page says of a test on a device."""
    test, cells = judged.test, judged.cells
    kept = entry.pruning and test.metric == "speedup" and losses(cells, entry.pruning)
    return {
        "judged": judged,
        "style": STYLES[judged.word],
        "device": verdict.device if cells else "",
        "figure": forest(test, cells),
        "losses": kept or Markup(""),
        "cells": _table(test, cells, judged.others),
        "change": _change(judged, entry.asked.claim),
    }


def _table(test: Test, cells: Sequence[Cell], others: Sequence[Cell]) -> Markup:
    """Write the cells that count, and below them other measurements of the same; best first."""
    if not cells:
        return Markup("")
    up = test.at_least is not None
    cells, others = (
        sorted(each, key=lambda cell: (cell.reason, -cell.value if up else cell.value))
        for each in (cells, others)
    )
    heads = ["cell", f">{test.metric}, {SIGNS[test.unit].strip()}", "is", "subject", "baseline"]
    heads += [">at most", "GPU", "run"]
    rows = []
    for number, cell in enumerate([*cells, *others]):
        state = "–" if cell.reason else cell_state(test, cell)
        bound = largest_value(test, cell) if up else None
        rows.append(
            [
                cell.label,
                cell.reason or value_text(test, cell),
                "not counted" if number >= len(cells) else state,
                cell.subject,
                cell.baseline,
                f"{bound:.3g}" if bound else "–",
                where(cell),
                f"{cell.run}, {amount(cell.processes, 'process')}",
            ]
        )
    title = "The cell" if len(cells) == 1 else f"The {len(cells)} cells"
    if others:
        title += f", and {amount(len(others), 'other measurement')} of them"
    return folded(title, html_table(*without_dashes(heads, rows)))


def _change(judged: TestVerdict, claim: Claim) -> str:
    """Say what would change the verdict on a test."""
    asked = judged.test.limit_text
    match judged.word:
        case Word.REPRODUCED:
            return f"A run of 6 processes in which the deciding cell misses {asked}."
        case Word.PARTLY if judged.test.proxy:
            rest = "the other tests ask for it"
            return f"Measuring what was claimed itself: {claim.missing or rest}."
        case Word.PARTLY | Word.REFUTED:
            how = "confirmed cell" if judged.test.quantifier == "exists" else "run of all cells"
            return f"A {how} beyond {asked}: a faster kernel, or a slower baseline."
        case Word.NOT_CARRIED_OVER:
            return f"The same measurement on {' or '.join(claim.hardware.gpus) or 'that GPU'}."
        case Word.INCONCLUSIVE:
            return "Six processes or more, and for a chosen cell a run made for it alone."
    return claim.missing or "A kernel, a library or a device that can run it."
