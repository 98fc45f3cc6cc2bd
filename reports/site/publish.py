"""Add runs to a static site; existing runs stay, and only changed files are written again.

    DIR/index.html, runs.html, formats/, kernels/, feed.xml, ...    from the cards (pages.py)
    DIR/GPU/NAME/      a bundle for `sparsebench validate`: rows.jsonl.gz, suite.yaml, ...
                       removed.json     what is not in it (results/bundle.py)
                       name.txt         the name of the folder that the run came from
                       index.html       its report          bundle.tar.gz, rows.csv, rows.parquet
                       summary.json     its card            picture.png    for links to it
    DIR/runs/SLUG/     leads to GPU/NAME, for links from before runs had short addresses
    DIR/prune.html     is pruning worth it for a model? (prune.py)
    DIR/claims/        a page per claim, judged by all runs of the site (reports/claims)
    DIR/compare/       a page per suite that ran on several devices (devices.py)
    DIR/.state.json    the code that wrote the pages, the address of the site, the claims

A run keeps the first address that it got: its GPU and the name of its folder, with a number if
another run has that address. Runs of one GPU, suite, selection and folder name are versions of one
run: the newest is shown, and the earlier ones keep their pages, which lead to it, and their place
in history.html (history.py). Its SLUG, from the GPU, the suite and the manifest, leads there. A run
is written again if the code of results/ or reports/, the address of the site or the claims change,
if pyarrow was installed or removed, or if a run that confirms it was added. Runs that confirm
others are written first. To remove a run, delete its folder and publish again.
"""

import gzip
import hashlib
import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from sparsebench._writing import locked_folder, replacing, write_file
from sparsebench.errors import ResultError
from sparsebench.reports.build import build, frames_of
from sparsebench.reports.claims import pages as claims
from sparsebench.reports.site import devices, prune
from sparsebench.reports.site.cards import ROLES, SCHEMA, Card, Place, card, cells
from sparsebench.reports.site.pages import Site, around, pages, safe
from sparsebench.reports.site.preview import preview
from sparsebench.results import bundle, store
from sparsebench.results.frame import to_csv, to_parquet
from sparsebench.results.provenance import device_name

