"""A campaign's file: which suites are measured, in which order and in how many processes.

schema: sparsebench/campaign@1
title: Everything that is published
replicates: 8                    # processes of an entry that does not give its own
entries:                         # each becomes a run DIR/NAME, in this order
  - suite: quick                 # named after the suite
  - {name: sparsity-slow, suite: sparsity, only: kernel=cusparse_csr, replicates: 1}
  - {suite: dlmc, data: dlmc}    # source files are in the folder dlmc below --data
  - {suite: decoder, energy: true}
  - {confirm: quick, cases: 2}   # the largest speedups of that entry, alone; `only` selects
  - {reproduce: quick}           # searches again, on another card of the kind
  - {name: claims-ffn, claims: [twell-2026-sparser]}   # judged by the runs above
  - claims: []                   # all claims, judged by all runs above, and those of claims

Entries with claims do not wait for each other, so that several devices can measure them, nor for
suites with `data`. Claims that need the same suite belong in one entry.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from sparsebench._discovery import did_you_mean, unknown
from sparsebench.errors import SuiteError
from sparsebench.harness.plan.document import document
from sparsebench.harness.plan.selection import only
from sparsebench.harness.plan.suite import Suite, parse, read
from sparsebench.results import files

KINDS = "suite", "confirm", "reproduce", "claims"
NAME = re.compile(r"[a-z0-9][a-z0-9-]*")


class CampaignEntry(BaseModel):
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
    apart: str = ""  # gone

    @property
    def kind(self) -> str:
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def what(self) -> str:
        """Describe it: `suite sparsity m=64`."""
        subject = getattr(self, self.kind)
        subject = ", ".join(subject) if isinstance(subject, list) else subject
        return f"{self.kind} {subject} {self.only}".strip()

    @property
    def result(self) -> str:
        """Return the file in its folder that says that it is whole."""
        return "verdicts.json" if self.kind == "claims" else "run.json"

    @property
    def of(self) -> str:
        """Return the entry that it confirms or reproduces, or ""."""
        return self.confirm or self.reproduce or ""

    def read(self, data: Path | None) -> Suite:
        assert self.suite
        return read(self.suite, self.folder(data))

    def folder(self, data: Path | None) -> Path | None:
        return data / self.data if data and self.data else None


class CampaignFile(BaseModel):
    """A campaign as written."""

    model_config = ConfigDict(extra="forbid", strict=True)

    schema_: Literal["sparsebench/campaign@1"] = Field(alias="schema")
    title: files.Title
    replicates: int = Field(default=8, ge=1, le=1000)
    budget: str = ""  # gone
    entries: list[CampaignEntry] = Field(min_length=1)


@dataclass(frozen=True)
class Campaign:
    """A campaign whose entries all have a name and a number of processes."""

    where: str
    title: str
    entries: Sequence[CampaignEntry]

    @cached_property
    def names(self) -> list[str]:
        return [entry.name for entry in self.entries]

    def select(self, names: Sequence[str]) -> list[CampaignEntry]:
        for name in names:
            if name not in self.names:
                message = unknown("the name of an entry", name, self.names)
                raise SuiteError(f"{self.where}: {message}")
        return [entry for entry in self.entries if not names or entry.name in names]

    def above(self, entry: CampaignEntry) -> list[CampaignEntry]:
        """Return the entries that it waits for, whose runs it reads."""
        if entry.kind == "claims":
            before = self.entries[: self.names.index(entry.name)]
            last = not entry.claims
            return [e for e in before if last or (e.kind != "claims" and not e.data)]
        return [other for other in self.entries if other.name == entry.of]


def campaign(name: str) -> Campaign:
    """Read a campaign by name or from a file. Raises SuiteError with the place of an error."""
    where, text = document("suites.campaigns", "campaign", name)
    file = parse(where, text, CampaignFile)
    if file.budget:
        instead = "`campaign run --budget` limits a sitting"
        raise SuiteError(f"{where}: budget: expected none since 0.4; {instead}")
    entries: list[CampaignEntry] = []
    for number, entry in enumerate(file.entries):
        place = f"{where}: entries[{number}]"
        kinds = [kind for kind in KINDS if getattr(entry, kind) is not None]
        if len(kinds) != 1:
            actual = " and ".join(kinds) or "none"
            raise SuiteError(f"{place}: expected one of {', '.join(KINDS)}; found {actual}")
        confirmed = f"{entry.of}-{'confirmed' if entry.confirm else 'again'}"
        of_kind = {"claims": "claims", "suite": Path(str(entry.suite)).stem}
        name = entry.name or of_kind.get(entry.kind, confirmed)
        replicates = entry.replicates or file.replicates
        entry = entry.model_copy(update={"name": name, "replicates": replicates})
        before = {other.name: other.kind for other in entries}
        if not NAME.fullmatch(name) or name in before:
            expected = "a unique name of a to z, 0 to 9 and -"
            raise SuiteError(f"{place}: expected {expected}; found {name!r}")
        if entry.apart:
            raise SuiteError(f"{place}: apart: expected none since 0.4; use {{reproduce: NAME}}")
        if other := entry.of:
            if other not in before:
                message = f"found {other!r}{did_you_mean(other, before)}"
                raise SuiteError(f"{place}: expected an entry above it, {message}")
            if before[other] == "claims":
                raise SuiteError(f"{place}: expected the name of a run, found {other}, the claims")
        if entry.suite and not entry.data:
            try:
                only(entry.read(None).contests, entry.only)  # fails now, before any GPU time
            except SuiteError as error:
                raise SuiteError(f"{place}: {error}") from error
        entries.append(entry)
    return Campaign(where, file.title, entries)
