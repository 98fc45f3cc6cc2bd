"""The pages of a site, written from the cards of its runs without reading rows.

index.html            the finding for each GPU and number of tokens, with a grid of formats
runs.html             every run with its question, its number and its state; the chart over commits
kernels.html          the formats and the kernels
agreement.html        how often a second card agrees with the first (reports/coverage.py)
welcome.html          the GPUs with and without rows, and how to send a result
find.html             a search over all cells, with cells.js and find.js (reports/cells.py)
glossary.html         the words for outcomes (results/statistics/outcome.py)
formats/NAME.html     a format: its best contests, its kernels, its cases over all runs
kernels/NAME.html     the same for a kernel
runs/SLUG/index.html  leads to the run, for links from before runs had short addresses
feed.xml, sitemap.xml, badges/SLUG.svg, style.css, report.js
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from types import MappingProxyType
from typing import Any

import pandas as pd

from sparsebench._gpus import without_rows
from sparsebench.reports.build import Surrounding
from sparsebench.reports.cells import cells, script
from sparsebench.reports.coverage import COVERAGE, STRATA, coverage_tables, explanation
from sparsebench.reports.page import content, render
from sparsebench.reports.site import commits, grids
from sparsebench.reports.site.cards import Card, confirmation, lines
from sparsebench.results.claims.planned import PlannedClaim
from sparsebench.results.comparison.repeats import Verdicts, repeats
from sparsebench.results.comparison.sides import short_name
from sparsebench.results.formatting import capital
from sparsebench.results.run.bundle import Redaction
from sparsebench.results.tables.families import DEFAULT, family
from sparsebench.results.tables.grid import EVERY

WIDTH = 6.2  # pixels per character of a badge


@dataclass(frozen=True)
class Site:
    """The settings of a site.

    base      address of the site with a final slash, or ""; feeds and link previews need it
    source    address of the source code, or ""
    formats   first line of each format's docstring, by name; the same for kernels
    version   of sparsebench
    claims    the claims to judge
    whole     whether the site has runs; pages of claims alone have no index
    prune     whether it has the pages of advice (prune.py, quantize.py, attention.py)
    """

    base: str = ""
    source: str = ""
    formats: Mapping[str, str] = field(default_factory=dict)
    kernels: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    claims: Sequence[PlannedClaim] = ()
    whole: bool = True
    prune: bool = False


def pages(
    cards: Sequence[Card],
    site: Site,
    others: Collection[str] = (),
    earlier: Sequence[Card] = (),
    brief: Mapping[str, str] = MappingProxyType({}),
    current: Sequence[Card] = (),
) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of every page that shows cards, and of what all pages share.

    `others` are the paths of the other pages (claims, comparisons, advice), for the sitemap.
    `earlier` are versions of runs that have newer ones: their links stay, and they have points in
    the chart over commits.
    `brief` answers "Should I prune?" in a sentence for each GPU.
    `current` are the cards of runs that no newer one replaced; grids and the search show their
    cells. By default all cards are. A format or a kernel that only replaced runs have keeps its
    cells.
    """
    cards = sorted(cards, key=lambda card: (card.started, card.slug), reverse=True)
    every = lines(cards).assign(m=lambda table: pd.to_numeric(table.m))
    kinds, kernels = sorted(every.kind.unique()), sorted(every.kernel.unique())
    shared = {"site": site, "cards": cards, "page_of": page_of, "named": grids.format_name}
    yield "style.css", stylesheet()
    yield "report.js", content("report.js")
    slugs = {card.slug for card in current or cards}
    shown = every[every.run.isin([card.address for card in cards if card.slug in slugs])]
    findings = _findings(shown, cards)
    yield "index.html", render("site_index.html", **shared, gpus=findings, brief=brief)
    over_commits = commits.series([*cards, *earlier])
    changes = commits.chart(over_commits) if over_commits else ()
    yield (
        "runs.html",
        render("site_runs.html", **shared, groups=_groups(cards, slugs), changes=changes),
    )
    yield "kernels.html", render("site_kernels.html", **shared, kinds=kinds, kernels=kernels)
    for what, names, docs in (("format", kinds, site.formats), ("kernel", kernels, site.kernels)):
        column = "kind" if what == "format" else "kernel"
        for name in names:
            cases = shown[shown[column] == name]
            cases = cases if len(cases) else every[every[column] == name]
            yield page_of(what, name), _name_page(what, name, docs.get(name, ""), cases, shared)
    for card in (*cards, *earlier):
        yield f"badges/{card.slug}.svg", _badge(card)
        if card.address != f"runs/{card.slug}":
            yield f"runs/{card.slug}/index.html", render("site_moved.html", site=site, card=card)
    yield "glossary.html", render("site_glossary.html", site=site)
    yield "agreement.html", _agreement([card for card in cards if card.slug in slugs], site)
    yield "welcome.html", _welcome(cards, site)
    every_cell = cells(shown)
    yield "find.html", render("site_find.html", **shared, finds=True, count=len(every_cell))
    yield "cells.js", script(every_cell)
    yield "find.js", content("find.js")
    yield "feed.xml", render("site_feed.xml", **shared)
    if site.base:
        stems = "runs", "kernels", "find", "glossary", "agreement", "welcome"
        paths = ["", *(f"{n}.html" for n in stems), *others, *(f"{c.address}/" for c in cards)]
        paths += [page_of(w, n) for w, ns in (("format", kinds), ("kernel", kernels)) for n in ns]
        yield "sitemap.xml", render("site_sitemap.xml", site=site, paths=paths)
        yield "robots.txt", f"User-agent: *\nAllow: /\nSitemap: {site.base}sitemap.xml\n"


