"""Add runs to a static site; existing runs stay, and only changed files are written again.

    DIR/index.html, formats/, kernels/, badges/, feed.xml, ...      from the cards (pages.py)
    DIR/runs/SLUG/     a bundle for `sparsebench validate`: rows.jsonl.gz, suite.yaml, ...
                       removed.json     what is not in it (results/bundle.py)
                       name.txt         the name of the folder that the run came from
                       index.html       its report          bundle.tar.gz, rows.csv, rows.parquet
                       summary.json     its card
    DIR/prune.html     is pruning worth it for a model? (prune.py)
    DIR/claims/        a page per claim, judged by all runs of the site (reports/claims)
    DIR/compare/       a page per suite that ran on several devices (devices.py)
    DIR/.state.json    the code that wrote the pages, the address of the site, the claims

Links to a run stay valid because its SLUG comes from the GPU, the suite and the manifest. A run is
written again if the code of results/ or reports/, the address of the site or the claims change, or
if pyarrow was installed or removed. To remove a run, delete its folder and publish again.
"""

import gzip
import hashlib
import json
import shutil
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path

from sparsebench._writing import replacing, write_file
from sparsebench.errors import ResultError
from sparsebench.reports.build import build
from sparsebench.reports.claims import pages as claims
from sparsebench.reports.site import devices, prune
from sparsebench.reports.site.cards import SCHEMA, Card, card, cells
from sparsebench.reports.site.pages import Site, around, pages
from sparsebench.results import bundle, store
from sparsebench.results.analysis import analyse
from sparsebench.results.frame import to_csv, to_parquet
from sparsebench.results.provenance import device_name

STATE, STATE_SCHEMA = ".state.json", "sparsebench/site@1"
NAME = "name.txt"
DOWNLOADS = ("rows.csv", f"{bundle.ROWS}.gz", "rows.parquet", "bundle.tar.gz", "summary.json")
PAGES = ("formats", "kernels", "badges", "claims", "compare")  # written from cards


@dataclass(frozen=True)
class Published:
    """The result of `publish`: all slugs, those written now, and notes on omissions."""

    slugs: list[str]
    written: list[str]
    notes: list[str]


def publish(runs: Sequence[Path], to: Path, site: Site, check: Callable[[Path], None]) -> Published:
    """Add runs to a site, or create one.

    `check` is called for each new run and raises if it must not be published. Raises ResultError
    before anything is written.
    """
    state = _state(to)
    named = _named(runs)
    there = _slugs(to)
    for slug, path in named.items():
        if slug not in there:
            check(path)
    site = replace(site, base=site.base or state.get("base", ""))
    made = {"schema": STATE_SCHEMA, "code": _code(), "base": site.base, "claims": _asked(site)}
    made["parquet"] = str(find_spec("pyarrow") is not None)
    to.mkdir(parents=True, exist_ok=True)
    write_file(to / STATE, json.dumps({**made, "code": ""}, indent=1) + "\n")
    written = [slug for slug in named if slug not in there]
    for slug in written:
        _add(named[slug], to / "runs" / slug)
    redone = [*there, *written] if made != state else written
    for slug in redone:
        _redo(to / "runs" / slug, site)
    cards = [_card(to / "runs" / slug) for slug in _slugs(to)]
    judged = claims.entries(site.claims, cells(cards))
    texts = dict(claims.pages(judged, site)) if judged else {}
    suites = devices.compared(cards)
    texts |= devices.pages(to, suites, redone)
    texts |= prune.pages(cards, site)
    compared = {entry.title: f"{entry.name}.html" for entry in suites}
    _write_pages(to, {**texts, **dict(pages(cards, site, claims.lines(judged), compared))})
    write_file(to / STATE, json.dumps(made, indent=1) + "\n")
    return Published([entry.slug for entry in cards], redone, _notes(to, written, site))


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
    try:
        state: dict[str, str] = json.loads((to / STATE).read_text("utf-8"))
        schema = state["schema"]
    except (ValueError, KeyError, TypeError) as error:
        raise ResultError(f"{to / STATE}: expected the state of a site, found {error!r}") from error
    if schema != STATE_SCHEMA:
        raise ResultError(f"{to / STATE}: expected schema {STATE_SCHEMA}, found {schema}")
    return state


