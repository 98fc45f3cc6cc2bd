"""One sitting of a campaign: as many entries as there is time for, on the devices of this host.

    each device ─> the entry that it has begun; else the first open one that waits for no run and
                   that no other device here measures or has begun
                ─> in pieces (campaign_pieces.py) ─> DIR/NAME, sealed and packed
    no time left, or nothing left to begin ─> the sitting ends; another one measures the rest

    DIR/alike.json     kind of card and code: the first sitting writes them, others compare
    DIR/NAME           a run, once it is whole; for claims a folder of runs with verdicts.json

A card of another kind or other code ends a sitting before it measures. An entry that cannot be
measured here reports the reason, and the others are measured. No entry, and no run of claims,
begins in the last LEAST_S seconds of a budget.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from threading import Condition
from time import monotonic
from typing import Any

from sparsebench.errors import ResultError, SparsebenchError
from sparsebench.harness.claims.checking import check
from sparsebench.harness.claims.claim_plan import read_claims
from sparsebench.harness.run.measure import Progress, RunOptions
from sparsebench.harness.run.plan_part import Part
from sparsebench.harness.run.repeat import Setup, confirm, reproduce
from sparsebench.harness.run.run_json import Flags, OnMessage
from sparsebench.harness.run.worker_process import about_device
from sparsebench.harness.shared_runs.campaign_file import Campaign, Entry
from sparsebench.harness.shared_runs.campaign_pieces import (
    LEAST_S,
    Pieces,
    Unfinished,
    contests_in,
    pieces,
)
from sparsebench.harness.shared_runs.sharing import on_each_device
from sparsebench.results import files
from sparsebench.results.run import bundle, store
from sparsebench.results.run.provenance import KIND, device_id_at, require_equal_facts, shared_facts

VERDICTS = "verdicts.json"
SAME = "code_sha256", *(f"gpu.{name}" for name in KIND)


@dataclass(frozen=True)
class EntryState:
    """How far an entry is on disk: "open", "begun" or "whole", and the seconds of all cards."""

    name: str
    status: str
    done: int = 0
    of: int = 0
    cards: int = 0
    seconds: float = 0.0
    manifest_sha256: str = ""


def state(out: Path, entry: Entry) -> EntryState:
    """Return how far an entry is. Raises ResultError if its runs do not match the campaign."""
    path = out / entry.name
    if entry.kind == "claims":
        runs = [*store.runs_in(path), *_pieces_of_claims(path)]
        status = "whole" if (path / VERDICTS).exists() else "begun" if path.exists() else "open"
        return EntryState(entry.name, status, seconds=_seconds(runs))
    whole = (path / "run.json").exists()
    runs = [path] if whole else pieces(path)
    for run in runs:
        _require_match(run, entry)
    if whole:
        cards = len(files.from_json(path / "environment.json").get("devices", [])) or 1
        done, manifest = (
            files.from_json(path / "run.json")["contests"]["done"],
            bundle.identity(path),
        )
    else:
        cards, manifest = len(runs), ""
        done = len(contests_in(row for run in runs for row in store.rows(run)))
    of = max((files.from_json(run / "run.json")["contests"]["of"] for run in runs), default=0)
    status = "whole" if whole else "begun" if runs else "open"
    return EntryState(entry.name, status, done, of, cards, _seconds(runs), manifest)


def _runs(path: Path, entry: Entry) -> list[Path]:
    """Return the runs of an entry that is whole."""
    return store.runs_in(path) if entry.kind == "claims" else [path]


def _pieces_of_claims(path: Path) -> list[Path]:
    """Return the pieces of the runs that a claims entry has begun. Raises ResultError."""
    return [piece for file in path.glob("*.parts") for piece in pieces(file.with_suffix(""))]


def _seconds(runs: Sequence[Path]) -> float:
    return sum(float(files.from_json(run / "run.json")["seconds"]) for run in runs)


def _require_match(run: Path, entry: Entry) -> None:
    """Raise ResultError for a run that was made from another campaign file, or an older one."""
    flags = files.from_json(run / "run.json")["flags"]
    expected: dict[str, object] = {"replicates": entry.replicates}
    if entry.suite:
        expected |= {"only": entry.only, "energy": entry.energy}
    for name, value in expected.items():
        if entry.kind != "reproduce" and flags[name] != value:
            reason = f"expected {name} {value!r} as in the campaign"
            raise ResultError(f"{run}: {reason}, found {flags[name]!r}")


@dataclass
class Sitting:
    """Measures entries of a campaign into a folder until a moment of time.monotonic().

    reasons  why each entry is not whole; "" once it is
    refused  entries that cannot be measured as they are
    """

    campaign: Campaign
    entries: Sequence[Entry]
    out: Path
    data: Path | None = None
    until: float = inf
    timeout_s: float = 120.0
    on_message: OnMessage = lambda finding: None
    reasons: dict[str, str] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._changed = Condition()
        self._parts: list[Part] = []
        self._left = [e for e in self.entries if state(self.out, e).status != "whole"]
        self._busy = 0
        self._here: frozenset[str] = frozenset()

    def run(self, devices: Sequence[str], progress: Progress) -> None:
        """Measure one entry at a time on each device. Raises Stopped if it is interrupted."""
        self.out.mkdir(parents=True, exist_ok=True)
        if not self._left:
            return
        with ThreadPoolExecutor(len(devices)) as threads:  # a worker takes 14 s to start
            answers = list(threads.map(partial(about_device, data=self.data), devices))
        cards = [self._card(about) for about in answers]
        self._here = frozenset(cards)
        serve = lambda i: self._serve(devices[i], cards[i], progress)  # noqa: E731
        on_each_device(devices, serve, self._parts, self.out, self._stop)

    def _card(self, about: Mapping[str, Any]) -> str:
        """Return a device's identity. Raises ResultError if it is not of the campaign's kind."""
        facts = shared_facts(about["environment"])
        here = {name: facts[name] for name in SAME}
        file = self.out / "alike.json"
        if not file.exists():
            store.write_json(file, here)
        require_equal_facts(str(self.out), files.from_json(file), here)
        return str(about["identity"])

    def _stop(self) -> None:
        with self._changed:
            self._left = []
            self._changed.notify_all()

    def _serve(self, device: str, card: str, progress: Progress) -> None:
        tried: set[str] = set()
        while entry := self._next(card, tried):
            tried.add(entry.name)

            def show(done: int, total: int, problem: str, name: str = entry.name) -> None:
                progress(done, total, f"{name}: {problem}")

            reason, again = "interrupted", False
            try:
                self._measure(entry, device, card, show)
                reason = ""
            except Unfinished as left:
                reason, again = f"the time ended after {left}", True
            except SparsebenchError as error:
                reason, again = str(error), True
                self.refused.add(entry.name)
            finally:
                with self._changed:
                    self.reasons[entry.name] = reason
                    self._busy -= 1
                    if again:
                        self._left.append(entry)
                    self._changed.notify_all()

    def _next(self, card: str, tried: set[str]) -> Entry | None:
        """Wait for an entry that can begin, and take the first one; None if there will be none."""
        with self._changed:
            while True:
                if monotonic() + LEAST_S > self.until:
                    return None
                ready = [e for e in self._left if e.name not in tried and self._ready(e, card)]
                if ready:
                    order = self.campaign.entries.index
                    first = min(ready, key=lambda e: (self._rank(e, card), order(e)))
                    self._left.remove(first)
                    self._busy += 1
                    return first
                if not self._busy:
                    return None
                self._changed.wait()

    def _rank(self, entry: Entry, card: str) -> int:
        """Return 0 if this card has begun the entry, 2 if only another card here has, else 1."""
        path = self.out / entry.name
        try:
            begun = _pieces_of_claims(path) if entry.kind == "claims" else pieces(path)
            cards = {device_id_at(piece) for piece in begun}
        except ResultError:  # a piece is missing, which is reported when the entry is measured
            return 1
        return 0 if card in cards else 2 if cards & self._here else 1

    def _ready(self, entry: Entry, card: str) -> bool:
        """Return whether the runs that an entry needs exist, and note the reason if not."""
        needs = {
            e.name: VERDICTS if e.kind == "claims" else "run.json"
            for e in self.campaign.above(entry)
        }
        missing = [name for name, file in needs.items() if not (self.out / name / file).exists()]
        reason = f"waits for {', '.join(missing)}" if missing else ""
        if not missing and entry.elsewhere:
            run = store.read(self.out / entry.elsewhere)
            if card in {row.device for row in run.rows}:
                reason = "waits for another card of the kind"
        if reason:
            self.reasons[entry.name] = reason
        return not reason

    def _measure(self, entry: Entry, device: str, card: str, progress: Progress) -> None:
        engine = Pieces(
            card,
            self.until,
            self._parts.append,
            self.on_message,
            resumes=entry.kind == "claims",  # what a claim lacks may change as others are judged
        ).measure
        out, data = self.out / entry.name, entry.folder(self.data)
        flags = Flags(device, data, self.timeout_s, entry.replicates, entry.only, entry.energy)
        options = RunOptions(progress=progress)
        setup = Setup(device, data, out, options, engine)
        match entry.kind:
            case "suite":
                engine(entry.read(self.data), flags, out, None, options)
            case "confirm":
                confirm(self.out / entry.of, setup, entry.cases, entry.replicates, entry.only)
            case "reproduce":
                reproduce(self.out / entry.of, setup)
            case _:
                above = self.campaign.above(entry)
                runs = [run for e in above for run in _runs(self.out / e.name, e)]
                check(read_claims(entry.claims or []), flags, runs, out, options, engine)
