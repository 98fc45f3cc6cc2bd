"""Claims checked: what is missing is measured, what is promising is confirmed, all is judged.

    claims ─> parts ─> cells in the runs that were given
                    ─> what has no cell, by suite ─> a run a suite          DIR/SUITE
                                                     (costs.py says how long it takes)
                    ─> the best cell of each `exists` ─> measured alone     DIR/SUITE-confirmed
           ─> verdicts                                                      DIR/verdicts.json

A confirming run has fresh processes, FEWEST or more, and begins from the suite of its screening
(harness/run/repeat.py). A check of fewer processes is a look, and confirms nothing.

A check has a time to end at. No run starts after it, nothing is confirmed, and a run that it cut
short is gone on with by the next check into the same folder.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

from sparsebench.errors import SuiteError
from sparsebench.harness.bench.energy import NoMeter
from sparsebench.harness.claims.claim_plan import Part, asked, parts, refused
from sparsebench.harness.machine.device import simulated
from sparsebench.harness.run.measure import Progress, RunOptions, measure
from sparsebench.harness.run.recorded_plan import own_suite
from sparsebench.harness.run.repeat import Engine, again, whole
from sparsebench.harness.run.run_json import Flags
from sparsebench.results import bundle, store
from sparsebench.results.analysis import analyse
from sparsebench.results.ceilings import Ceilings
from sparsebench.results.claims.cells import Cell, cells, file_problems, judging_cells
from sparsebench.results.claims.model_cells import model_cells, read_model_file
from sparsebench.results.claims.planned import PlannedClaim
from sparsebench.results.claims.schema import ClaimFile
from sparsebench.results.claims.verdict import TestVerdict, Verdict, judge
from sparsebench.results.statistics import FEWEST
from sparsebench.results.store import Run

VERDICTS_SCHEMA = "sparsebench/verdicts@1"

Wanted = tuple[Part, set[str]]
"""A test with those of its problems that have no cell."""


@dataclass
class Evidence:
    """The plan of some claims and the cells that are known of them.

    parts    of each claim, by its name
    cells    likewise, over all runs that were read
    files    likewise, over all files of commands
    refused  by claim and test, why it was not run
    runs     paths of the runs, by the name that cells have
    left     suites that the time did not reach, or not all of
    """

    written: Sequence[ClaimFile]
    parts: dict[str, list[Part]] = field(default_factory=dict)
    cells: dict[str, list[Cell]] = field(default_factory=dict)
    files: dict[str, list[Cell]] = field(default_factory=dict)
    refused: dict[tuple[str, str], str] = field(default_factory=dict)
    runs: dict[str, Path] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    def read(self, paths: Iterable[Path]) -> None:
        """Add the cells of runs and of files of commands; ResultError if one cannot be read."""
        for path in paths:
            if path.suffix == ".json":
                self._read_file(path)
                continue
            run = store.read(path)
            name = path.name if path.name not in self.runs else f"{path.parent.name}/{path.name}"
            if name in self.runs:
                raise SuiteError(f"{path}: expected each run once, found {name} twice")
            self.runs[name] = path
            there = {row.case.problem.id for row in run.rows}
            touched = [(part, ids) for part in self.all_parts if (ids := _in(part, run) & there)]
            if not touched:
                continue
            found = analyse(run)
            for part, ids in touched:
                own = cells(part.test, ids, run, found)
                self.cells[part.written.name] += [replace(cell, run=name) for cell in own]

    def _read_file(self, path: Path) -> None:
        """Add the cells of a file that train-lm or whole wrote."""
        found = read_model_file(path)
        for each in self.written:
            own = [
                cell for test in each.claim.tests for cell in model_cells(test, found, path.stem)
            ]
            self.files.setdefault(each.name, []).extend(own)

    @property
    def all_parts(self) -> list[Part]:
        """Return the parts of every claim."""
        return [part for own in self.parts.values() for part in own]

    def asked(self, ceilings: Ceilings | None = None) -> list[PlannedClaim]:
        """Return the claims as reports read them; with ceilings, bounded for that device."""
        return [
            asked(
                written,
                self.parts[written.name],
                ceilings,
                self._refused(written.name),
                self.files.get(written.name, ()),
            )
            for written in self.written
        ]

    def verdicts(self) -> dict[str, list[Verdict]]:
        """Return the verdicts on each claim, one a device; simulated ones only where all are."""
        known = {name: [*own, *self.files.get(name, ())] for name, own in self.cells.items()}
        known = judging_cells(known)
        return {
            each.name: judge(
                each.name,
                each.claim,
                known[each.name],
                {part.test.name: part.problems for part in self.parts[each.name]},
                self._refused(each.name),
            )
            for each in self.written
        }

    def _refused(self, name: str) -> dict[str, str]:
        return {test: why for (claim, test), why in self.refused.items() if claim == name}


def _in(part: Part, run: Run) -> set[str]:
    """Return the ids of problems that are a test's where a run has them."""
    return part.problems | file_problems(part.test, part.written.claim.measured(part.test), run)