def _named(runs: Sequence[Path]) -> dict[str, Path]:
    """Return the runs by their slugs; ResultError if there is none or one is given twice."""
    if not runs:
        raise ResultError("expected one run or more, found none")
    by_slug: dict[str, Path] = {}
    for path in runs:
        identity = bundle.identity(path)
        environment, state = (
            json.loads(bundle.content(path, name)) for name in ("environment.json", "run.json")
        )
        slug = bundle.link_name(device_name(environment), str(state["suite"]), identity)
        if slug in by_slug:
            raise ResultError(f"{path}: expected each run once, found it also as {by_slug[slug]}")
        by_slug[slug] = path
    return by_slug


def _slugs(to: Path) -> list[str]:
    return sorted(path.parent.name for path in (to / "runs").glob(f"*/{bundle.MANIFEST}"))


def _add(run: Path, folder: Path) -> None:
    """Copy a bundle without private names and paths into the site, whole or not at all."""
    fresh = folder.with_name(f".new-{folder.name}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    bundle.redact(run, fresh)
    write_file(fresh / NAME, _called(run))
    fresh.rename(folder)


def _called(run: Path) -> str:
    """Return the name of a run's folder; "" if it contains the name of a user or a host."""
    texts = [bundle.content(run, name).decode() for name in ("environment.json", "run.json")]
    names = [name for text in texts for name in bundle.HOME.findall(text)]
    names += [name for text in texts for *_, name in bundle.FIELD.findall(text)]
    called = run.resolve().name
    private = [name for name in names if len(name) >= bundle.SHORTEST]
    return "" if any(name.lower() in called.lower() for name in private) else called


def _redo(folder: Path, site: Site) -> None:
    """Write the report, the card and the downloads of a bundle in the site."""
    run, removed = store.read(folder), bundle.read_removed(folder)
    analysis = analyse(run)
    file = folder / NAME
    name = file.read_text("utf-8").strip() if file.exists() else ""
    run_card = card(run, analysis, folder.name, bundle.identity(folder), site.claims, name)
    write_file(folder / "summary.json", json.dumps(run_card.to_json()) + "\n")
    to_csv(analysis.rows, folder / "rows.csv")
    if find_spec("pyarrow"):
        to_parquet(analysis.rows, folder / "rows.parquet")
    _pack(folder)
    downloads = [name for name in DOWNLOADS if (folder / name).exists()]
    beside = around(run_card, site, removed, downloads)
    build(run, folder / "index.html", surrounding=beside, analysis=analysis)


def _pack(folder: Path) -> None:
    """Write bundle.tar.gz; the same bundle gives the same bytes."""
    names = [f"{bundle.ROWS}.gz" if n == bundle.ROWS else n for n in bundle.verify(folder)]

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, 0, "", ""
        return entry

    with (
        replacing(folder / "bundle.tar.gz") as fresh,
        fresh.open("wb") as file,
        gzip.GzipFile("", "wb", 6, file, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as archive,
    ):
        for name in [bundle.MANIFEST, bundle.REMOVED, *names]:
            archive.add(folder / name, f"{folder.name}/{name}", filter=plain)


def _card(folder: Path) -> Card:
    file = folder / "summary.json"
    try:
        data = json.loads(file.read_text("utf-8"))
        if data["schema"] == SCHEMA:
            return Card(**data)
        found = f"schema {data['schema']}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = repr(error)
    raise ResultError(f"{file}: expected a card of schema {SCHEMA}, found {found}")


def _write_pages(to: Path, made: dict[str, str]) -> None:
    """Write the pages that differ, and remove pages that the site no longer has."""
    for name, text in made.items():
        file = to / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists() or file.read_text("utf-8") != text:
            write_file(file, text)
    for folder in PAGES:
        for file in (to / folder).glob("*"):
            if f"{folder}/{file.name}" not in made:
                file.unlink()


def _notes(to: Path, written: Sequence[str], site: Site) -> list[str]:
    notes = []
    for slug in written:
        removed = bundle.read_removed(to / "runs" / slug)
        texts = [f"{text} ({count})" for text, count in removed.texts.items()] + removed.files
        if texts:
            notes.append(f"{slug}: removed {', '.join(texts)}")
    if not site.base:
        notes.append("no --base-url: sitemap.xml is left out and feed.xml has relative links")
    if not find_spec("pyarrow"):
        notes.append("rows.parquet is left out; pip install 'sparsebench[parquet]' adds it")
    return notes


def _asked(site: Site) -> str:
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
        elif entry.is_file() and (prefix == "templates/" or entry.name.endswith(".py")):
            sources.append((prefix + entry.name, entry.read_bytes()))
    return sources
