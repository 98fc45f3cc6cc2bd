"""One sitting of a campaign: as many of its entries as there is time for, on the devices here.

    each device ─> the entry that it has begun, else the first that is open, whose runs above it are
                   whole, and that no other device here measures or has begun
                ─> in pieces (pieces.py) ─> DIR/NAME, sealed and packed
    no time left, or nothing left to begin ─> the sitting ends, and another one goes on

    DIR/alike.json     kind of card and code: the first sitting writes them, others are held against
    DIR/NAME           a run, once it is whole; of claims a folder of runs with verdicts.json

A card of another kind and other code end a sitting before it measures. An entry that cannot go on
here says why, and is left; the others go on. Nothing begins in the last LEAST_S of a budget.
"""

import os
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from threading import Condition
from time import monotonic

from sparsebench.errors import ResultError, SparsebenchError
from sparsebench.harness.claims.checking import check
from sparsebench.harness.claims.claim_catalog import chosen
from sparsebench.harness.machine.cpu_placement import apart
from sparsebench.harness.run import worker_process
from sparsebench.harness.run.measure import Progress, RunOptions, Stopped
from sparsebench.harness.run.plan_part import Part
from sparsebench.harness.run.repeat import confirm, reproduce
from sparsebench.harness.run.run_json import Flags, OnMessage
from sparsebench.harness.shared_runs.campaign_file import Campaign, Entry
from sparsebench.harness.shared_runs.local_gpus import end
from sparsebench.harness.shared_runs.pieces import (
    Pieces,
    Unfinished,
    card_of,
    done_in,
    pieces,
)
from sparsebench.results import bundle, files, store
from sparsebench.results.provenance import KIND, require_equal_facts, shared_facts

LEAST_S = 30.0  # to begin an entry with: a process and its ceilings take 16 s
VERDICTS = "verdicts.json"
SAME = "code_sha256", *(f"gpu.{name}" for name in KIND)


@dataclass(frozen=True)
class State:
    """How far an entry is on disk: `open`, `begun` or `whole`.

    done, seconds  contests, and of all cards together, as far as they are told
    """

    name: str
    status: str
    done: int = 0
    of: int = 0
    cards: int = 0
    seconds: float = 0.0
    manifest_sha256: str = ""


def state(to: Path, entry: Entry) -> State:
    """Say how far an entry is; ResultError where what is there is not what the entry asks for."""
    path = to / entry.name
    if entry.kind == "claims":
        runs = sorted(file.parent for file in path.glob("*/run.json"))
        status = "whole" if (path / VERDICTS).exists() else "begun" if path.exists() else "open"
        return State(entry.name, status, seconds=_seconds(runs))
    if (path / "run.json").exists():
        _require_asked(path, entry)
        counts = store.read(path).state["contests"]
        cards = len(store.read(path).environment.get("devices", [])) or 1
        known = counts["done"], counts["of"], cards, _seconds([path])
        return State(entry.name, "whole", *known, bundle.identity(path))
    runs = pieces(path)
    for run in runs:
        _require_asked(run, entry)
    done = len(done_in(row for run in runs for row in store.rows(run)))
    of = max((files.from_json(run / "run.json")["contests"]["of"] for run in runs), default=0)
    return State(entry.name, "begun" if runs else "open", done, of, len(runs), _seconds(runs))


def _seconds(runs: Sequence[Path]) -> float:
    return sum(float(files.from_json(run / "run.json")["seconds"]) for run in runs)


def _require_asked(run: Path, entry: Entry) -> None:
    """Refuse a run that another campaign file, or an older one, has left there."""
    flags = files.from_json(run / "run.json")["flags"]
    asked: dict[str, object] = {"replicates": entry.replicates}
    if entry.suite:
        asked |= {"only": entry.only, "energy": entry.energy}
    for name, expected in asked.items():
        if entry.kind != "reproduce" and flags[name] != expected:
            said = f"expected {name} {expected!r} as the campaign asks"
            raise ResultError(f"{run}: {said}, found {flags[name]!r}")


