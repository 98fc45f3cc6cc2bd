"""A page and a badge per claim and a table of all claims, in a separate folder or in a site.

claims/index.html    every claim with its verdict on each GPU
claims/NAME.html     quote, verdict, published conditions and ours, bounds, cells
claims/NAME.svg      the verdict as a badge

The strongest verdict comes first, so that title, badge and tables agree. Simulated cells count only
if there are no measured ones.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from sparsebench.reports.claims.announcements import for_site
from sparsebench.reports.claims.forest import forest, where
from sparsebench.reports.claims.sheets import STYLES
from sparsebench.reports.figures._html import fold_away, note
from sparsebench.reports.page import code, render
from sparsebench.reports.site.pages import Site, stylesheet
from sparsebench.reports.tables import html_table, without_dashes
from sparsebench.results.claims.author_tables import AuthorTable, read_tables
from sparsebench.results.claims.cells import Cell, judging_cells, largest_value, value_text
from sparsebench.results.claims.decision import OPEN, Word, cell_state
from sparsebench.results.claims.metrics import SIGNS
from sparsebench.results.claims.planned import PlannedClaim
from sparsebench.results.claims.schema import Claim, Condition, Test
from sparsebench.results.claims.verdict import Basis, TestVerdict, Verdict
from sparsebench.results.formatting import NONE, amount, capital, percent, plain

LEVELS = ("level", "sparsity")  # fields that are written as percentages
UNMEASURED = "not measured"  # our value of a condition without a cell
MOST_VALUES = 6  # values of a field in one cell of the table of conditions
UNDECIDED = *map(str, OPEN), str(Word.NOT_TESTABLE)
WHICH_COUNTS = (
    "If a cell was measured several times, one measurement counts, so a larger value may stand "
    "below. Runs whose A/A pairs agree come first; then those that timed the fastest subject and "
    "baseline of all; then those that confirm chosen cells; then those that searched for their "
    "configurations; then those with the most processes; then the narrowest interval."
)
BADGE = {
    Word.REPRODUCED: "#00694c",
    Word.PARTLY: "#8a5a00",
    Word.REFUTED: "#a3261c",
    Word.NOT_CARRIED_OVER: "#8a4b00",
    Word.NOT_SETTLED: "#0a58a8",
    Word.NOT_MEASURED: "#5d6369",
    Word.NOT_TESTABLE: "#5d6369",
}


@dataclass(frozen=True)
class Entry:
    """A claim with its cells, its verdicts, and the authors' own tables."""

    planned: PlannedClaim
    cells: Sequence[Cell] = ()
    tables: Sequence[AuthorTable] = ()
    verdicts: Sequence[Verdict] = field(default_factory=list)


def entries(
    claims: Sequence[PlannedClaim], cells: Mapping[str, Sequence[Cell]], tables: Path | None = None
) -> list[Entry]:
    """Judge claims by their cells; simulated cells count only if all are simulated.

    tables  a folder with files of the authors. Raises ResultError if one has other columns
    """
    counted = judging_cells(
        {claim.name: [*cells.get(claim.name, ()), *claim.model_cells] for claim in claims}
    )
    return [
        Entry(
            claim,
            counted[claim.name],
            read_tables(claim.claim.tables, tables) if tables else (),
            claim.verdicts(counted[claim.name]),
        )
        for claim in claims
    ]