def evidence(
    written: Sequence[ClaimFile], runs: Iterable[Path] = (), data: Path | None = None
) -> Evidence:
    """Plan claims and read runs: all that a verdict without a GPU needs."""
    found = Evidence(written)
    for each in written:
        found.parts[each.name] = parts(each, data)
        found.cells[each.name] = []
    found.read(runs)
    return found


def check(
    written: Sequence[ClaimFile],
    flags: Flags,
    runs: Iterable[Path],
    to: Path,
    progress: Progress,
    engine: Engine | None = None,
    until: float = inf,
    planned: Callable[[Evidence], None] = lambda found: None,
) -> Evidence:
    """Measure what no run has, confirm what is promising, and write it all below `to`.

    A check that was stopped is gone on with: runs that are below `to` already count. `engine` may
    measure a run in pieces. `until` is a moment of time.monotonic(), as measure.py has it.
    `planned` hears what is known, and so what is missing, before anything is measured.
    """
    engine = engine or measure
    options = RunOptions(progress=progress, until=until)
    found = evidence(written, [*runs, *_begun(to)], flags.data)
    for part in found.all_parts:
        if reason := refused(part, flags.device):
            found.refused[part.written.name, part.test.name] = reason
    planned(found)
    found.read(_stopped(to, flags, options, engine))
    for wanted in missing(found, flags.device):
        if monotonic() >= until:
            found.left.append(wanted[0][0].suite.name)
            continue
        try:
            found.read([_measured(wanted, flags, to, options, engine)])
        except NoMeter as error:
            why = {(part.written.name, part.test.name): str(error) for part, _ in wanted}
            found.refused |= why
    found.left += [path.name for path in _unfinished(to)]
    if flags.replicates >= FEWEST and not found.left:
        for screening, chosen in _promising(found).items():
            found.read([_confirmed(found, screening, chosen, flags, to, options, engine)])
    to.mkdir(parents=True, exist_ok=True)
    store.write_json(to / "verdicts.json", to_json(found))
    return found


def to_json(found: Evidence) -> dict[str, Any]:
    """Return the verdicts with their cells."""
    return {
        "schema": VERDICTS_SCHEMA,
        "claims": {
            name: [
                {
                    "device": verdict.device,
                    "verdict": str(verdict.word),
                    "basis": str(verdict.basis),
                    "leans": verdict.tendency and str(verdict.tendency),
                    "simulated": verdict.simulated,
                    "sentence": verdict.sentence,
                    "tests": [_test_json(judged) for judged in verdict.tests],
                }
                for verdict in verdicts
            ]
            for name, verdicts in found.verdicts().items()
        },
    }


def _test_json(judged: TestVerdict) -> dict[str, Any]:
    kept = "run", "fields", "subject", "baseline", "value", "low", "high", "kind", "reason"
    return {
        "test": judged.test.name,
        "threshold": judged.test.sentence,
        "verdict": str(judged.word),
        "basis": str(judged.basis),
        "why": judged.why,
        "deciding": [{n: cell.to_json()[n] for n in kept} for cell in judged.deciding],
    }