STATE, STATE_SCHEMA = ".state.json", "sparsebench/site@1"
NAME = "name.txt"
FEW = 4  # fewer items than these are handled in this process
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

    `check` is called for each new run and raises if it must not be published; with many runs,
    other processes call it, so it must be a function of a module. Raises ResultError before
    anything is written.
    """
    with locked_folder(to):
        return _publish(runs, to, site, check)


def _publish(
    runs: Sequence[Path], to: Path, site: Site, check: Callable[[Path], None]
) -> Published:
    state, named = _state(to), _named(runs)
    there = _folders(to)
    written = [slug for slug in named if slug not in there]
    _each(check, [named[slug] for slug in written])
    site = replace(site, base=site.base or state.get("base", ""))
    site = replace(site, source=site.source or state.get("source", ""))
    made = {"schema": STATE_SCHEMA, "code": _code(), "base": site.base, "source": site.source}
    made |= {"claims": _asked(site), "parquet": str(find_spec("pyarrow") is not None)}
    write_file(to / STATE, json.dumps({**made, "code": ""}, indent=1) + "\n")
    _shorten(to, there)
    for slug in written:
        _add(named[slug], to)
    there = _folders(to)
    newest = _newest(there)
    redone = [*there] if made != state else _affected(there, written, newest)
    _redo(to, there, redone, site, newest)
    earlier = [_card(there[slug]) for slug in newest]
    cards = [_card(folder) for slug, folder in there.items() if slug not in newest]
    judged = claims.entries(site.claims, cells(cards))
    gpus = {card.gpu for card in cards if card.units}
    texts = dict(claims.pages(judged, site, gpus)) if judged else {}
    suites = devices.compared(cards)
    again = [there[slug].relative_to(to).as_posix() for slug in redone]
    texts |= devices.pages(to, suites, again, site)
    answers = dict(prune.pages(cards, site))
    compared = {entry.title: f"{entry.name}.html" for entry in suites}
    doors = {"Should I prune?": prune.PAGE} if answers else {}
    doors |= {"Which GPU?": next(iter(compared.values()))} if compared else {}
    _write_pages(to, {**texts, **answers, **dict(pages(cards, site, compared, doors, earlier))})
    write_file(to / STATE, json.dumps(made, indent=1) + "\n")
    return Published([*there], redone, _notes(there, written, site))


def _each(function: Callable[..., None], items: Iterable[Any]) -> None:
    """Call a function for each item, in several processes if that is worth starting them."""
    items = list(items)
    if len(items) < FEW:
        for item in items:
            function(item)
        return
    spawn = get_context("spawn")  # a fork of torch's threads may hang
    with ProcessPoolExecutor(min(os.cpu_count() or 1, len(items)), spawn) as pool:
        [*pool.map(function, items)]


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


def _folders(to: Path) -> dict[str, Path]:
    """Return the folders of the runs of a site, by slug."""
    folders = {}
    for path in sorted(to.glob(f"*/*/{bundle.REMOVED}")):
        environment, state = (
            json.loads((path.parent / name).read_text("utf-8"))
            for name in ("environment.json", "run.json")
        )
        origin = bundle.read_removed(path.parent).of
        slug = bundle.link_name(device_name(environment), str(state["suite"]), origin)
        folders[slug] = path.parent
    return dict(sorted(folders.items()))


def _address(to: Path, gpu: str, name: str) -> str:
    """Return a free address of a run: its GPU and its name, with a number if that is taken."""
    home = re.sub(r"[^a-z0-9]+", "-", gpu.lower().replace("nvidia", "")).strip("-")[:40]
    home = f"gpu-{home}" if home in ("", "runs", *PAGES) else home
    address = f"{home}/{safe(name)}"
    taken = (n for n in range(2, 10_000) if not (to / f"{address}-{n}").exists())
    return f"{address}-{next(taken)}" if (to / address).exists() else address


def _shorten(to: Path, folders: dict[str, Path]) -> None:
    """Move runs of sites from before 0.3 from runs/SLUG to a short address."""
    for folder in folders.values():
        if folder.parent.name == "runs":
            gpu = device_name(json.loads((folder / "environment.json").read_text("utf-8")))
            name = (folder / NAME).read_text("utf-8").strip() if (folder / NAME).exists() else ""
            new = to / _address(to, gpu, name or "run")
            new.parent.mkdir(exist_ok=True)
            folder.rename(new)


def _add(run: Path, to: Path) -> None:
    """Copy a bundle without private names and paths into the site, whole or not at all."""
    fresh = to / ".new"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    bundle.redact(run, fresh)
    name = _called(run)
    write_file(fresh / NAME, name)
    environment = json.loads((fresh / "environment.json").read_text("utf-8"))
    suite = json.loads((fresh / "run.json").read_text("utf-8"))["suite"]
    folder = to / _address(to, device_name(environment), name or str(suite))
    folder.parent.mkdir(exist_ok=True)
    fresh.rename(folder)


def _source(folder: Path) -> str:
    """Return the origin of the run that a run was made from; "" if it was not."""
    state = json.loads((folder / "run.json").read_text("utf-8"))
    return next((str(state[n]["manifest_sha256"]) for n in ROLES if state.get(n)), "")


def _newest(folders: dict[str, Path]) -> dict[str, str]:
    """Return the newest version of each run that is not its own newest, by slug."""
    versions: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for slug, folder in folders.items():
        environment, state = (
            json.loads((folder / name).read_text("utf-8"))
            for name in ("environment.json", "run.json")
        )
        name = (folder / NAME).read_text("utf-8").strip() if (folder / NAME).exists() else ""
        key = device_name(environment), state["suite"], state["flags"]["only"], name or slug
        versions.setdefault(key, []).append((str(state.get("started", "")), slug))
    return {
        slug: max(runs)[1] for runs in versions.values() for _, slug in runs if slug != max(runs)[1]
    }


def _affected(
    folders: dict[str, Path], written: Sequence[str], newest: Mapping[str, str]
) -> list[str]:
    """Return the new runs, those that confirm or are confirmed by one, and its earlier versions."""
    origins = {slug: bundle.read_removed(folder).of for slug, folder in folders.items()}
    confirmed = {_source(folders[slug]) for slug in written} - {""}
    new = {origins[slug] for slug in written}
    return [
        slug
        for slug in folders
        if slug in written
        or newest.get(slug) in written
        or origins[slug] in confirmed
        or _source(folders[slug]) in new
    ]


def _called(run: Path) -> str:
    """Return the name of a run's folder; "" if it contains the name of a user or a host."""
    texts = [bundle.content(run, name).decode() for name in ("environment.json", "run.json")]
    names = [name for text in texts for name in bundle.HOME.findall(text)]
    names += [name for text in texts for *_, name in bundle.FIELD.findall(text)]
    called = run.resolve().name
    private = [name for name in names if len(name) >= bundle.SHORTEST]
    return "" if any(name.lower() in called.lower() for name in private) else called