def pages(
    judged: Sequence[Entry], site: Site, gpus: Collection[str] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of every page and badge; `gpus` are as for `lines`."""
    table = lines(judged, gpus)
    sentences = for_site({entry.planned.name: entry.verdicts for entry in judged})
    yield (
        "claims/index.html",
        render(
            "claims.html",
            site=site,
            lines=table,
            tally=tally(table),
            share=share(table),
            announcements=sentences,
        ),
    )
    for entry in judged:
        page = render(
            "claim.html",
            site=site,
            claim=entry.planned.claim,
            name=entry.planned.name,
            verdicts=[(verdict, STYLES[verdict.word]) for verdict in entry.verdicts],
            conditions=conditions(entry),
            bounds=_bounds(entry),
            tests=[_test(entry, test, site) for test in entry.planned.claim.tests],
            tables=[(each.table, _rows_of_authors(each)) for each in entry.tables],
            commands=_commands(entry.planned),
            prose=prose,
            runs=_runs(entry.cells, site),
        )
        yield f"claims/{entry.planned.name}.html", page
        yield f"claims/{entry.planned.name}.svg", badge(entry)


def alone(judged: Sequence[Entry], version: str) -> Iterator[tuple[str, str]]:
    """Yield the pages and their style sheet, for a separate folder."""
    site = Site(version=version, whole=False)
    yield "style.css", stylesheet()
    yield from pages(judged, site)


def prose(text: str) -> Markup:
    """Return a line of a claim with a capital first letter, and backticks as code."""
    return code(capital(text))


def lines(judged: Sequence[Entry], gpus: Collection[str] | None = None) -> list[dict[str, Any]]:
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
            "simulated": verdict.simulated,
            "word": str(verdict.word),
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
    words = [line["word"] for line in _first(table)]
    return [(str(w), STYLES[w], words.count(str(w))) for w in Word if str(w) in words]


def share(table: Sequence[Mapping[str, Any]]) -> str:
    """Say how many claims have a verdict on a GPU that they name, and by no proxy."""
    first = _first(table)
    bases = [line["basis"] for line in first if line["word"] not in UNDECIDED]
    count = bases.count(str(Basis.AS_PUBLISHED))
    return f"{count} of {amount(len(first), 'claim')}"


def _first(table: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the line of each claim's first verdict."""
    first: dict[str, Mapping[str, Any]] = {}
    for line in table:
        first.setdefault(line["name"], line)
    return [*first.values()]


def _numbers(verdict: Verdict) -> dict[str, str]:
    """Return the claimed and the measured value of the test that is closest to the claim.

    If several are equally close, the one that decides the verdict comes first.
    """
    tests = sorted(
        verdict.tests, key=lambda each: (each.test.distance, each.word is not verdict.word)
    )
    for judged in tests:
        test, cells = judged.test, [cell for cell in judged.deciding if not cell.reason]
        if cells:
            sign = "" if test.at_least is not None else "at most "
            numbers = {"claimed": sign + test.limit_text, "measured": value_text(test, cells[0])}
            return numbers | {"scope": _scope(verdict, test)}
    claimed = tests[0].test.limit_text if tests else "–"
    return {"claimed": claimed, "measured": "–", "scope": ""}


def _scope(verdict: Verdict, test: Test) -> str:
    """Say what a value is of, unless it is of all that was claimed."""
    words = [test.name] if len(verdict.tests) > 1 else []
    return "; ".join([*words, *([f"a proxy: {test.proxy}"] if test.proxy else [])])


def badge(entry: Entry) -> str:
    """Return a claim's first verdict as an image."""
    first = entry.verdicts[0]
    right = str(first.word) + (f" (tends to {first.tendency})" if first.tendency else "")
    right += f" · {first.device.removeprefix('NVIDIA ')}" if first.device else ""
    right += " · simulated" if first.simulated else ""
    left = entry.planned.name
    widths = [round(6.6 * len(text)) + 16 for text in (left, right)]
    colour = BADGE[first.word]
    return render("site_badge.svg", left=left, right=right, widths=widths, colour=colour)


def _commands(planned: PlannedClaim) -> list[str]:
    """Return the commands that measure and judge a claim again."""
    tests, commands = planned.claim.tests, []
    if not tests or not all(test.of_file for test in tests):
        commands += [f"sparsebench claims check {planned.name} --replicates 8"]
    if planned.claim.commands:
        commands += planned.claim.commands
    elif any(test.trained for test in tests):
        commands += [
            "sparsebench train-lm --pattern small_world,uniform --seeds 8 --out trained.json"
        ]
    elif any(test.whole for test in tests):
        commands += ["sparsebench whole --energy 30 --out whole.json"]
    if planned.claim.tables:
        commands += [f"sparsebench claims report {planned.name} --tables CHECKOUT --out pages"]
    if any(test.of_file for test in tests):
        files = [word for line in commands for word in line.split() if word.endswith(".json")]
        commands += [f"sparsebench claims report {planned.name} --from {' --from '.join(files)}"]
    return commands


def conditions(entry: Entry) -> list[tuple[str, str, str, str]]:
    """Return the name, the published value, ours and a mark (=, ≠, ?) of each condition."""
    measured = [cell for cell in entry.cells if not cell.reason]
    compared = []
    for name, condition in entry.planned.claim.conditions.items():
        published = "unknown" if condition.published is None else plain(condition.published)
        ours = _ours(name, condition, measured)
        compared.append((name, published, ours, _mark(condition, published, ours)))
    return compared


def _ours(name: str, condition: Condition, cells: Sequence[Cell]) -> str:
    if condition.ours is not None:
        return condition.ours
    if not cells:
        return UNMEASURED
    if condition.field is None and name.lower() == "gpu":
        values = {cell.device for cell in cells}
    else:
        field_name = condition.field or name
        write = percent if field_name in LEVELS else plain
        values = {
            write(cell.fields[field_name]) for cell in cells if field_name in cell.fields
        } or {NONE}
    texts = sorted(values, key=lambda text: (len(text), text))
    more = f" and {len(texts) - MOST_VALUES} more" if len(texts) > MOST_VALUES else ""
    return ", ".join(texts[:MOST_VALUES]) + more


def _mark(condition: Condition, published: str, ours: str) -> str:
    if condition.published is None or (condition.ours is None and ours in (NONE, UNMEASURED)):
        return "?"
    if condition.same is not None:
        return "=" if condition.same else "≠"
    values, wanted = ours.casefold().split(", "), published.casefold()
    if wanted in values or {*values} <= {*re.split(", | and | or ", wanted)}:
        return "="
    if ends := re.fullmatch(r"([\d.]+) to ([\d.]+)\D*", wanted):
        least, most = map(float, ends.groups())
        counts = [re.fullmatch(r"([\d.]+)( %)?", value) for value in values]
        if all(number and least <= float(number[1]) <= most for number in counts):
            return "="
    word, numbers = not re.search(r"\d", published), re.search(r"\d", ours)
    named = re.search(r"[A-Za-z]{3}", re.sub(r" and \d+ more$", "", ours))
    return "?" if word and numbers and not named else "≠"


def _runs(cells: Sequence[Cell], site: Site) -> list[tuple[Markup, str, str]]:
    """Return the name, the commit and the most processes of each run with a cell."""
    most: dict[tuple[Markup, str], int] = {}
    for cell in cells:
        key = _run_link(cell, site), cell.commit
        most[key] = max(cell.processes, most.get(key, 0))
    return sorted((*key, amount(count, "process")) for key, count in most.items())


def _run_link(cell: Cell, site: Site) -> Markup:
    """Name the run of a cell, or both runs of a ratio; a file of a model has no page."""
    link = Markup('<a href="../{0}/index.html">{0}</a>')
    has_page = site.whole and cell.case_ids
    names = [link.format(run) if has_page else escape(run) for run in cell.run.split(" over ")]
    return Markup(" over ").join(names)


def _bounds(entry: Entry) -> list[str]:
    """Return a sentence per bound: those that the claim gives, and those of the tests' cells."""
    sentences, planned = [], entry.planned
    for bound in planned.claim.bounds:
        part = f", with {100 * bound.share:.3g} % of the whole" if bound.share < 1 else ""
        why = f" ({bound.share_from})" if bound.share_from else ""
        sentences.append(f"{bound.of}: at most {bound.most:.3g}×{part}{why}.")
    for test in planned.claim.tests:
        bounds = planned.bounds.get(test.name, {}).values()
        if bounds:
            ends = " to ".join(dict.fromkeys(f"{end:.3g}" for end in (min(bounds), max(bounds))))
            beyond = (
                " No such kernel can meet the threshold."
                if test.name in planned.unreachable
                else ""
            )
            efficient = "for a kernel that is as efficient as the dense baseline"
            cells = [cell for cell in entry.cells if cell.test == test.name and not cell.reason]
            if test.metric == "speedup" and any(cell.low > max(bounds) for cell in cells):
                beyond += " Cells above it have a baseline that is less efficient than the kernel."
            sentences.append(f"{test.name}: at most {ends}× {efficient}.{beyond}")
    return sentences


def _test(entry: Entry, test: Test, site: Site) -> dict[str, Any]:
    judged = [(v, j) for v in entry.verdicts for j in v.tests if j.test.name == test.name]
    parts = [_part(entry, verdict, each, site) for verdict, each in judged]
    return {"test": test, "parts": parts}


def _part(entry: Entry, verdict: Verdict, judged: TestVerdict, site: Site) -> dict[str, Any]:
    """Return the part of the page about a test on a device."""
    test, cells = judged.test, judged.cells
    return {
        "judged": judged,
        "style": STYLES[judged.word],
        "device": verdict.device if cells else "",
        "figure": forest(test, cells),
        "cells": _table(test, cells, judged.others, site),
        "change": _change(judged, entry.planned.claim),
    }


def _table(test: Test, cells: Sequence[Cell], others: Sequence[Cell], site: Site) -> Markup:
    """Write the cells that count and, below them, other measurements of them, best first."""
    if not cells:
        return Markup("")
    up = test.at_least is not None
    cells, others = (
        sorted(each, key=lambda cell: (cell.reason, -cell.value if up else cell.value))
        for each in (cells, others)
    )
    heads = [
        "cell",
        f">{test.metric.replace('_', ' ')}, {SIGNS[test.unit].strip()}",
        "is",
        "subject",
        "baseline",
    ]
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
                _run_link(cell, site) + f", {amount(cell.processes, 'process')}",
            ]
        )
    title = "The cell" if len(cells) == 1 else f"The {len(cells)} cells"
    if others:
        title += f", and {amount(len(others), 'other measurement')} of them"
    table = html_table(*without_dashes(heads, rows))
    return fold_away(title, table + note(WHICH_COUNTS) if others else table)


