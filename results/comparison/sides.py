"""The sides of a comparison: runs by path, or by the name of a GPU.

    runs/A               a run, or the runs of a survey
    H100, "RTX 4090"     the runs on a GPU, by words of its name

A GPU means its runs of the suites that all sides have. Where several runs of a side hold a case,
the one with the most processes counts, and among equal ones the newest.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from itertools import count
from pathlib import Path
from string import ascii_uppercase

import numpy as np
import pandas as pd

from sparsebench._gpus import names_device, unknown_gpu
from sparsebench.errors import ResultError
from sparsebench.results.run import bundle, store
from sparsebench.results.run.provenance import (
    Choices,
    choices_of,
    device_name,
)
from sparsebench.results.run.store import StoredRun
from sparsebench.results.tables.analysis import Analysis, analyse, on_same_zeros
from sparsebench.results.tables.frame import KEYS, NAMES, fields

MODEL = re.compile(r"(?:[RG]TX )?\b[A-Z]{1,3}\d{2,4}\w?\b(?: Ti| SUPER)?|\b[RG]TX \d{4}\w?")
MOST = 26  # sides of a comparison
Show = Callable[[int, int, str], None]
LISTED = 6  # names that an error lists


@dataclass(frozen=True)
class Side:
    """The runs on one side of a comparison."""

    name: str
    analyses: Sequence[Analysis]

    @property
    def runs(self) -> list[StoredRun]:
        return [analysis.run for analysis in self.analyses]

    @property
    def device(self) -> str:
        """Return the name of the device; all runs of a side have the same."""
        return self.analyses[0].device

    @property
    def on_same_zeros(self) -> "Side":
        """Return the side without unpruned weights, so that speedups are over the same zeros."""
        return Side(self.name, [analyse(on_same_zeros(run)) for run in self.runs])

    @property
    def paths(self) -> str:
        """Return the paths of the runs, for an error."""
        return ", ".join(str(run.path) for run in self.runs)

    @cached_property
    def cases(self) -> pd.DataFrame:
        """Return the `cells` of the runs, each once; `run` is the place of its run in `runs`."""
        tables = [cells(analysis).assign(run=n) for n, analysis in enumerate(self.analyses)]
        names = dict.fromkeys(name for table in tables for name in fields(table))
        ordered = dict.fromkeys([*NAMES, *names, *tables[0].columns])
        lines = pd.concat(tables, ignore_index=True)[[*ordered]] if tables[1:] else tables[0]
        started = lines.run.map(lambda number: self.runs[number].state.get("started", ""))
        ranked = lines.assign(started=started).sort_values(
            ["processes", "started"], ascending=False, kind="stable"
        )
        return lines.loc[ranked.drop_duplicates(KEYS).index.sort_values()]


def side(*runs: StoredRun, name: str = "") -> Side:
    """Return a side, by default with the name of its device."""
    return Side(name or device_name(runs[0].environment), [analyse(run) for run in runs])


def cells(analysis: Analysis) -> pd.DataFrame:
    """Return one line per case, scope and cache state of a run, without twins.

    The columns are those of `summary` and

    times     the log of the median time of each process
    codes     the digests of the compiled code, over all processes
    cards     the ids of the devices, over all processes
    searched  whether the run chose its configurations itself
    """
    codes: dict[str, set[str]] = defaultdict(set)
    cards: dict[str, set[str]] = defaultdict(set)
    for row in analysis.run.rows:
        cards[row.case.id].add(row.device)
        codes[row.case.id].update(filter(None, [row.code]))
    cases = analysis.cases[~analysis.cases.twin.astype(bool)]
    logs = [
        tuple(float(np.log(np.median(times))) for times in blocks.values())
        if isinstance(blocks, dict)
        else ()
        for blocks in cases.blocks
    ]
    return cases.assign(
        times=pd.Series(logs, cases.index, dtype=object),
        codes=cases.case_id.map(lambda case: sorted(codes[case])),
        cards=cases.case_id.map(lambda case: sorted(cards[case])),
        searched=choices_of(analysis.run.state) is not Choices.BUNDLE,
    )


def distinct_names(runs: Sequence[StoredRun]) -> list[str]:
    """Return short names that tell runs apart: of devices, commits or folders, or else letters."""
    commits = [str(run.environment.get("commit") or "")[:7] for run in runs]
    devices = [short_name(device_name(run.environment)) for run in runs]
    for names in (devices, commits, [run.path.resolve().name for run in runs]):
        if all(names) and len(set(names)) == len(names):
            return names
    return list(ascii_uppercase[: len(runs)])


def short_name(device: str) -> str:
    """Return the model in a device's name: H100 for NVIDIA H100 80GB HBM3; else the whole name."""
    model = MODEL.search(device)
    return model[0] if model else device