def around(
    card: Card,
    site: Site,
    removed: Redaction,
    downloads: Mapping[str, Any],
    others: Sequence[Card] = (),
    made_from: str = "",
    newer: str = "",
) -> Surrounding:
    """Return what a site adds to the report of a run.

    `others` confirm or repeat it; `made_from` is the address of the run that it confirms itself,
    and `newer` that of its newest version.
    """
    values = {"card": card, "site": site, "removed": removed, "downloads": downloads}
    relations = [_relation(card, other) for other in others]
    relations.sort(key=lambda relation: not relation["gain"])  # of the headline first
    values |= {"others": relations, "made_from": made_from}
    values |= {"cite": citation_of(card), "newer": newer}
    return Surrounding(
        **{
            part: render(f"site_{part}.html", **values)
            for part in ("head", "top", "evidence", "foot")
        }
    )


def citation_of(card: Card) -> str:
    """Return the citation of a run."""
    return (
        f"sparsebench run {card.slug}: {card.suite} on {card.gpu}, {card.started[:10]}, "
        f"commit {card.commit[:12] or 'unknown'}, manifest SHA-256 {card.identity}."
    )


def page_of(what: str, name: str) -> str:
    """Return the path of a format's or kernel's page; a name may contain any character."""
    return f"{what}s/{safe(name)}.html"