def _redo(
    to: Path,
    folders: dict[str, Path],
    slugs: Sequence[str],
    site: Site,
    newest: Mapping[str, str],
) -> None:
    """Write runs again: first those that confirm others, because the others show their gains."""
    sources = {slug: _source(folder) for slug, folder in folders.items()}
    origins = {slug: bundle.read_removed(folder).of for slug, folder in folders.items()}
    by_origin = {origin: folders[slug] for slug, origin in origins.items()}
    work = [
        (
            slug,
            folders[slug],
            by_origin.get(sources[slug]),
            [folders[other] for other, source in sources.items() if source == origins[slug]],
            folders[newest[slug]].relative_to(to).as_posix() if slug in newest else "",
        )
        for slug in slugs
    ]
    for confirming in (True, False):
        _each(partial(_write_run, to, site), [w for w in work if bool(sources[w[0]]) == confirming])


def _write_run(
    to: Path, site: Site, work: tuple[str, Path, Path | None, Sequence[Path], str]
) -> None:
    """Write the report, the card, the picture and the downloads of a run in the site.

    `work` is its slug, its folder, that of the run it was made from, those that confirm it, and the
    address of its newest version.
    """
    slug, folder, source, confirming, newer = work
    run, removed = store.read(folder), bundle.read_removed(folder)
    frames = frames_of(run)
    name = (folder / NAME).read_text("utf-8").strip() if (folder / NAME).exists() else ""
    address = folder.relative_to(to).as_posix()
    place = Place(address, slug, bundle.identity(folder), removed.of, name)
    run_card = card(frames, place, site.claims)
    write_file(folder / "summary.json", json.dumps(run_card.to_json()) + "\n")
    to_csv(frames.rows, folder / "rows.csv")
    if find_spec("pyarrow"):
        to_parquet(frames.rows, folder / "rows.parquet")
    _pack(folder)
    preview(run_card, folder / "picture.png")
    downloads = [name for name in DOWNLOADS if (folder / name).exists()]
    made_from = source.relative_to(to).as_posix() if source else ""
    others = [_card(path) for path in confirming]
    beside = around(run_card, site, removed, downloads, others, made_from, newer)
    build(run, folder / "index.html", surrounding=beside, frames=frames)


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
            if file.is_file() and f"{folder}/{file.name}" not in made:
                file.unlink()
    for moved in (to / "runs").glob("*"):
        if f"runs/{moved.name}/index.html" not in made:
            shutil.rmtree(moved)


def _notes(folders: dict[str, Path], written: Sequence[str], site: Site) -> list[str]:
    notes = []
    for slug in written:
        removed = bundle.read_removed(folders[slug])
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