def short_card(card: str) -> str:
    """Return the first digits of a GPU's UUID, or the name of a CPU."""
    return card.removeprefix("GPU-")[:8] if card.startswith("GPU-") else card


def bundles(paths: Iterable[Path]) -> list[Path]:
    """Return the run directories at or below some paths, without replaced ones."""
    runs = [(path, file.parent) for path in paths for file in sorted(path.rglob("run.json"))]
    return [run for path, run in runs if bundle.EARLIER not in run.relative_to(path).parts]


def find(
    texts: Sequence[str], among: Iterable[Path], show: Show = lambda *part: None
) -> list[Side]:
    """Return the side that each text names, by its path or among the runs below some folders.

    `show` is called before each run is read, with the number of runs so far and of all.
    Raises ResultError if a name fits no GPU or several, if it is given twice, or if the sides share
    no suite.
    """
    if not 2 <= len(texts) <= MOST:
        raise ResultError(f"compare: expected 2 to {MOST} runs or names, found {len(texts)}")
    paths = {text: bundle.runs_of(Path(text)) for text in texts if Path(text).is_dir()}
    for text, (first, *_) in paths.items():
        if not (first / "run.json").exists():
            raise ResultError(f"{text}: expected the directory of a run, found no run.json in it")
    if len(paths) == len(set(texts)):
        runs = [[store.read(path) for path in paths[text]] for text in texts]
        names = distinct_names([first for first, *_ in runs])
        return [side(*each, name=name) for each, name in zip(runs, names, strict=True)]
    folders = [*among]
    candidates = []
    for path in bundles(folders):
        with store.neighbour():
            candidates.append(_Candidate.read(path))
    runs_of = {
        text: [_Candidate.read(path) for path in paths[text]]
        if text in paths
        else _matches(text, candidates, folders)
        for text in texts
    }
    if twice := [text for text in texts if texts.count(text) > 1]:
        raise ResultError(f"{twice[0]}: expected each name once")
    suites = set.intersection(*({each.suite for each in runs} for runs in runs_of.values()))
    if not suites:
        has = "; ".join(f"{t} has {_few({each.suite for each in c})}" for t, c in runs_of.items())
        raise ResultError(f"{' and '.join(runs_of)}: expected a suite that all have; {has}")
    chosen = {t: [c.path for c in runs if c.suite in suites] for t, runs in runs_of.items()}
    places, total = count(), sum(map(len, chosen.values()))
    return [
        Side(
            Path(text).resolve().name if text in paths else text,
            _read(text, of_text, text in paths, lambda path: show(next(places), total, path.name)),
        )
        for text, of_text in chosen.items()
    ]


@dataclass(frozen=True)
class _Candidate:
    """A run that a name may mean, read without its rows."""

    path: Path
    suite: str
    device: str

    @classmethod
    def read(cls, path: Path) -> "_Candidate":
        environment, state = store.facts(path)
        return cls(path, state["suite"], device_name(environment))


def _read(
    text: str, paths: list[Path], by_path: bool, note: Callable[[Path], None]
) -> list[Analysis]:
    """Return the runs of a side; of those that a name found, the readable ones."""
    runs: list[Analysis] = []
    for path in paths:
        note(path)
        with nullcontext() if by_path else store.neighbour():
            runs.append(analyse(store.read(path)))
    if not runs:
        raise ResultError(f"{text}: expected a run that can be read, found none")
    return runs


def _matches(text: str, runs: list[_Candidate], folders: Sequence[Path]) -> list[_Candidate]:
    """Return the runs on the GPU that a text names; the error has the nearest name."""
    devices = {run.device for run in runs if names_device(text, run.device)}
    if len(devices) > 1:
        raise ResultError(f"{text}: expected one match, found {_few(devices)}")
    if devices:
        return [run for run in runs if run.device in devices]
    names = {short_name(run.device) for run in runs}
    near = {run.path.name.lower(): str(run.path) for run in runs}
    close = get_close_matches(text.lower(), near, 1)
    hint = unknown_gpu(text, names) or (f"; did you mean {near[close[0]]}?" if close else "")
    raise ResultError(
        f"{text}: expected the path of a run (also for a commit, a card or a library), or a GPU "
        f"({_few(names)}) of the runs below {' and '.join(map(str, folders))}; found none of that "
        f"name{hint}"
    )


def _few(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - LISTED} more" if len(ordered) > LISTED else ""
    return (", ".join(ordered[:LISTED]) or "no runs") + more
