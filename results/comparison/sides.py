"""The sides of a comparison: runs by path, or by the name of a GPU, a commit, a card or a library.

    runs/A               a run
    H100, "RTX 4090"     the runs on a GPU, by words of its name
    84a765b              the runs of a commit, by its first digits
    becaf771             the runs on one card, by the first digits of its UUID
    torch==2.13.0        the runs with a version of a library, as environment.json has it
    H200@84a765b         the runs to which all of these apply

A name means the runs of the suites that all sides have. Simulated runs have no name here, so
that none appears among real ones; give their path instead. Where several runs of a side hold a
case, the one with the most processes counts, and among equal ones the newest.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np
import pandas as pd

from sparsebench.errors import ResultError
from sparsebench.results import files
from sparsebench.results.run import store
from sparsebench.results.run.provenance import (
    Choices,
    choices_of,
    commit_of,
    device_name,
    flat,
    names_device,
)
from sparsebench.results.run.store import Run
from sparsebench.results.tables.analysis import Analysis, analyse
from sparsebench.results.tables.frame import KEYS, NAMES, fields

MODEL = re.compile(r"(?:[RG]TX )?\b[A-Z]{1,3}\d{2,4}\w?\b(?: Ti| SUPER)?|\b[RG]TX \d{4}\w?")
MOST = 26  # sides of a comparison
LISTED = 6  # names that an error lists


@dataclass(frozen=True)
class Side:
    """The runs on one side of a comparison."""

    name: str
    analyses: Sequence[Analysis]

    @property
    def runs(self) -> list[Run]:
        return [analysis.run for analysis in self.analyses]

    @property
    def device(self) -> str:
        """Return the name of the device; all runs of a side have the same."""
        return self.analyses[0].device

    @property
    def simulated(self) -> bool:
        """Return whether a model computed the times of a run."""
        return any("sim" in run.environment for run in self.runs)

    @property
    def paths(self) -> str:
        """Return the paths of the runs, for an error."""
        return ", ".join(str(run.path) for run in self.runs)

    @cached_property
    def cases(self) -> pd.DataFrame:
        """Return one line per case, scope and cache state, without twins.

        The columns are those of `summary` and

        run       the place of the run in `runs`
        times     the log of the median time of each process
        codes     the digests of the compiled code, over all processes
        cards     the ids of the devices, over all processes
        searched  whether the run chose its configurations itself
        """
        tables = [_cases(n, analysis) for n, analysis in enumerate(self.analyses)]
        names = dict.fromkeys(name for table in tables for name in fields(table))
        ordered = dict.fromkeys([*NAMES, *names, *tables[0].columns])
        lines = pd.concat(tables, ignore_index=True)[[*ordered]] if tables[1:] else tables[0]
        started = lines.run.map(lambda number: self.runs[number].state.get("started", ""))
        ranked = lines.assign(started=started).sort_values(
            ["processes", "started"], ascending=False, kind="stable"
        )
        return lines.loc[ranked.drop_duplicates(KEYS).index.sort_values()]


def side(*runs: Run, name: str = "") -> Side:
    """Return a side, by default with the name of its device."""
    return Side(name or device_name(runs[0].environment), [analyse(run) for run in runs])


def distinct_names(runs: Sequence[Run]) -> list[str]:
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
    return model[0] if model and not device.startswith("simulated") else device


def short_card(card: str) -> str:
    """Return the first digits of a GPU's UUID, or the name of a CPU."""
    return card.removeprefix("GPU-")[:8] if card.startswith("GPU-") else card


def bundles(paths: Iterable[Path]) -> list[Path]:
    """Return the run directories at or below some paths."""
    return [file.parent for path in paths for file in sorted(path.rglob("run.json"))]


def find(texts: Sequence[str], among: Iterable[Path]) -> list[Side]:
    """Return the side that each text names, by its path or among the runs below some folders.

    Raises ResultError if a name fits nothing or several GPUs, commits or cards, if it is given
    twice, or if the sides share no suite.
    """
    if not 2 <= len(texts) <= MOST:
        raise ResultError(f"compare: expected 2 to {MOST} runs or names, found {len(texts)}")
    paths = {text: Path(text) for text in texts if (Path(text) / "run.json").exists()}
    unread = [Path(text) for text in texts if text not in paths and Path(text).exists()]
    if unread:
        raise ResultError(f"{unread[0]}: expected the directory of a run, found no run.json in it")
    if len(paths) == len(set(texts)):
        runs = [store.read(paths[text]) for text in texts]
        return [side(r, name=n) for r, n in zip(runs, distinct_names(runs), strict=True)]
    folders = [*among]
    candidates = [_Candidate.read(path) for path in bundles(folders)]
    if not candidates:
        expected = f"runs below {' and '.join(map(str, folders))}, which --among names"
        raise ResultError(
            f"{next(t for t in texts if t not in paths)}: expected {expected}; found none"
        )
    runs_of = {
        text: [_Candidate.read(paths[text])] if text in paths else _matches(text, candidates)
        for text in texts
    }
    if twice := [text for text in texts if texts.count(text) > 1]:
        raise ResultError(f"{twice[0]}: expected each name once, found it {len(twice)} times")
    suites = set.intersection(*({each.suite for each in runs} for runs in runs_of.values()))
    if not suites:
        has = "; ".join(f"{t} has {_few({each.suite for each in c})}" for t, c in runs_of.items())
        raise ResultError(f"{' and '.join(runs_of)}: expected a suite that all have; {has}")
    names = [paths[text].resolve().name if text in paths else text for text in texts]
    names = names if len(set(names)) == len(names) else list(texts)
    return [
        side(*(store.read(c.path) for c in runs_of[text] if c.suite in suites), name=name)
        for text, name in zip(texts, names, strict=True)
    ]


