"""One sitting of a campaign: as many entries as there is time for, on the devices of this host.

    each device ─> the entry that it has begun; else the first open one that waits for no run and
                   that no other device here measures; runs of this card are confirmed last
                ─> measured as a plan of one part (shared_folder.py) ─> DIR/NAME, sealed and packed
    no time left, or nothing left to begin ─> the sitting ends; another one measures the rest

    DIR/alike.json     kind of card and code: the first sitting writes them, others compare
    DIR/NAME           a run, once it is whole; for claims a folder of runs with verdicts.json
    DIR/NAME.parts     what was measured of it until then, a piece for each card

A card of another kind or other code ends a sitting before it measures. An entry that cannot be
measured here reports the reason, and the others are measured. No entry begins in the last LEAST_S
seconds of a budget.
"""

import gzip
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import inf
from pathlib import Path
from threading import Condition
from time import monotonic
from typing import Any

from sparsebench._writing import write_file
from sparsebench.errors import ResultError, SparsebenchError
from sparsebench.harness.claims.checking import check
from sparsebench.harness.claims.claim_plan import read_claims
from sparsebench.harness.plan.suite import Suite
from sparsebench.harness.run.measure import Progress, RunOptions, Unfinished
from sparsebench.harness.run.plan_part import PlanPart
from sparsebench.harness.run.repeat import Setup, confirm, reproduce
from sparsebench.harness.run.run_json import Flags, OnMessage
from sparsebench.harness.shared_runs.campaign_file import Campaign, CampaignEntry
from sparsebench.harness.shared_runs.run_paths import pieces_of
from sparsebench.harness.shared_runs.shared_folder import about_once
from sparsebench.harness.shared_runs.sharing import measure_alone, on_each_device
from sparsebench.results import files
from sparsebench.results.formatting import amount
from sparsebench.results.run import bundle, store
from sparsebench.results.run.provenance import KIND, device_id_at, require_equal_facts, shared_facts

LEAST_S = 30.0  # left to begin an entry; a process and its ceilings take 16 s
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


def state(out: Path, entry: CampaignEntry) -> EntryState:
    """Return how far an entry is. Raises ResultError if its runs do not match the campaign."""
    path = out / entry.name
    whole, pieces = (path / entry.result).exists(), _pieces(path, entry)
    runs = _runs(path, entry) if whole or entry.kind == "claims" else pieces
    states = [files.from_json(run / "run.json") for run in runs]
    status = "whole" if whole else "begun" if runs or pieces else "open"
    if entry.kind == "claims":
        states += [files.from_json(piece / "run.json") for piece in pieces]
        return EntryState(entry.name, status, seconds=sum(each["seconds"] for each in states))
    for run, each in zip(runs, states, strict=True):
        _require_match(run, each["flags"], entry)
    environments = [files.from_json(run / "environment.json") for run in runs]
    return EntryState(
        entry.name,
        status,
        done=sum(each["contests"]["done"] for each in states),
        of=max((each["contests"]["of"] for each in states), default=0),
        cards=sum(len(each.get("devices", [each])) for each in environments),
        seconds=sum(each["seconds"] for each in states),
    )


def _runs(path: Path, entry: CampaignEntry) -> list[Path]:
    """Return the runs of an entry that is whole."""
    return store.runs_in(path) if entry.kind == "claims" else [path]


def _pieces(path: Path, entry: CampaignEntry) -> list[Path]:
    """Return what was measured of an entry, or of the runs of claims, that is not whole."""
    begun = path.glob("*.parts") if entry.kind == "claims" else [path]
    return [piece for run in begun for piece in pieces_of(run)]


@cache
def _cards_of(run: Path) -> frozenset[str | None]:
    """Return the cards that measured a run, which is sealed: reading it takes up to a second."""
    return frozenset(row.device for row in store.rows(run))


def _require_match(run: Path, flags: Mapping[str, Any], entry: CampaignEntry) -> None:
    """Raise ResultError for a run that was made from another campaign file, or an older one."""
    expected: dict[str, object] = {"replicates": entry.replicates}
    if entry.suite:
        expected |= {"only": entry.only, "energy": entry.energy}
    for name, value in expected.items():
        if entry.kind != "reproduce" and flags[name] != value:
            reason = f"expected {name} {value!r} as in the campaign"
            raise ResultError(f"{run}: {reason}, found {flags[name]!r}")


