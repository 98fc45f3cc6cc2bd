"""A run in pieces: one a card that measured a part of it, merged once all of it is there.

    NAME.parts/pieces.json   how many pieces were begun
    NAME.parts/alike.json    kind of card, code, libraries: of the first piece; others compare
    NAME.parts/1             a run directory: what the first card measured, contest by contest
    NAME.parts/2             another card of the kind goes on with what that one left
    NAME                     the run: the one piece that there was, or all of them merged

A card that comes again goes on with its own piece, as `run --resume` does. NAME is there when every
process has every contest, and not before. No file has a path of the machine, and rows are packed
between sittings: a folder of pieces can be carried to another machine.
"""

import gzip
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sparsebench.errors import ResultError
from sparsebench.harness.machine.cpu_placement import boot
from sparsebench.harness.plan.selection import planned
from sparsebench.harness.plan.suite import Contest, Suite
from sparsebench.harness.run.measure import RunOptions, measure
from sparsebench.harness.run.plan_part import Part
from sparsebench.harness.run.run_json import Flags, OnMessage
from sparsebench.harness.shared_runs.merging import merge
from sparsebench.harness.shared_runs.part_work import settled
from sparsebench.results import bundle, files, store
from sparsebench.results.formatting import amount
from sparsebench.results.provenance import device_id_at
from sparsebench.results.record import Row


class Unfinished(Exception):
    """The time ended before a run did: `done` of `of` contests are kept."""

    def __init__(self, done: int, of: int) -> None:
        """Keep the counts."""
        super().__init__(f"{done} of {amount(of, 'contest')}")
        self.done, self.of = done, of


class Rest(Part):
    """What earlier cards left of a run: all of it is this piece's, so nothing has to be claimed."""

    def __post_init__(self) -> None:
        """Read no claims."""

    def claim(self, problem: str, new: bool = True) -> bool:
        """Take every problem."""
        return True

    def total(self, contests: Iterable[Contest], replicates: int) -> int:
        """Return how many contests are left to this piece."""
        before = {(row.replicate, row.case.problem.id) for row in self.earlier}
        return len(list(contests)) * replicates - len(before)


@dataclass(frozen=True)
class Pieces:
    """Measures as harness/run/measure.py does, on one card and until a moment, in pieces.

    card   the identity of this device, which tells whose piece is whose
    until  a moment of time.monotonic()
    begun  hears of each piece, so that another thread can stop it
    """

    card: str
    until: float
    begun: Callable[[Part], None] = lambda part: None
    on_message: OnMessage = lambda finding: None

    def measure(
        self,
        suite: Suite,
        flags: Flags,
        out: Path | None,
        resume: Path | None = None,
        options: RunOptions = RunOptions(),  # noqa: B008 (frozen)
    ) -> Path:
        """Measure what is left and return the run, whole, at `out`; Unfinished while it is not."""
        if not out or resume:
            found = f"{resume}, which is to be resumed" if resume else "no name"
            raise ResultError(f"campaign: expected the name of a new run, found {found}")
        contests = planned(suite, flags.device, flags.only)
        runs, folder = pieces(out), parts(out)
        own = [run for run in runs if card_of(run) == self.card]
        others = [run for run in runs if run not in own]
        earlier = [row for run in others for row in settled(run, suite, flags, contests)]
        if len(done_in(earlier)) < len(contests) * flags.replicates:
            number = int(own[-1].name) if own else len(runs) + 1
            rest = Rest(folder, number, boot(), earlier)
            self.begun(rest)
            folder.mkdir(parents=True, exist_ok=True)
            if own:
                unpack(own[-1])
            target = None if own else folder / str(number)
            try:
                options = replace(options, on_message=self.on_message, until=self.until, part=rest)
                measure(suite, flags, target, own[-1] if own else None, options)
            finally:
                runs = pieces(out)
                store.write_json(folder / "pieces.json", {"begun": len(runs)})
                for run in runs:
                    pack(run)
        rows = [row for run in runs for row in store.rows(run)]
        done, of = len(done_in(rows)), len(contests) * flags.replicates
        if done < of:
            raise Unfinished(done, of)
        return whole(out, runs, flags.data)


def parts(out: Path) -> Path:
    """Return where the pieces of a run are."""
    return out.with_name(f"{out.name}.parts")


def pieces(out: Path) -> list[Path]:
    """Return the pieces of a run in their order; ResultError where one is missing or changed."""
    folder, noted = parts(out), parts(out) / "pieces.json"
    begun = files.from_json(noted)["begun"] if noted.exists() else 0
    found = {int(run.parent.name): run.parent for run in folder.glob("*/run.json")}
    if lost := sorted({*range(1, begun + 1)} - found.keys()):
        said = f"expected {begun} pieces, found no {', '.join(map(str, lost))}"
        raise ResultError(f"{folder}: {said}; bring it back, or remove the folder to begin anew")
    return [found[number] for number in sorted(found)]


def card_of(run: Path) -> str:
    """Return the identity of the card that measured a piece."""
    return device_id_at(run)


def done_in(rows: Iterable[Row]) -> set[tuple[int, str]]:
    """Return the contests, process and problem, that rows are of."""
    return {(row.replicate, row.case.problem.id) for row in rows}


def whole(out: Path, runs: Sequence[Path], data: Path | None) -> Path:
    """Make the run of its pieces, which have all of it, and remove them."""
    if len(runs) == 1:
        state = dict(store.read(runs[0]).state)
        for name in ("schema", "part"):  # it is a part of nothing
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
    """Compress the rows of a sealed run, whose manifest has the digest of their text."""
    plain = run / bundle.ROWS
    if plain.exists() and (run / bundle.MANIFEST).exists():
        packed = gzip.compress(plain.read_bytes(), mtime=0)
        (run / f"{bundle.ROWS}.gz").write_bytes(packed)
        plain.unlink()


def unpack(run: Path) -> None:
    """Write the rows of a run as text again, before it is gone on with."""
    packed = run / f"{bundle.ROWS}.gz"
    if packed.exists():
        (run / bundle.ROWS).write_bytes(bundle.content(run, bundle.ROWS))
        packed.unlink()
