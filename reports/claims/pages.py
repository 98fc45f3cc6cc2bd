"""A page per claim and a table of all claims, in a separate folder or in a site.

claims/index.html    every claim with its verdict on each GPU
claims/NAME.html     quote, verdict, published conditions and ours, cells

The strongest verdict comes first, so that title and tables agree.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from markupsafe import Markup, escape

from sparsebench.reports.claims.sheets import STYLES, closest, plain_words
from sparsebench.reports.figures._html import fold_away, note
from sparsebench.reports.page import code, content, render
from sparsebench.reports.site.pages import Site, stylesheet
from sparsebench.reports.tables import html_table, without_dashes
from sparsebench.results.claims.cells import ClaimCell, largest_value, value_text
from sparsebench.results.claims.decision import Word, cell_state
from sparsebench.results.claims.metrics import SIGNS
from sparsebench.results.claims.planned import PlannedClaim
from sparsebench.results.claims.schema import Test
from sparsebench.results.claims.verdict import Verdict
from sparsebench.results.formatting import amount, capital, join_words, plain

CHECK = "sparsebench claims check {} --replicates 8"
UNMEASURED = "not measured"  # our value of a condition without one
OPEN_LINES = 12  # of a table that needs no click
WHICH_COUNTS = (
    "One measurement of each cell counts, so a larger one may stand below: reliable runs come "
    "first, then those with the fastest subject and baseline of all, confirming and longer ones."
)


@dataclass(frozen=True)
class ClaimEntry:
    """A claim with its cells and its verdicts."""

    planned: PlannedClaim
    cells: Sequence[ClaimCell] = ()

    @cached_property
    def verdicts(self) -> Sequence[Verdict]:
        return self.planned.verdicts(self.cells)


def entries(
    claims: Sequence[PlannedClaim], cells: Mapping[str, Sequence[ClaimCell]]
) -> list[ClaimEntry]:
    """Judge claims by their cells."""
    return [ClaimEntry(c, [*cells.get(c.name, ()), *c.model_cells]) for c in claims]


def pages(
    judged: Sequence[ClaimEntry], site: Site, gpus: Collection[str] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of every page; `gpus` are as for `lines`."""
    table = lines(judged, gpus)
    yield (
        "claims/index.html",
        render("claims.html", site=site, lines=table, tally=tally(table), choices=choices(table)),
    )
    for entry in judged:
        page = render(
            "claim.html",
            site=site,
            claim=entry.planned.claim,
            name=entry.planned.name,
            verdicts=[(each, STYLES[each.word], plain_words(each)) for each in entry.verdicts],
            conditions=conditions(entry),
            tests=[(test, _parts(entry, test, site)) for test in entry.planned.claim.tests],
            commands=entry.planned.claim.commands or [CHECK.format(entry.planned.name)],
            prose=prose,
            runs=_runs(entry.cells, site),
        )
        yield f"claims/{entry.planned.name}.html", page


def alone(judged: Sequence[ClaimEntry], version: str) -> Iterator[tuple[str, str]]:
    """Yield the pages and their style sheet, for a separate folder."""
    site = Site(version=version, whole=False)
    yield "style.css", stylesheet()
    yield "report.js", content("report.js")
    yield from pages(judged, site)


def prose(text: str) -> Markup:
    """Return a line of a claim with a capital first letter, and backticks as code."""
    return code(capital(text))


def lines(
    judged: Sequence[ClaimEntry], gpus: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """Return a line per claim and device, for the tables of all claims.

    The clearest verdicts come first. With `gpus`, devices that are none of them are left out,
    because claims are about GPUs.
    """
    words = [*Word]
    return [
        {
            "name": entry.planned.name,
            "title": entry.planned.claim.title,
            "source": entry.planned.claim.source,
            "device": verdict.device.removeprefix("NVIDIA "),
            "word": str(verdict.word),
            "text": plain_words(verdict),
            "style": STYLES[verdict.word],
            "basis": str(verdict.basis),
            "tendency": str(verdict.tendency or ""),
            "why": verdict.why,
            **_numbers(verdict),
        }
        for entry in sorted(judged, key=lambda entry: words.index(entry.verdicts[0].word))
        for verdict in entry.verdicts
        if gpus is None or not verdict.device or verdict.device in gpus
    ]


def tally(table: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, int]]:
    """Count the claims by their first verdict: its word, its style and the number."""
    words = [*{line["name"]: line["word"] for line in reversed(table)}.values()]
    return [(str(w), STYLES[w], words.count(str(w))) for w in Word if str(w) in words]


