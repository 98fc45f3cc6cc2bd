"""The pages of a site, written from the cards of its runs without reading rows.

index.html            which format beats dense for which sizes, and from which sparsity on
glossary.html         the words for outcomes (results/outcome.py)
formats/NAME.html     a format: its best contests, its kernels, its cases over all runs
kernels/NAME.html     the same for a kernel
feed.xml, sitemap.xml, CITATION.cff, badges/SLUG.svg, badges/SLUG.json, style.css
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import yaml

from sparsebench.reports.build import Surrounding
from sparsebench.reports.page import content, render
from sparsebench.reports.site import grids
from sparsebench.reports.site.cards import Card, lines, pays
from sparsebench.results.bundle import Removed
from sparsebench.results.claims.planned import PlannedClaim
from sparsebench.results.families import family

WIDTH = 6.6  # pixels per character of a badge


@dataclass(frozen=True)
class Site:
    """The settings of a site.

    base      address of the site with a final slash, or ""; feeds and link previews need it
    formats   first line of each format's docstring, by name; the same for kernels
    version   of sparsebench
    claims    the claims to judge
    feed      whether the site has a feed and a page to cite
    """

    base: str = ""
    formats: Mapping[str, str] = field(default_factory=dict)
    kernels: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    claims: Sequence[PlannedClaim] = ()
    feed: bool = True


def pages(
    cards: Sequence[Card],
    site: Site,
    verdicts: Sequence[Mapping[str, Any]] = (),
    compared: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of every page except those of runs, claims and comparisons.

    `verdicts` are the lines of the table of claims, and `compared` the comparison pages by title.
    The newest run comes first; runs that were made from another one come last.
    """
    cards = sorted(cards, key=lambda card: (not card.role, card.started, card.slug), reverse=True)
    every = lines(cards).assign(m=lambda table: pd.to_numeric(table.m))
    kinds, kernels = sorted(every.kind.unique()), sorted(every.kernel.unique())
    shared = {"site": site, "cards": cards, "kinds": kinds, "kernels": kernels}
    shared |= {"page_of": page_of, "named": grids.named}
    yield "style.css", stylesheet()
    yield (
        "index.html",
        render(
            "site_index.html",
            **shared,
            gpus=_gpus(cards, every),
            claims=verdicts,
            compared=compared or {},
        ),
    )
    for what, names, docs in (
        ("format", kinds, site.formats),
        ("kernel", kernels, site.kernels),
    ):
        column = "kind" if what == "format" else "kernel"
        for name in names:
            cases = every[every[column] == name]
            yield page_of(what, name), _name_page(what, name, docs.get(name, ""), cases, shared)
    for card in cards:
        yield f"badges/{card.slug}.svg", _badge(card)
        yield f"badges/{card.slug}.json", _shields(card)
    yield "glossary.html", render("site_glossary.html", site=site)
    yield "feed.xml", render("site_feed.xml", **shared)
    if site.base:
        paths = ["", "glossary.html", *(f"claims/{claim.name}.html" for claim in site.claims)]
        paths += [*(compared or {}).values(), *(f"runs/{card.slug}/" for card in cards)]
        paths += [page_of(w, n) for w, ns in (("format", kinds), ("kernel", kernels)) for n in ns]
        yield "sitemap.xml", render("site_sitemap.xml", site=site, paths=paths)
        yield "robots.txt", f"User-agent: *\nAllow: /\nSitemap: {site.base}sitemap.xml\n"
    yield "CITATION.cff", _citation(cards, site)


def around(card: Card, site: Site, removed: Removed, downloads: Sequence[str]) -> Surrounding:
    """Return what a site adds to the report of a run."""
    values = {"card": card, "site": site, "removed": removed, "downloads": downloads}
    parts = ["head", "top", "foot"]
    head, top, foot = (render(f"site_{part}.html", **values, cite=cited(card)) for part in parts)
    return Surrounding(head, top, foot)


def cited(card: Card) -> str:
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


def _gpus(cards: Sequence[Card], every: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the parts of the first page, one per GPU; simulated ones come last."""
    evens, gpus = pays(cards), []
    for gpu in dict.fromkeys(card.gpu for card in cards):
        shown = [card for card in cards if card.gpu == gpu]
        simulated = all(any(badge[0] == "simulated" for badge in card.badges) for card in shown)
        gpus.append(
            {
                "name": gpu,
                "simulated": simulated,
                "cards": shown,
                "gains": grids.gains(every[every.gpu == gpu]),
                "pays": grids.pays(evens[evens.gpu == gpu]),
            }
        )
    return sorted(gpus, key=lambda gpu: (gpu["simulated"], -len(gpu["cards"])))


def _name_page(what: str, name: str, doc: str, cases: pd.DataFrame, shared: dict[str, Any]) -> str:
    tables = [
        (gpu, grid) for gpu, of in cases.groupby("gpu", sort=False) if (grid := grids.gains(of))
    ]
    return render(
        "site_name.html",
        **shared,
        what=what,
        name=name,
        title=grids.named(name) if what == "format" else name,
        doc=doc,
        family="" if what == "format" else family(name),
        best=grids.best_places(cases),
        grids=tables,
        others=sorted(cases.kernel.unique() if what == "format" else cases.kind.unique()),
        cases=grids.cases(cases),
    )


def _badge(card: Card) -> str:
    left, right = f"{card.gpu} · {card.name}"[:60], f"{card.gain} · {card.badges[0][1]}"
    widths = [round(WIDTH * len(text)) + 16 for text in (left, right)]
    colour = "#00694c" if card.badges[0][0] == "verdict" else "#0a58a8"
    return render("site_badge.svg", left=left, right=right, widths=widths, colour=colour)


def _shields(card: Card) -> str:
    color = {"verdict": "green", "look": "blue"}.get(card.badges[0][0], "orange")
    message = f"{card.gain} · {card.badges[0][1]}"
    label = f"{card.gpu} · {card.name}"[:60]
    data = {"schemaVersion": 1, "label": label, "message": message, "color": color}
    return json.dumps(data, ensure_ascii=False) + "\n"


def _citation(cards: Sequence[Card], site: Site) -> str:
    authors = [{"name": "The sparsebench authors"}]
    data = {
        "cff-version": "1.2.0",
        "message": "Please cite the runs that you compare with, by the SHA-256 of their manifests.",
        "title": "sparsebench: published runs",
        "type": "dataset",
        "license": "MIT",
        "authors": authors,
        **({"url": site.base} if site.base else {}),
        **({"date-released": max(card.started[:10] for card in cards)} if cards else {}),
        "references": [
            {
                "type": "data",
                "title": f"{card.suite} on {card.gpu} ({card.slug})"[:300],
                "authors": authors,
                "date-released": card.started[:10],
                "notes": f"manifest SHA-256 {card.identity}",
                **({"url": f"{site.base}runs/{card.slug}/"} if site.base else {}),
            }
            for card in cards
        ],
    }
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)