def missing(found: Evidence, device: str) -> list[list[Wanted]]:
    """Return, by suite, the parts that have problems without a cell on such a device, and those.

    Parts that ask for energy are apart: it takes seconds a case.
    """
    by_suite: dict[tuple[str, bool], list[Wanted]] = {}
    for part in found.all_parts:
        name = part.written.name
        if (name, part.test.name) in found.refused:
            continue
        own = [cell for cell in found.cells[name] if cell.test == part.test.name]
        known = {cell.problem for cell in own if cell.simulated == simulated(device)}
        if left := part.problems - known:
            by_suite.setdefault((part.suite.text, measures_energy(part)), []).append((part, left))
    return list(by_suite.values())


def _measured(
    wanted: list[Wanted], flags: Flags, to: Path, options: RunOptions, engine: Engine
) -> Path:
    """Run what is missing of one suite."""
    suite = wanted[0][0].suite
    ids = dict.fromkeys(case for part, problems in wanted for case in part.cases(problems))
    given = replace(flags, only=f"case={'|'.join(ids)}", energy=measures_energy(wanted[0][0]))
    names = (f"{suite.name}-{number}" if number > 1 else suite.name for number in count(1))
    path = next(to / name for name in names if not (to / name).exists())
    return engine(suite, given, path, None, options)


def measures_energy(part: Part) -> bool:
    """Say whether a test asks for energy, and its runs need a window of seconds a case."""
    return part.test.metric == "energy_saved"


def _begun(to: Path) -> list[Path]:
    """Return the runs that an earlier check finished in a folder."""
    return [file.parent for file in sorted(to.glob("*/run.json")) if _finished(file.parent)]


def _finished(path: Path) -> bool:
    return (path / "run.json").exists() and store.read(path).state["status"] == "finished"


def _unfinished(to: Path) -> list[Path]:
    """Return the runs in a folder that were stopped; a confirming one is `_confirmed`'s."""
    return [
        path
        for path in sorted(file.parent for file in to.glob("*/run.json"))
        if (state := store.read(path).state)["status"] != "finished" and "confirms" not in state
    ]


def _stopped(to: Path, flags: Flags, options: RunOptions, engine: Engine) -> Iterator[Path]:
    """Go on with the stopped runs of an earlier check while there is time, and yield all."""
    for path in _unfinished(to):
        if monotonic() < options.until:
            run = store.read(path)
            before = run.state["flags"]
            kept = {name: before[name] for name in ("only", "replicates", "energy")}
            engine(own_suite(run, flags.data), replace(flags, **kept), None, path, options)
        yield path


def _promising(found: Evidence) -> dict[str, list[Cell]]:
    """Return, by the run that screened them, the cells that a confirming run would decide."""
    chosen: dict[str, dict[tuple[str, ...], Cell]] = {}
    for verdicts in found.verdicts().values():
        for judged in (judged for verdict in verdicts for judged in verdict.tests):
            if judged.confirm:
                by_run = chosen.setdefault(judged.confirm.run, {})
                by_run.setdefault(judged.confirm.case_ids, judged.confirm)
    return {run: list(by_ids.values()) for run, by_ids in chosen.items()}


def _confirmed(
    found: Evidence,
    screening: str,
    chosen: Sequence[Cell],
    flags: Flags,
    to: Path,
    options: RunOptions,
    engine: Engine,
) -> Path:
    """Measure chosen cells of a run again, alone, in fresh processes.

    Where a run has confirmed others of its cells, or came out unreliable, the next has a number.
    """
    path = found.runs[screening]
    names = (f"{screening}-confirmed{f'-{n}' if n > 1 else ''}" for n in count(1))
    out = next(to / name for name in names if not _finished(to / name))
    run = whole(path)
    ids = dict.fromkeys(case for cell in chosen for case in cell.case_ids)
    rows = {row.case.id: row for row in run.rows}
    named = [{"case_id": i, "scope": rows[i].scope, "cache": rows[i].cache} for i in ids]
    origin: Mapping[str, Any] = {
        "confirms": {
            "manifest_sha256": bundle.identity(path),
            "cells": [cell for cell in named if not rows[cell["case_id"]].case.contender.baseline],
            "screened": len({row.case.id for row in run.rows if not row.case.contender.twin}),
        }
    }
    return again(
        run,
        flags.device,
        flags.data,
        out,
        replace(options, origin=origin),
        engine,
        only=f"case={'|'.join(ids)}",
        replicates=flags.replicates,
    )
