"""A run of a campaign in pieces, one for each card that measured some of it.

    NAME.parts/pieces.json   how many pieces were begun
    NAME.parts/alike.json    kind of card, code and libraries of the first piece; others compare
    NAME.parts/1             a run directory: what the first card measured, contest by contest
    NAME.parts/2             what another card of the kind measured of the rest
    NAME                     the run, once it is whole: the only piece, or all of them merged

A card that comes again resumes its own piece, as `run --resume` does. No file contains a path of
the machine, and rows are packed between sittings, so the pieces can be carried to another machine.
"""

import gzip
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

from sparsebench._writing import write_file
from sparsebench.errors import ResultError
from sparsebench.harness.machine.cpu_placement import boot
from sparsebench.harness.plan.selection import planned_contests
from sparsebench.harness.plan.suite import Suite
from sparsebench.harness.run.measure import RunOptions, measure
from sparsebench.harness.run.plan_part import Part
from sparsebench.harness.run.run_json import Flags, OnMessage
from sparsebench.harness.shared_runs.merging import merge
from sparsebench.harness.shared_runs.shared_folder import OnStart, split_by_device
from sparsebench.results import files
from sparsebench.results.formatting import amount
from sparsebench.results.record import Row
from sparsebench.results.run import bundle, store

LEAST_S = 30.0  # left to begin a run; a process and its ceilings take 16 s


class Unfinished(Exception):
    """The time ended before the run was whole."""

    def __init__(self, done: int, of: int) -> None:
        super().__init__(f"{done} of {amount(of, 'contest')}")
        self.done, self.of = done, of


@dataclass(frozen=True)
class Pieces:
    """Measures as run/measure.py does, in pieces, on one card and until a moment.

    device_id  of this card, which tells its pieces from those of other cards
    until      a moment of time.monotonic()
    on_start   called with each part, so that another thread can stop it
    resumes    whether a run that has begun keeps its own selection, processes and energy; otherwise
               flags that differ from them are an error
    """

    device_id: str
    until: float
    on_start: OnStart = lambda part: None
    on_message: OnMessage = lambda finding: None
    resumes: bool = False

    def measure(
        self,
        suite: Suite,
        flags: Flags,
        out: Path | None,
        resume: Path | None = None,
        options: RunOptions = RunOptions(),  # noqa: B008 (frozen)
    ) -> Path:
        """Measure the rest and return the whole run at `out`; raise Unfinished until it is."""
        if not out or resume:
            got = f"{resume}, which is to be resumed" if resume else "no name"
            raise ResultError(f"campaign: expected the name of a new run, found {got}")
        runs, folder = pieces(out), parts(out)
        if runs and self.resumes:
            before = files.from_json(runs[0] / "run.json")["flags"]
            names = "only", "replicates", "energy"
            flags = replace(flags, **{name: before[name] for name in names})
        of = len(planned_contests(suite, flags.device, flags.only)) * flags.replicates
        ours, earlier = split_by_device(runs, self.device_id, suite, flags)
        if len(contests_in(earlier)) < of and monotonic() + LEAST_S <= self.until:
            number = int(ours.name) if ours else len(runs) + 1
            part = Part(folder, number, boot(), earlier, alone=True)
            self.on_start(part)
            folder.mkdir(parents=True, exist_ok=True)
            if ours:
                unpack(ours)
            options = replace(options, on_message=self.on_message, until=self.until, part=part)
            try:
                measure(suite, flags, None if ours else folder / str(number), ours, options)
            finally:
                runs = pieces(out)
                store.write_json(folder / "pieces.json", {"begun": len(runs)})
                for run in runs:
                    pack(run)
        done = len(contests_in(row for run in runs for row in store.rows(run)))
        if done < of:
            raise Unfinished(done, of)
        return join(out, runs, flags.data)


def parts(out: Path) -> Path:
    """Return the folder of a run's pieces."""
    return out.with_name(f"{out.name}.parts")


def pieces(out: Path) -> list[Path]:
    """Return the pieces of a run in order. Raises ResultError if one is missing."""
    folder, record = parts(out), parts(out) / "pieces.json"
    count = files.from_json(record)["begun"] if record.exists() else 0
    runs = {int(run.parent.name): run.parent for run in folder.glob("*/run.json")}
    if missing := sorted({*range(1, count + 1)} - runs.keys()):
        expected = f"expected {count} pieces, found no {', '.join(map(str, missing))}"
        raise ResultError(f"{folder}: {expected}; restore it, or remove the folder to start again")
    return [runs[number] for number in sorted(runs)]


def contests_in(rows: Iterable[Row]) -> set[tuple[int, str]]:
    """Return the contests of rows, as process and problem."""
    return {(row.replicate, row.case.problem.id) for row in rows}


def join(out: Path, runs: Sequence[Path], data: Path | None) -> Path:
    """Make the run from its pieces, which have all contests, and remove them."""
    if len(runs) == 1:
        state = dict(store.read(runs[0]).state)
        for name in ("schema", "part"):  # it is the whole run, no part
            state.pop(name, None)
        named = bundle.verify(runs[0])
        store.set_state(runs[0], state)
        bundle.seal_files(runs[0], named)
        runs[0].rename(out)
    else:
        merge(runs, out, data, plugins=True)
        pack(out)
    shutil.rmtree(parts(out))
    return out


def pack(run: Path) -> None:
    """Compress the rows of a sealed run; its manifest has the digest of the uncompressed text."""
    plain = run / bundle.ROWS
    if plain.exists() and (run / bundle.MANIFEST).exists():
        zipped = gzip.compress(plain.read_bytes(), mtime=0)
        write_file(run / f"{bundle.ROWS}.gz", zipped)
        plain.unlink()


def unpack(run: Path) -> None:
    """Write the rows of a run as text again, before it is resumed."""
    zipped = run / f"{bundle.ROWS}.gz"
    if zipped.exists():
        write_file(run / bundle.ROWS, bundle.content(run, bundle.ROWS))
        zipped.unlink()