@dataclass(frozen=True)
class _Candidate:
    """A run that a name may mean, read without its rows."""

    path: Path
    suite: str
    device: str
    commit: str
    cards: frozenset[str]
    versions: frozenset[str]
    simulated: bool

    @classmethod
    def read(cls, path: Path) -> "_Candidate":
        environment = files.from_json(path / "environment.json")
        facts = flat(environment)
        cards = [value for name, value in facts.items() if name.endswith("uuid")]
        versions = environment.get("versions", {}).items()
        return cls(
            path=path,
            suite=str(files.from_json(path / "run.json").get("suite", "")),
            device=device_name(environment),
            commit=commit_of(path, environment),
            cards=frozenset(card.removeprefix("GPU-").lower() for card in cards),
            versions=frozenset(f"{name}=={version}".lower() for name, version in versions),
            simulated="sim" in environment,
        )

    def identity(self, word: str) -> str:
        """Return what a word names in this run: its device, commit, card or library; "" if none."""
        if names_device(word, self.device):
            return self.device
        if word in self.versions:
            return word
        if re.fullmatch("[0-9a-f]{4,40}", word):
            ids = [self.commit, *sorted(self.cards)]
            return next((each for each in ids if each.startswith(word)), "")
        return ""


def _matches(text: str, candidates: Sequence[_Candidate]) -> list[_Candidate]:
    runs = [each for each in candidates if not each.simulated]
    for word in text.lower().split("@"):
        identities = {each.identity(word) for each in runs} - {""}
        if not identities:
            raise ResultError(f"{text}: {_unknown(word, runs)}")
        if len(identities) > 1:
            raise ResultError(f"{text}: expected one match, found {_few(identities)}")
        runs = [each for each in runs if each.identity(word)]
    devices = sorted({each.device for each in runs})
    if len(devices) > 1:
        expected = f"expected one kind of device, such as {short_name(devices[-1])}@{text}"
        raise ResultError(f"{text}: {expected}; found {_few(devices)}")
    return runs


def _unknown(word: str, runs: Sequence[_Candidate]) -> str:
    """Return the error for a word that names nothing: what has a name, and which name is near."""
    versions = [each.versions for each in runs]
    every = frozenset[str]().union(*versions)
    apart = {version for version in every if any(version not in each for each in versions)}
    names: dict[str, set[str]] = {
        "device": {short_name(each.device) for each in runs},
        "run": {str(each.path) for each in runs},
        "commit": {each.commit[:7] for each in runs} - {""},
        "card": {short_card(f"GPU-{card}") for each in runs for card in each.cards},
        "version": {version for version in apart if not version.endswith("==none")},
    }
    choices = ", ".join(
        f"a {kind} ({_few(of, LISTED if kind == 'device' else 2)})"
        for kind, of in names.items()
        if of
    )
    near = {each.path.name.lower(): str(each.path) for each in runs}
    near |= {name.lower(): name for of in [*names.values(), *versions] for name in of}
    close = get_close_matches(word, near, 1)
    hint = f"; did you mean {near[close[0]]}?" if close else ""
    return f"expected {choices or 'measured runs'}; found none of that name{hint}"


def _few(names: Iterable[Any], most: int = LISTED) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return (", ".join(ordered[:most]) or "no runs") + more


def _cases(number: int, analysis: Analysis) -> pd.DataFrame:
    codes: dict[str, set[str]] = {}
    cards: dict[str, set[str]] = {}
    for row in analysis.run.rows:
        cards.setdefault(row.case.id, set()).add(row.device)
        codes.setdefault(row.case.id, set()).update([row.code] if row.code else [])
    cases = analysis.cases[~analysis.cases.twin.astype(bool)]
    logs = [
        tuple(float(np.log(np.median(times))) for times in blocks.values())
        if isinstance(blocks, dict)
        else ()
        for blocks in cases.blocks
    ]
    return cases.assign(
        run=number,
        times=pd.Series(logs, cases.index, dtype=object),
        codes=cases.case_id.map(codes),
        cards=cases.case_id.map(cards),
        searched=choices_of(analysis.run.state) is not Choices.BUNDLE,
    )