def safe(name: str) -> str:
    """Return a name that is safe as a file name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:80] or "unnamed"


def stylesheet() -> str:
    """Return the style of every page of a site."""
    return content("report.css") + content("site.css")


def _relation(card: Card, other: Card) -> dict[str, str]:
    """Say how another run confirms or repeats a run, and the gain that it found there."""
    same = set(card.units) & set(other.units)
    where = " on the same card" if same else " on another card" if card.units else ""
    gain = confirmation(card, other)
    how = "Confirmed alone" if "alone" in other.role else "Measured again"
    how = how if gain else f"Other cases {how.lower()}"
    return {"address": other.address, "how": f"{how}{where}", "gain": gain}


def _agreement(cards: Sequence[Card], site: Site) -> str:
    """Return the page of the cases that two cards measured."""
    cases = repeats(Verdicts(**card.verdicts) for card in cards)
    return render(
        "site_agreement.html",
        site=site,
        sentences=explanation(cases),
        tables=[*zip((STRATA, COVERAGE), coverage_tables(cases), strict=True)],
        addresses={card.address for card in cards},
    )


def _welcome(cards: Sequence[Card], site: Site) -> str:
    """Return the page that asks for results: what each device has, and the GPUs without rows."""
    by_gpu: dict[str, list[Card]] = {}
    for card in cards:
        by_gpu.setdefault(card.gpu, []).append(card)
    measured = [
        {
            "gpu": gpu,
            "cards": len({unit for card in of_gpu for unit in card.units}),
            "runs": len(of_gpu),
            "cases": sum(card.cases for card in of_gpu),
        }
        for gpu, of_gpu in sorted(by_gpu.items(), key=lambda entry: -len(entry[1]))
    ]
    wanted = without_rows(by_gpu)
    return render("site_welcome.html", site=site, measured=measured, wanted=wanted)


def _findings(every: pd.DataFrame, cards: Sequence[Card]) -> list[dict[str, Any]]:
    """Return the GPUs of the first page with their grids; the one with the most runs is first."""
    by_address, beside = {card.address: card for card in cards}, grids.beside(every)
    gpus = []
    for gpu, of_gpu in every.groupby("gpu", sort=False):
        drawn = grids.site_grids(of_gpu, each_shape=True)
        views = [
            {"grid": each, "confirmed": _confirmation(each, by_address[each.top["run"]], cards)}
            for each in drawn
        ]
        facts = {"name": str(gpu), "runs": of_gpu.run.nunique(), "views": views}
        facts |= {"beside": beside.get(str(gpu), [])}
        whole = [i for i, each in enumerate(drawn) if each.shape == EVERY]
        facts |= {"front": views[whole[-1]]} if whole else {}
        gpus += [facts] if drawn else []
    return sorted(gpus, key=lambda gpu: -gpu["runs"])


def _confirmation(grid: grids.SiteGrid, card: Card, cards: Sequence[Card]) -> dict[str, str] | None:
    """Return the run that confirms a grid's largest gain, on another card if there is one.

    The gain of `default` is that of the kernel that it ran, which a headline names.
    """
    top, case = grid.top, card.headline.get("case")
    named = next((line for line in card.lines if line["case_id"] == case), None)
    if not named or any(named[part] != top[part] for part in ("problem_id", "kind", "tile")):
        return None
    if top["kernel"] not in (named["kernel"], DEFAULT):
        return None
    others = [_relation(card, other) for other in cards if other.source == card.origin]
    with_gain = filter(itemgetter("gain"), others)
    return max(with_gain, key=lambda other: "another" in other["how"], default=None)


def _groups(cards: Sequence[Card], current: Collection[str]) -> list[dict[str, Any]]:
    """Return the runs by GPU, measured ones first and replaced ones last.

    Those of one question lie together. `current` are the slugs of runs that no other one replaced.
    """
    groups = []
    for gpu in dict.fromkeys(card.gpu for card in cards):
        of_gpu = sorted((c for c in cards if c.gpu == gpu), key=attrgetter("suite", "name"))
        of_gpu.sort(key=lambda c: (c.slug not in current, bool(c.role), not c.verdict))
        groups.append({"name": gpu, "cards": of_gpu, "current": current})
    return sorted(groups, key=lambda group: -len(group["cards"]))


def _name_page(what: str, name: str, doc: str, cases: pd.DataFrame, shared: dict[str, Any]) -> str:
    return render(
        "site_name.html",
        **shared,
        what=what,
        name=name,
        title=capital(grids.format_name(name)) if what == "format" else name,
        doc=doc,
        family="" if what == "format" else family(name),
        wins=grids.wins(cases),
        cases=grids.cases(cases),
        grids=[
            each
            for _, of_gpu in cases.groupby("gpu", sort=False)
            for each in grids.site_grids(of_gpu)
        ],
        others=sorted(cases.kernel.unique() if what == "format" else cases.kind.unique()),
    )


def _badge(card: Card) -> str:
    name, state, _ = card.badges[0]
    gain = f"{headline} over dense" if (headline := card.headline.get("gain")) else card.gain
    texts = f"{short_name(card.gpu)} · {card.name}"[:60], f"{gain} · {state}"
    widths = [round(WIDTH * len(text)) + 16 for text in texts]
    colour = "#00694c" if name == "verdict" else "#0a58a8"
    return render("site_badge.svg", card=card, texts=texts, widths=widths, colour=colour)