@dataclass
class Sitting:
    """What is measured now: of a campaign the `entries`, below `to`, until a moment.

    said    by entry, why it is not whole; "" once it is
    refused those that cannot be measured as they are
    """

    campaign: Campaign
    entries: Sequence[Entry]
    to: Path
    data: Path | None = None
    until: float = inf
    timeout_s: float = 120.0
    on_message: OnMessage = lambda finding: None
    said: dict[str, str] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Find what is left."""
        self._changed = Condition()
        self._parts: list[Part] = []
        self._left = [e for e in self.entries if state(self.to, e).status != "whole"]
        self._busy = 0
        self._here: frozenset[str] = frozenset()

    def run(self, devices: Sequence[str], progress: Progress) -> None:
        """Measure on some devices, an entry each at a time; Stopped where it is interrupted."""
        self.to.mkdir(parents=True, exist_ok=True)
        if not self._left:
            return
        cards = {device: self._card(device) for device in devices}
        self._here = frozenset(cards.values())
        cpus = apart(devices)

        def one(number: int) -> None:
            os.sched_setaffinity(0, cpus[number])  # of this thread, and of what it starts
            self._serve(devices[number], cards[devices[number]], progress)

        with ThreadPoolExecutor(len(devices)) as threads:
            running: list[Future[None]] = [threads.submit(one, n) for n in range(len(devices))]
            try:
                ended, _ = wait(running, return_when=FIRST_EXCEPTION)
            except KeyboardInterrupt as stop:
                self._stop(running)
                raise Stopped(self.to) from stop
            failed = [error for future in ended if (error := future.exception())]
            if failed:
                self._stop(running)
                raise failed[0]

    def _card(self, device: str) -> str:
        """Ask a worker what a device is; ResultError where it is not of the campaign's kind."""
        worker = worker_process.Worker(device, self.data, worker_process.Log())
        worker.kill()
        known = shared_facts(worker.about["environment"])
        here = {name: known[name] for name in SAME}
        file = self.to / "alike.json"
        if not file.exists():
            store.write_json(file, here)
        require_equal_facts(str(self.to), files.from_json(file), here)
        return str(worker.about["identity"])

    def _stop(self, running: Sequence[Future[None]]) -> None:
        with self._changed:
            self._left = []
            self._changed.notify_all()
        end(self._parts, running)

    def _serve(self, device: str, card: str, progress: Progress) -> None:
        """Measure one entry after the other until none is left that can begin on this card."""
        tried: set[str] = set()
        while entry := self._next(card, tried):
            tried.add(entry.name)

            def show(done: int, total: int, problem: str, name: str = entry.name) -> None:
                progress(done, total, f"{name}: {problem}")

            why, again = "interrupted", False
            try:
                self._measured(entry, device, card, show)
                why = ""
            except Unfinished as left:
                why, again = f"the time ended after {left}", True
            except SparsebenchError as error:
                why, again = str(error), True
                self.refused.add(entry.name)
            finally:
                with self._changed:
                    self.said[entry.name] = why
                    self._busy -= 1
                    if again:
                        self._left.append(entry)
                    self._changed.notify_all()

    def _next(self, card: str, tried: set[str]) -> Entry | None:
        """Take the first entry that can begin, once one can; None where none will."""
        with self._changed:
            while True:
                if monotonic() + LEAST_S > self.until:
                    return None
                ready = [e for e in self._left if e.name not in tried and self._ready(e, card)]
                if ready:
                    first = min(ready, key=lambda e: (self._begun(e, card), self._place(e)))
                    self._left.remove(first)
                    self._busy += 1
                    return first
                if not self._busy:
                    return None
                self._changed.wait()

    def _place(self, entry: Entry) -> int:
        return self.campaign.entries.index(entry)

    def _begun(self, entry: Entry, card: str) -> int:
        """Return 0 for what this card has begun, 2 for what only another one here has, else 1."""
        try:
            cards = {card_of(run) for run in pieces(self.to / entry.name)}
        except ResultError:  # a piece is missing: who measures the entry says so
            return 1
        return 0 if card in cards else 2 if cards & self._here else 1

    def _ready(self, entry: Entry, card: str) -> bool:
        """Say whether what an entry starts from is there, and note what it waits for."""
        waits = [e.name for e in self.campaign.above(entry) if not self._whole(e)]
        why = f"waits for {', '.join(waits)}" if waits else ""
        if not waits and entry.elsewhere:
            run = store.read(self.to / entry.elsewhere)
            before = {row.device for row in run.rows}
            why = "waits for another card of the kind" if card in before else ""
        if why:
            self.said[entry.name] = why
        return not why

    def _whole(self, entry: Entry) -> bool:
        file = VERDICTS if entry.kind == "claims" else "run.json"
        return (self.to / entry.name / file).exists()

    def _measured(self, entry: Entry, device: str, card: str, progress: Progress) -> None:
        """Measure an entry, whole, or raise Unfinished."""
        engine = Pieces(card, self.until, self._parts.append, self.on_message).measure
        out, data = self.to / entry.name, entry.folder(self.data)
        flags = Flags(device, data, self.timeout_s, entry.replicates, entry.only, entry.energy)
        options = RunOptions(progress=progress)
        match entry.kind:
            case "suite":
                engine(entry.read(self.data), flags, out, None, options)
            case "confirm":
                confirm(
                    self.to / entry.of, device, data, out, options,
                    cases=entry.cases, replicates=entry.replicates, condition=entry.only,
                    engine=engine,
                )  # fmt: skip
            case "reproduce":
                reproduce(self.to / entry.of, device, data, out, options, engine)
            case _:
                asked = chosen(entry.claims or [])
                runs = [self.to / e.name for e in self.campaign.above(entry)]
                check(asked, flags, runs, out, progress, engine)