def pack(run: Path) -> None:
    """Compress the rows of a sealed run; its manifest has the digest of the uncompressed text."""
    plain = run / bundle.ROWS
    if plain.exists():
        write_file(run / f"{bundle.ROWS}.gz", gzip.compress(plain.read_bytes(), mtime=0))
        plain.unlink()


@dataclass
class Sitting:
    """Measures entries of a campaign into a folder until a moment of time.monotonic().

    reasons  why each entry is not whole; "" once it is
    refused  entries that cannot be measured as they are
    """

    campaign: Campaign
    entries: Sequence[CampaignEntry]
    out: Path
    data: Path | None = None
    until: float = inf
    timeout_s: float = 120.0
    on_message: OnMessage = lambda finding: None
    reasons: dict[str, str] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._changed = Condition()
        self._parts: list[PlanPart] = []
        self._left = [e for e in self.entries if state(self.out, e).status != "whole"]
        self._busy = 0

    def run(self, devices: Sequence[str], progress: Progress) -> None:
        """Measure one entry at a time on each device. Raises Stopped if it is interrupted."""
        self.out.mkdir(parents=True, exist_ok=True)
        if not self._left:
            return
        with ThreadPoolExecutor(len(devices)) as threads:  # a worker takes 14 s to start
            answers = list(threads.map(partial(about_once, data=self.data), devices))
        cards = [self._card(about) for about in answers]
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
                contests = f"{left.done} of {amount(left.of, 'contest')}"
                reason, again = f"the time ended after {contests}", True
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

    def _next(self, card: str, tried: set[str]) -> CampaignEntry | None:
        """Wait for an entry that can begin, and take the first one; None if there will be none."""
        with self._changed:
            while True:
                if monotonic() + LEAST_S > self.until:
                    return None
                ready = [e for e in self._left if e.name not in tried and self._ready(e, card)]
                if ready:
                    first = min(ready, key=lambda e: self._rank(e, card))
                    self._left.remove(first)
                    self._busy += 1
                    return first
                if not self._busy:
                    return None
                self._changed.wait()

    def _rank(self, entry: CampaignEntry, card: str) -> tuple[bool, bool, int]:
        """Return an entry's place in the order of a card, which confirms its own runs last."""
        begun = card in map(device_id_at, _pieces(self.out / entry.name, entry))
        measured = bool(entry.confirm) and card in _cards_of(self.out / entry.of)
        return not begun, measured, self.campaign.entries.index(entry)

    def _ready(self, entry: CampaignEntry, card: str) -> bool:
        """Return whether the runs that an entry needs exist, and note the reason if not."""
        above = self.campaign.above(entry)
        missing = [e.name for e in above if not (self.out / e.name / e.result).exists()]
        reason = f"waits for {', '.join(missing)}" if missing else ""
        if not missing and entry.reproduce and card in _cards_of(self.out / entry.of):
            reason = "waits for another card of the kind"
        if reason:
            self.reasons[entry.name] = reason
        return not reason

    def _measure(self, entry: CampaignEntry, device: str, card: str, progress: Progress) -> None:
        out, data = self.out / entry.name, entry.folder(self.data)
        flags = Flags(device, data, self.timeout_s, entry.replicates, entry.only, entry.energy)
        options = RunOptions(progress=progress)
        setup = Setup(device, data, out, options, self._engine)
        match entry.kind:
            case "suite":
                self._engine(entry.read(self.data), flags, out, options)
            case "confirm":
                confirm(self.out / entry.of, setup, entry.cases, entry.replicates, entry.only)
            case "reproduce":
                reproduce(self.out / entry.of, setup)
            case _:
                above = self.campaign.above(entry)
                runs = [run for e in above for run in _runs(self.out / e.name, e)]
                engine = partial(self._engine, as_begun=True)
                check(read_claims(entry.claims or []), flags, runs, out, options, engine)

    def _engine(
        self,
        suite: Suite,
        flags: Flags,
        out: Path | None,
        options: RunOptions,
        as_begun: bool = False,
    ) -> Path:
        """Measure in one part until the sitting ends; raise Unfinished if it is not whole.

        Only one device at a time measures an entry, so that another card can reproduce it.
        """
        assert out
        options = replace(options, on_message=self.on_message, until=self.until)
        begun = self._parts.append
        path = measure_alone(suite, flags, out, options, as_begun=as_begun, on_start=begun)
        pack(path)
        return path
