"""The folder of a run in a site: a redacted bundle with its report, its card and its downloads.

DIR/GPU/NAME/      a bundle for `sparsebench validate`: rows.jsonl.gz, suite.yaml, ...
                   removed.json     what is not in it (results/run/bundle.py)
                   name.txt         the name of the folder that the run came from
                   commit.txt       its commit, if it recorded a digest of its code instead
                   replaced.txt     empty; there if it came from GPU/earlier/DATE/NAME
                   index.html       its report
                   summary.json     its card
                   rows.csv.gz      its rows as a table

The files of the bundle are its download, so no archive holds a second copy of the rows.
"""

import gzip
import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sparsebench._writing import write_file
from sparsebench.errors import ResultError
from sparsebench.reports.build import build
from sparsebench.reports.site.cards import ROLES, SCHEMA, Card, card
from sparsebench.reports.site.pages import Site, around, safe
from sparsebench.results.files import from_json
from sparsebench.results.run import bundle, store
from sparsebench.results.run.bundle import Redaction
from sparsebench.results.run.provenance import commit_of, device_name
from sparsebench.results.tables.analysis import analyse
from sparsebench.results.tables.frame import as_csv

NAME, COMMIT, REPLACED = "name.txt", "commit.txt", "replaced.txt"
TABLE, CARD = "rows.csv.gz", "summary.json"
NEW = ".new"  # the folder of a site for runs that are not whole yet
PAGES = ("formats", "kernels", "badges", "claims", "compare")  # folders of a site without runs


@dataclass(frozen=True)
class RunFolder:
    """A run of the site in `to`."""

    to: Path
    path: Path

    @cached_property
    def environment(self) -> dict[str, Any]:
        return _json(self.path, "environment.json")

    @cached_property
    def state(self) -> dict[str, Any]:
        return _json(self.path, "run.json")

    @cached_property
    def removed(self) -> Redaction:
        return Redaction(**_json(self.path, bundle.REMOVED))

    @property
    def gpu(self) -> str:
        return device_name(self.environment)

    @property
    def address(self) -> str:
        return self.path.relative_to(self.to).as_posix()

    @property
    def origin(self) -> str:
        """Return the digest of the run as it was measured."""
        return self.removed.of

    @property
    def slug(self) -> str:
        """Return the permanent name of the run."""
        return bundle.link_name(self.gpu, str(self.state["suite"]), self.origin)

    @property
    def name(self) -> str:
        """Return the name of the folder that it was published from; "" if that is private."""
        return self._text(NAME)

    @property
    def commit(self) -> str:
        return str(self.environment.get("commit") or self._text(COMMIT))

    @property
    def is_replaced(self) -> bool:
        """Return whether it came from a folder of runs that newer ones replaced."""
        return (self.path / REPLACED).exists()

    def _text(self, name: str) -> str:
        file = self.path / name
        return file.read_text("utf-8").strip() if file.exists() else ""

    @property
    def source(self) -> str:
        """Return the origin of the run that this one was made from; "" if there is none."""
        made_from = (self.state[role] for role in ROLES if self.state.get(role))
        return next((str(run["manifest_sha256"]) for run in made_from), "")

    @property
    def series(self) -> tuple[str, ...]:
        only = self.state["flags"]["only"]
        return self.gpu, self.state["suite"], only, self.name or self.slug

    @property
    def card(self) -> Card:
        """Read the card of the run; raises ResultError if it has another schema."""
        file = self.path / CARD
        try:
            data = json.loads(file.read_text("utf-8"))
            if data["schema"] == SCHEMA:
                return Card(**data)
            problem = f"schema {data['schema']}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = repr(error)
        raise ResultError(f"{file}: expected a card of schema {SCHEMA}, found {problem}")


@dataclass(frozen=True)
class Related:
    """The addresses of the source and of the newest version of a run, and runs that confirm it."""

    source: str
    newer: str
    confirming: list[RunFolder]


def run_folders(to: Path) -> dict[str, RunFolder]:
    """Return the runs of a site by slug."""
    runs = [RunFolder(to, file.parent) for file in to.glob(f"*/*/{bundle.REMOVED}")]
    return dict(sorted((run.slug, run) for run in runs))


def slug_of(run: Path) -> str:
    """Return the slug of a bundle that is not in the site."""
    identity = bundle.identity(run)
    environment, state = (from_json(run / name) for name in ("environment.json", "run.json"))
    return bundle.link_name(device_name(environment), str(state.get("suite", "")), identity)


def copy(work: tuple[Path, RunFolder]) -> None:
    """Copy a bundle without private names and paths into a folder."""
    run, fresh = work
    fresh.path.mkdir(parents=True)
    bundle.redact(run, fresh.path)
    write_file(fresh.path / NAME, _public_name(run))
    if run.resolve().parent.parent.name == bundle.EARLIER:
        write_file(fresh.path / REPLACED, "")
    if not fresh.environment.get("commit") and (commit := commit_of(run, fresh.environment)):
        write_file(fresh.path / COMMIT, commit)


def move(run: RunFolder, name: str) -> None:
    """Move a run to GPU/NAME, with a number if another run has that address."""
    home = re.sub(r"[^a-z0-9]+", "-", run.gpu.lower().replace("nvidia", "")).strip("-")[:40]
    home = f"gpu-{home}" if home in ("", "runs", *PAGES) else home
    folder = run.to / home / safe(name)
    numbered = (folder.with_name(f"{folder.name}-{n}") for n in range(2, 10_000))
    free = next(path for path in (folder, *numbered) if not path.exists())
    free.parent.mkdir(exist_ok=True)
    run.path.rename(free)


def write_run(site: Site, work: tuple[RunFolder, Related]) -> None:
    """Write the report, the card and the table of a run."""
    folder, related = work
    path = folder.path
    analysis = analyse(store.read(path))
    run_card = card(
        analysis,
        site.claims,
        address=folder.address,
        slug=folder.slug,
        identity=bundle.identity(path),
        origin=folder.origin,
        name=folder.name or str(folder.state["suite"]),
        commit=folder.commit,
    )
    write_file(path / CARD, json.dumps(run_card.to_json()) + "\n")
    rows = as_csv(analysis.rows.drop(columns="blocks_us", errors="ignore"))
    write_file(path / TABLE, gzip.compress(rows.encode(), mtime=0))
    sealed = [name for name in _json(path, bundle.MANIFEST)["files"] if name != bundle.ROWS]
    of_bundle = [bundle.MANIFEST, bundle.REMOVED, f"{bundle.ROWS}.gz", *sealed]
    downloads = {"table": TABLE, "card": CARD, "bundle": of_bundle}
    others = [other.card for other in related.confirming]
    beside = around(
        run_card, site, folder.removed, downloads, others, related.source, related.newer
    )
    build(analysis, path / "index.html", beside)


def _json(folder: Path, name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / name).read_text("utf-8"))
    return data


def _public_name(run: Path) -> str:
    """Return the name of a run's folder; "" if it contains the name of a user or a host."""
    texts = [bundle.content(run, name).decode() for name in ("environment.json", "run.json")]
    names = [name for text in texts for name in bundle.HOME.findall(text)]
    names += [name for text in texts for *_, name in bundle.FIELD.findall(text)]
    called = run.resolve().name
    private = [name for name in names if len(name) >= bundle.SHORTEST]
    return "" if any(name.lower() in called.lower() for name in private) else called
