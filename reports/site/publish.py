"""Add runs to a static site; existing runs stay, and only changed files are written again.

    DIR/index.html, runs.html, formats/, kernels/, feed.xml, ...    from the cards (pages.py)
    DIR/GPU/NAME/      a run, its report and its downloads (run_folder.py)
    DIR/runs/SLUG/     leads to GPU/NAME, for links from before runs had short addresses
    DIR/prune.html     is pruning worth it for a model? (prune.py)
    DIR/quantize.html  or are fewer bits? (quantize.py)
    DIR/attention.html from which length on does it pay to select keys? (attention.py)
    DIR/claims/        a page per claim, judged by all runs of the site (reports/claims)
    DIR/compare/       a page per suite that ran on several devices, and their list (devices.py)
    DIR/.state.json    the code that wrote the pages, the address of the site, the claims

A run keeps the first address that it got: its GPU and the name of its folder, with a number if
another run has that address. Runs of one GPU, suite, selection and folder name are versions of one
run: the newest is shown, and the earlier ones keep their pages, which lead to it. Its SLUG, from
the GPU, the suite and the manifest, leads there. A run is written again if the code of results/ or
reports/, the address of the site or the claims change, or if a run that confirms it was added. Runs
that confirm others are written first. To remove a run, delete its folder and publish again.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from importlib.resources.abc import Traversable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from sparsebench._writing import locked_folder, write_file
from sparsebench.errors import ResultError, SparsebenchError
from sparsebench.reports.claims import pages as claims
from sparsebench.reports.site import attention, devices, prune
from sparsebench.reports.site.cards import cells
from sparsebench.reports.site.pages import Site, pages
from sparsebench.reports.site.run_folder import (
    NEW,
    PAGES,
    Related,
    RunFolder,
    copy,
    move,
    run_folders,
    slug_of,
    write_run,
)
from sparsebench.results.files import from_json

STATE, STATE_SCHEMA = ".state.json", "sparsebench/site@1"
FEW = 4  # fewer items than these are handled in this process
CHUNK = 4  # items that another process takes at a time, with one copy of the claims

Show = Callable[[int, int, str], None]
"""Receives the number of items that are done, their number, and what they are."""

Each = Callable[[Callable[[Any], Any], Sequence[Any], str], list[Any]]
"""Returns a function of each item; the last argument says what items are when that is done."""


@dataclass(frozen=True)
class Published:
    """The result of `publish`: all slugs, those written now, notes on omissions, and refusals."""

    slugs: list[str]
    written: list[str]
    notes: list[str]
    refused: list[str]


def publish(
    runs: Sequence[Path],
    to: Path,
    site: Site,
    check: Callable[[Path], None],
    show: Show = lambda done, total, step: None,
) -> Published:
    """Add runs to a site, or create one.

    `check` is called for each new run and raises if it must not be published; with many runs,
    other processes call it, so it must be a function of a module. A run that is refused does not
    keep the others out. If all are, or for a bad folder, raises ResultError before anything is
    written.
    """
    spawn = get_context("spawn")  # a fork of torch's threads may hang
    with locked_folder(to), ProcessPoolExecutor(os.cpu_count(), spawn) as pool:
        return _publish(runs, to, site, check, partial(_for_each, pool, show))


def _publish(
    runs: Sequence[Path], to: Path, site: Site, check: Callable[[Path], None], each: Each
) -> Published:
    earlier = _state(to)
    bundles, refused = _by_slug(runs)
    shutil.rmtree(to / NEW, ignore_errors=True)  # of a call that was killed
    stored = run_folders(to)
    new = [slug for slug in bundles if slug not in stored]
    reasons = each(partial(_refusal, check), [bundles[slug] for slug in new], "validated")
    refused += filter(None, reasons)
    added = [slug for slug, reason in zip(new, reasons, strict=True) if not reason]
    if len(refused) == len(runs):
        raise ResultError(refused[0])
    site = replace(site, base=site.base or earlier.get("base", ""))
    site = replace(site, source=site.source or earlier.get("source", ""))
    state = {"schema": STATE_SCHEMA, "code": _code(), "base": site.base, "source": site.source}
    state |= {"claims": _claims_digest(site)}
    write_file(to / STATE, json.dumps({**state, "code": ""}, indent=1) + "\n")
    fresh = {slug: RunFolder(to, to / NEW / slug) for slug in added}
    each(copy, [(bundles[slug], run) for slug, run in fresh.items()], "copied")
    for run in fresh.values():
        move(run, run.name or str(run.state["suite"]))
    shutil.rmtree(to / NEW, ignore_errors=True)
    stored = run_folders(to)
    site = replace(site, prune=prune.applies((run.gpu, run.name) for run in stored.values()))
    state |= {"prune": str(site.prune)}
    newest = _newest(stored)
    newer = _successors(stored) | newest
    changed = [*stored] if state != earlier else _slugs_to_write(stored, added, newer)
    _write_runs(stored, changed, site, newer, each)
    cards = [run.card for slug, run in stored.items() if slug not in newest]
    current = [card for card in cards if not stored[card.slug].is_replaced] or cards
    judged = claims.entries(site.claims, cells(current))
    gpus = {card.gpu for card in cards if card.units}
    texts = dict(claims.pages(judged, site, gpus)) if judged else {}
    suites = devices.find_devices(cards)
    redone = {stored[slug].address for slug in changed}
    compare = partial(devices.suite_pages, to, redone, site)
    sides = [(suite.name, suite.addresses) for suite in suites]
    for of_suite in each(compare, sides, "comparisons"):
        texts |= of_suite
    texts[devices.INDEX] = devices.index(suites, site, current)
    texts |= prune.pages(cards, site) if site.prune else ()
    texts |= attention.pages(site) if site.prune else ()
    others = [path for path in texts if path.endswith(".html")]
    versions = [stored[slug].card for slug in newest]
    brief = prune.in_brief() if site.prune else {}
    texts |= pages(cards, site, others, versions, brief, current)
    _write_pages(to, texts)
    write_file(to / STATE, json.dumps(state, indent=1) + "\n")
    notes = _notes([stored[slug] for slug in added], site)
    return Published([*stored], changed, notes, refused)


def _refusal(check: Callable[[Path], None], run: Path) -> str:
    """Return why a run must not be published, or ""."""
    try:
        check(run)
    except SparsebenchError as error:
        return str(error)
    return ""


def _for_each(
    pool: ProcessPoolExecutor, show: Show, function: Callable[[Any], Any], items: Any, what: str
) -> list[Any]:
    """Return a function of each item, called in other processes if there are many."""
    if len(items) < FEW:
        return [function(item) for item in items]
    show(0, len(items), what)
    results = []
    for result in pool.map(function, items, chunksize=CHUNK):
        results.append(result)
        show(len(results), len(items), what)
    return results


def _state(to: Path) -> dict[str, str]:
    """Return the state of a site, {} for a new one; ResultError if DIR holds anything else."""
    if not to.exists():
        return {}
    if not to.is_dir():
        raise ResultError(f"{to}: expected a folder, found a file")
    if not (to / STATE).exists():
        if first := next(to.iterdir(), None):
            expected = "expected a new or an empty folder, or a site"
            raise ResultError(f"{to}: {expected}; found {first.name} and no {STATE}")
        return {}
    return from_json(to / STATE, STATE_SCHEMA)


def _by_slug(runs: Sequence[Path]) -> tuple[dict[str, Path], list[str]]:
    """Return the runs by their slugs, and why others have none.

    Raises ResultError if no run is given, or one twice.
    """
    if not runs:
        raise ResultError("expected one run or more, found none")
    by_slug: dict[str, Path] = {}
    refused = []
    for path in runs:
        try:
            slug = slug_of(path)
        except ResultError as error:
            refused.append(str(error))
            continue
        first = by_slug.setdefault(slug, path)
        if first is not path:
            raise ResultError(f"{path}: expected each run once, found it also as {first}")
    return by_slug, refused


def _newest(stored: Mapping[str, RunFolder]) -> dict[str, str]:
    """Return for each outdated run, by slug, the slug of its newest version."""
    last = {run.series: slug for slug, run in _by_start(stored)}
    return {slug: last[run.series] for slug, run in stored.items() if slug != last[run.series]}


def _successors(stored: Mapping[str, RunFolder]) -> dict[str, str]:
    """Return for each replaced run, by slug, the slug of the newest one of its GPU and name.

    That one may have another selection of cases, and then it is no version of the replaced run.
    """
    last = {r.series[::3]: slug for slug, r in _by_start(stored) if not r.is_replaced}
    outdated = [(slug, r.series[::3]) for slug, r in stored.items() if r.is_replaced]
    return {slug: last[name] for slug, name in outdated if name in last}


def _by_start(stored: Mapping[str, RunFolder]) -> list[tuple[str, RunFolder]]:
    return sorted(stored.items(), key=lambda item: (str(item[1].state.get("started", "")), item[0]))


def _slugs_to_write(
    stored: Mapping[str, RunFolder], added: Sequence[str], newer: Mapping[str, str]
) -> list[str]:
    """Return the new runs, those that confirm or are confirmed by one, and its earlier versions."""
    confirmed = {stored[slug].source for slug in added} - {""}
    new = {stored[slug].origin for slug in added}
    return [
        slug
        for slug, run in stored.items()
        if slug in added or newer.get(slug) in added or run.origin in confirmed or run.source in new
    ]


def _write_runs(
    stored: Mapping[str, RunFolder],
    slugs: Sequence[str],
    site: Site,
    newer: Mapping[str, str],
    each: Each,
) -> None:
    """Write runs again: first those that confirm others, because the others show their gains."""
    by_origin = {run.origin: run for run in stored.values()}
    work: dict[bool, list[tuple[RunFolder, Related]]] = {True: [], False: []}
    for run in map(stored.__getitem__, slugs):
        source = by_origin.get(run.source)
        related = Related(
            source=source.address if source else "",
            newer=stored[newer[run.slug]].address if run.slug in newer else "",
            confirming=[other for other in stored.values() if other.source == run.origin],
        )
        work[bool(run.source)].append((run, related))
    for confirms in (True, False):
        each(partial(write_run, site), work[confirms], "pages of runs")


def _write_pages(to: Path, texts: dict[str, str]) -> None:
    """Write the pages that differ, and remove pages that the site no longer has."""
    for name, text in texts.items():
        file = to / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists() or file.read_text("utf-8") != text:
            write_file(file, text)
    for folder in PAGES:
        for file in (to / folder).glob("*"):
            if file.is_file() and f"{folder}/{file.name}" not in texts:
                file.unlink()
    for moved in (to / "runs").glob("*"):
        if f"runs/{moved.name}/index.html" not in texts:
            shutil.rmtree(moved)


def _notes(added: Sequence[RunFolder], site: Site) -> list[str]:
    notes = []
    for run in added:
        texts = [f"{text} ({count})" for text, count in run.removed.texts.items()]
        if texts := texts + run.removed.files:
            notes.append(f"{run.slug}: removed {', '.join(texts)}")
    if not site.base:
        notes.append("no --base-url: sitemap.xml is left out and feed.xml has relative links")
    return notes


def _claims_digest(site: Site) -> str:
    """Return the SHA-256 of the claims and of the cases that they need."""
    digests = [
        [
            claim.name,
            claim.claim.model_dump_json(),
            {n: sorted(ids) for n, ids in claim.problems.items()},
        ]
        for claim in site.claims
    ]
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def _code() -> str:
    """Return the SHA-256 of the code that reads runs and writes pages."""
    digest = hashlib.sha256()
    for folder in ("sparsebench.results", "sparsebench.reports"):
        for name, content in sorted(_sources(files(folder), "")):
            digest.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    return digest.hexdigest()


def _sources(folder: Traversable, prefix: str) -> list[tuple[str, bytes]]:
    sources = []
    for entry in folder.iterdir():
        if entry.is_dir() and entry.name in ("claims", "figures", "site", "templates"):
            sources += _sources(entry, f"{prefix}{entry.name}/")
        elif entry.is_file() and (prefix == "templates/" or entry.name.endswith((".py", ".txt"))):
            sources.append((prefix + entry.name, entry.read_bytes()))
    return sources