def _rows_of_authors(published: AuthorTable) -> Markup:
    """Write the authors' rows, as they are in their file."""
    names = [*published.table.show]
    heads = [names[0], *(f">{name}" for name in names[1:])]
    return html_table(heads, [[*row] for row in published.rows])


def _change(judged: TestVerdict, claim: Claim) -> str:
    """Describe a measurement that would change the verdict on a test."""
    threshold = judged.test.limit_text
    match judged.word:
        case Word.REPRODUCED:
            return f"A run with 6 processes in which the deciding cell misses {threshold}."
        case Word.PARTLY if judged.test.proxy:
            rest = f", which needs {claim.missing}" if claim.missing else ": see the other tests"
            return f"A measurement of the claimed quantity itself{rest}."
        case Word.PARTLY | Word.REFUTED:
            how = "confirmed cell" if judged.test.quantifier == "exists" else "run of all cells"
            if judged.test.at_least is None:
                return f"A {how} with at most {threshold}: a slower kernel, or a faster baseline."
            return f"A {how} with at least {threshold}: a faster kernel, or a slower baseline."
        case Word.NOT_CARRIED_OVER:
            return f"The same measurement on {' or '.join(claim.hardware.gpus) or 'that GPU'}."
        case Word.NOT_SETTLED | Word.NOT_MEASURED:
            return "Six processes or more, and a separate run of selected cells."
    needed = claim.missing or "a kernel, a library or a device that can run it"
    return f"A test, which needs {needed}."
