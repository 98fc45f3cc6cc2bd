"""A campaign's file: which suites are measured, in which order and in how many processes.

schema: sparsebench/campaign@1
title: Everything that is published
replicates: 8                    # processes of an entry that says nothing else
budget: 120m                     # of one GPU, for all of it: `campaign plan` holds it against that
entries:                         # each becomes a run DIR/NAME, in this order
  - suite: quick                 # its name is that of the suite
  - {name: sparsity-slow, suite: sparsity, only: kernel=cusparse_csr, replicates: 1}
  - {suite: dlmc, data: dlmc}    # source files are in the folder dlmc of --data
  - {suite: decoder, energy: true}
  - {confirm: quick, cases: 2}   # the largest speed-ups of that entry, alone; `only` chooses
  - {reproduce: quick}           # with its choices, on another card of the kind
  - {name: quick-elsewhere, suite: quick, apart: quick}   # on another card, with its own search
  - claims: []                   # all claims, or those named, judged by every run above
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sparsebench._discovery import did_you_mean, documents, unknown
from sparsebench.errors import SuiteError
from sparsebench.harness.plan.duration import seconds
from sparsebench.harness.plan.selection import only
from sparsebench.harness.plan.suite import Suite, parse, read
from sparsebench.results import files

KINDS = "suite", "confirm", "reproduce", "claims"
NAME = re.compile(r"[a-z0-9][a-z0-9-]*")


class Entry(BaseModel):
    """One entry as written: exactly one of KINDS, and how it is measured."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = ""
    suite: str | None = None
    confirm: str | None = None
    reproduce: str | None = None
    claims: list[str] | None = None
    only: str = ""
    replicates: int = Field(default=0, ge=0, le=1000)
    energy: bool = False
    data: str = ""
    cases: int = Field(default=1, ge=1)
    apart: str = ""

    @property
    def kind(self) -> str:
        """Return which of KINDS it is."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def of(self) -> str:
        """Return the entry that it starts from; "" where it starts from none."""
        return self.confirm or self.reproduce or ""

    @property
    def elsewhere(self) -> str:
        """Return the entry whose cards measure no part of this one; "" where any card may."""
        return self.reproduce or self.apart

    def read(self, data: Path | None) -> Suite:
        """Return its suite; SuiteError where that cannot be had here."""
        assert self.suite
        return read(self.suite, self.folder(data))

    def readable(self, data: Path | None) -> bool:
        """Say whether it has a suite that can be read here: with source files, if it takes any."""
        folder = self.folder(data)
        files = not self.data or (folder is not None and folder.is_dir())
        return self.suite is not None and files

    def folder(self, data: Path | None) -> Path | None:
        """Return the folder of its source files, below --data."""
        return data / self.data if data and self.data else None


class CampaignFile(BaseModel):
    """A campaign as written."""

    model_config = ConfigDict(extra="forbid", strict=True)

    schema_: Literal["sparsebench/campaign@1"] = Field(alias="schema")
    title: str
    replicates: int = Field(default=8, ge=1, le=1000)
    budget: str = "120m"
    entries: list[Entry] = Field(min_length=1)


@dataclass(frozen=True)
class Campaign:
    """A campaign, read: every entry has a name and a number of processes."""

    where: str
    title: str
    budget_s: float
    entries: Sequence[Entry]

    @cached_property
    def names(self) -> list[str]:
        """Return the names of its entries, in order."""
        return [entry.name for entry in self.entries]

    def named(self, names: Sequence[str]) -> list[Entry]:
        """Return the entries of these names, in the campaign's order; all of them without any."""
        for name in names:
            if name not in self.names:
                message = unknown("the name of an entry", name, self.names)
                raise SuiteError(f"{self.where}: {message}")
        return [entry for entry in self.entries if not names or entry.name in names]

    def above(self, entry: Entry) -> list[Entry]:
        """Return what has to be whole before an entry can begin."""
        if entry.kind == "claims":
            return [*self.entries[: self.names.index(entry.name)]]
        return [other for other in self.entries if other.name in (entry.of, entry.apart)]


def campaigns() -> dict[str, Any]:
    """Return the file of every campaign of the package by its name."""
    return documents("suites.campaigns")


def campaign(name: str) -> Campaign:
    """Read a campaign by name or by file; SuiteError says where and what is wrong."""
    known = campaigns()
    if name in known:
        return _read(known[name].name, known[name].read_text("utf-8"))
    if not name.endswith((".yaml", ".yml")):
        raise SuiteError(unknown("a file.yaml or a known campaign", name, known))
    return _read(name, files.text(Path(name), files.YAML_BYTES, SuiteError))


def _read(where: str, text: str) -> Campaign:
    written = parse(where, text, CampaignFile)
    entries: list[Entry] = []
    for number, entry in enumerate(written.entries):
        place = f"{where}: entries[{number}]"
        kinds = [kind for kind in KINDS if getattr(entry, kind) is not None]
        if len(kinds) != 1:
            found = " and ".join(kinds) or "none"
            raise SuiteError(f"{place}: expected one of {', '.join(KINDS)}; found {found}")
        entry = entry.model_copy(
            update={
                "name": entry.name or _name(entry),
                "replicates": entry.replicates or written.replicates,
            }
        )
        before = [other.name for other in entries]
        if not NAME.fullmatch(entry.name) or entry.name in before:
            expected = "a name of its own of a to z, 0 to 9 and -"
            raise SuiteError(f"{place}: expected {expected}; found {entry.name!r}")
        for name in filter(None, (entry.of, entry.apart)):
            if name not in before:
                found = f"found {name!r}{did_you_mean(name, before)}"
                raise SuiteError(f"{place}: expected an entry above it, {found}")
            if entries[before.index(name)].kind == "claims":
                raise SuiteError(f"{place}: expected the name of a run, found {name}, the claims")
        if entry.suite and not entry.data:
            _chooses(place, entry)
        entries.append(entry)
    return Campaign(where, written.title, seconds(f"{where}: budget", written.budget), entries)


def _name(entry: Entry) -> str:
    if entry.kind == "claims":
        return "claims"
    if entry.of:
        return f"{entry.of}-{'confirmed' if entry.confirm else 'again'}"
    return Path(str(entry.suite)).stem


def _chooses(place: str, entry: Entry) -> None:
    """Refuse a suite that is not there, and a selection of nothing: before any GPU time."""
    try:
        only(entry.read(None).contests, entry.only)
    except SuiteError as error:
        raise SuiteError(f"{place}: {error}") from error