def choices(table: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the values by which the table of all claims can be filtered."""
    names = {"verdict": "word", "GPU": "device", "conditions": "basis"}
    return {
        label: sorted({str(line[name]) for line in table} - {""}) for label, name in names.items()
    }


def _numbers(verdict: Verdict) -> dict[str, str]:
    """Return the claimed and the measured value of the test that is closest to the claim.

    `tested` is our threshold, if the source states the value in other words.
    """
    judged = closest(verdict)
    test = judged.test if judged else verdict.tests[0].test if verdict.tests else None
    if test is None:
        return {"claimed": "–", "measured": "–", "scope": "", "tested": ""}
    names = [test.name] if judged and len(verdict.tests) > 1 else []
    names += [f"a proxy: {test.proxy}"] if judged and test.proxy else []
    cells = [cell for cell in judged.deciding if not cell.reason] if judged else []
    return {
        "claimed": test.claimed_text,
        "tested": f"tested: {test.sentence}" if test.claimed else "",
        "measured": value_text(test, cells[0]) if cells else "–",
        "scope": "; ".join(names),
    }


def conditions(entry: ClaimEntry) -> list[tuple[str, str, str]]:
    """Return the name, the published value and ours of each condition."""
    devices = join_words([verdict.device for verdict in entry.verdicts if verdict.device])
    return [
        (
            name,
            "unknown" if condition.published is None else plain(condition.published),
            plain(condition.ours or (devices if name == "GPU" else "") or UNMEASURED),
        )
        for name, condition in entry.planned.claim.conditions.items()
    ]


def _runs(cells: Sequence[ClaimCell], site: Site) -> list[tuple[Markup, str, int]]:
    """Return the name, the commit and the most processes of each run with a cell."""
    most: dict[tuple[Markup, str], int] = {}
    for cell in cells:
        key = _run_link(cell, site), cell.commit
        most[key] = max(cell.processes, most.get(key, 0))
    return sorted((*key, count) for key, count in most.items())


def _run_link(cell: ClaimCell, site: Site) -> Markup:
    """Name the run of a cell, or both runs of a ratio; a file of a model has no page."""
    link = Markup('<a href="../{0}/index.html">{0}</a>')
    has_page = site.whole and cell.case_ids
    names = [link.format(run) if has_page else escape(run) for run in cell.run.split(" over ")]
    return Markup(" over ").join(names)


def _parts(entry: ClaimEntry, test: Test, site: Site) -> list[dict[str, Any]]:
    """Return the parts of the page about a test, one for each device."""
    return [
        {
            "judged": judged,
            "style": STYLES[judged.word],
            "device": verdict.device if judged.cells else "",
            "cells": _table(test, judged.cells, judged.others, site),
        }
        for verdict in entry.verdicts
        for judged in verdict.tests
        if judged.test.name == test.name
    ]


def _table(
    test: Test, cells: Sequence[ClaimCell], others: Sequence[ClaimCell], site: Site
) -> Markup:
    """Write the cells that count and, below them, other measurements of them, best first."""
    if not cells:
        return Markup("")
    metric = f">{test.metric.replace('_', ' ')}, {SIGNS[test.unit].strip()}"
    heads = ["cell", metric, "is", "subject", "baseline", ">at most", "GPU", "run"]
    sign, rows = -1 if test.upward else 1, []
    for cell in sorted([*cells, *others], key=lambda c: (c in others, c.reason, sign * c.value)):
        state = "–" if cell.reason else cell_state(test, cell)
        bound = largest_value(test, cell) if test.upward else None
        rows.append(
            [
                cell.label,
                cell.reason or value_text(test, cell),
                "not counted" if cell in others else state,
                cell.subject,
                cell.baseline,
                f"{bound:.3g}" if bound else "–",
                cell.device.removeprefix("NVIDIA "),
                _run_link(cell, site) + f", {amount(cell.processes, 'process')}",
            ]
        )
    title = "The cell" if len(cells) == 1 else f"The {len(cells)} cells"
    if others:
        title += f", and {amount(len(others), 'other measurement')} of them"
    table = html_table(*without_dashes(heads, rows))
    table += note(WHICH_COUNTS) if others else ""
    return table if len(rows) <= OPEN_LINES else fold_away(title, table)
