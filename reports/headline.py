"""The headline: ten questions, each with our fastest kernel and the best peer in one problem.

results/published/GPU/RUN ─> PublishedRun ─> one line per Question
                                └─ a run that confirms it: the same case, measured alone
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from sparsebench.errors import ResultError
from sparsebench.reports.findings import kernel_that_ran
from sparsebench.reports.tables import markdown_table
from sparsebench.results.formatting import (
    FORMATS,
    amount,
    between,
    blocks_text,
    conditions,
    percent,
    times,
)
from sparsebench.results.run import bundle, store
from sparsebench.results.run.provenance import Choices, choices_of
from sparsebench.results.statistics.ratio import FEWEST
from sparsebench.results.tables.analysis import Analysis, tables
from sparsebench.results.tables.cases import CONTEST, chose_dense
from sparsebench.results.tables.contests import in_chain, is_short, usual
from sparsebench.results.tables.families import DEFAULT, by_default, ours
from sparsebench.results.tables.frame import records
from sparsebench.results.tables.noise import Reliability


@dataclass(frozen=True)
class PublishedRun(Analysis):
    """A published run. `home` is the folder of its bundle, relative to the root of the checkout.

    `cases` have four more columns: `run`, `shape` (n × k), `ours` (a kernel of this project that
    multiplies sparse operands) and `dense` (a portfolio chose a dense kernel).
    """

    home: str

    @property
    def name(self) -> str:
        return self.run.path.name

    @property
    def processes(self) -> int:
        return int(self.run.state["flags"]["replicates"])

    @property
    def kind(self) -> str:
        """Return `verdict`, or `look` if there are too few processes for one."""
        return "verdict" if self.processes >= FEWEST else "look"


@dataclass(frozen=True)
class Question:
    """A question; `where` selects one problem of a run, `subject` our contenders in it."""

    text: str
    run: str
    where: str
    subject: str = "ours"


SPARSE = "level == 0.9"
ACTIVE = "active == 29 and skew == 'iid'"
QUESTIONS = [
    Question("Are large blocks faster?", "sparsity-4096", f"block == '128' and {SPARSE}"),
    Question("Are small blocks faster?", "sparsity-4096", f"block == '16' and {SPARSE}"),
    Question("With 64 tokens?", "sparsity-64", f"block == '32' and {SPARSE}"),
    Question("With one token?", "decode", f"m == 1 and n == 14336 and block == '64' and {SPARSE}"),
    Question(
        "For the gradient of X?", "training", f"op == 'linear_dgrad' and block == '64' and {SPARSE}"
    ),
    Question(
        "For the gradient of W?", "training", f"op == 'linear_wgrad' and block == '64' and {SPARSE}"
    ),
    Question(
        "Is 2:4 faster with few tokens?",
        "spense-two-four",
        "m == 16 and n == 51200 and dtype == 'bf16'",
        subject="kernel == 'spense_wgmma'",
    ),
    Question(
        "In an MLP that stays half dense?",
        "spense-ffn",
        "m == 16 and n == 25600 and dtype == 'fp8'",
    ),
    Question(
        "Are sparse activations faster?",
        "ffn",
        f"op == 'ffn' and m == 4096 and n == 5632 and {ACTIVE}",
    ),
    Question("In a training step?", "ffn-step", f"m == 16384 and {ACTIVE}"),
]


def read(root: Path) -> dict[str, PublishedRun]:
    """Read all runs below results/published, by name, in the order of their folders.

    If two GPUs have runs of one name, the GPU with more runs keeps it, and the other's run is named
    GPU/NAME. Raises ResultError if there is no run, or if one cannot be read.
    """
    home = root / "results/published"
    paths = sorted(file.parent for file in home.glob("*/*/run.json"))
    count = Counter(path.parent for path in paths)
    owners = {path.name: path for path in sorted(paths, key=lambda path: count[path.parent])}
    runs: dict[str, PublishedRun] = {}
    for path in paths:
        name = path.name if owners[path.name] == path else path.relative_to(home).as_posix()
        runs[name] = read_run(path, name, root)
    if not runs:
        raise ResultError(f"{home}: expected published runs, found none")
    return runs


def read_run(path: Path, name: str, root: Path) -> PublishedRun:
    """Read a bundle of a checkout as the published run `name`; raises ResultError."""
    run = store.read(path)
    rows, noise, cases = tables(run)
    home = path.relative_to(root).as_posix()
    return PublishedRun(run, rows, noise, with_columns(cases, name), home)


def with_columns(cases: pd.DataFrame, run: str) -> pd.DataFrame:
    """Return cases with the columns that `PublishedRun` names."""
    sizes = zip(cases.n, cases.k, strict=True)
    return cases.assign(
        run=run,
        shape=["" if pd.isna(n) else f"{n} × {k}" for n, k in sizes],
        ours=cases.kernel.isin(ours()),
        dense=chose_dense(cases),
    )


def headline(runs: Mapping[str, PublishedRun], questions: list[Question] = QUESTIONS) -> str:
    """Return a Markdown table with one line per question.

    Raises ResultError if a question's run is not published or `where` selects no single problem.
    """
    columns = ["question", "format", "op", "n × k", "dtype", "tokens", "sparsity or active units"]
    columns += ["our kernel", "speedup", "baseline", "measured alone", "best peer", "GPU", "run"]
    columns += ["measured on"]
    return markdown_table(columns, [_answer(question, runs) for question in questions])


@dataclass(frozen=True)
class Headline:
    """The case that answers a question in a run: our fastest in its one problem.

    line      its row, inside a chain if the call is short and the run measured chains
    isolated  its row as an isolated call
    contest   what was timed beside `line`
    """

    line: "pd.Series[Any]"
    isolated: "pd.Series[Any]"
    contest: pd.DataFrame


def headline_case(question: Question, run: PublishedRun) -> Headline:
    """Return the case that answers a question; raises ResultError if it has no single problem."""
    cases = run.cases[
        (run.cases.status == "ok") & run.cases.speedup.notna() & ~run.cases.twin.astype(bool)
    ]
    problem = cases.query(question.where)
    subjects = _by_name(usual(problem).query(question.subject))
    if subjects.groupby(CONTEST, dropna=False).ngroups != 1:
        raise ResultError(
            f"{run.home}: expected one problem with {question.where}, found none or several"
        )
    isolated = subjects.sort_values("speedup").iloc[-1]
    line = pd.Series(in_chain(isolated.to_dict(), problem))
    return Headline(line, isolated, problem[(problem[CONTEST] == line[CONTEST]).all(axis=1)])


def _answer(question: Question, runs: Mapping[str, PublishedRun]) -> list[str]:
    if question.run not in runs:
        raise ResultError(f"headline: expected a published run, found no {question.run}")
    run = runs[question.run]
    case = headline_case(question, run)
    line, isolated, contest = case.line, case.isolated, case.contest
    beside = " isolated" if is_short(line.to_dict()) else ""
    if line.scope != isolated.scope:
        beside = f" inside a chain; isolated {speedup_text(isolated)}"
    peer = contest[~contest.ours].sort_values("speedup").iloc[-1]
    active = line.get("active")
    level = percent(line.level) if pd.isna(active) else f"{active:g} of {line.n} active"
    block = f", {blocks_text(line.block)}" if line["format"] == "bsr" else ""
    processes = amount(int(line.processes), "process")
    return [
        question.text,
        FORMATS.get(line["format"], line["format"]),
        line.op,
        line["shape"],
        line["dtype"],
        str(line.m),
        level + block,
        _kernel(line),
        speedup_text(line) + beside,
        line.baseline_label,
        _alone(line, runs) or "not yet",
        f"`{peer.kernel}` {times(peer.speedup, peer.uncertainty)}",
        run.device,
        f"[{run.name}](/{run.home}), {processes}, a {run.kind}",
        conditions(line.on_cards, line.limited),
    ]


def _by_name(subjects: pd.DataFrame) -> pd.DataFrame:
    """Drop `default` if the kernel that it ran is also a subject, as in a run that confirms it."""
    kernels = pd.Series([kernel_that_ran(case) for case in records(subjects)], subjects.index)
    by_name = subjects.kernel != DEFAULT
    return subjects[by_name | ~kernels.isin(kernels[by_name])]


def _kernel(line: "pd.Series[Any]") -> str:
    """Write the kernel that ran: `bsr_small`, or of what users get "`bsr_small` (by default)"."""
    name = line.kernel
    if name == DEFAULT:
        name = by_default(line["format"], json.loads(line.choice or "{}"))
    kernel, space, more = name.partition(" (")
    return f"`{kernel}`{space}{more}{' (dense)' if line.dense else ''}"


def _alone(case: "pd.Series[Any]", runs: Mapping[str, PublishedRun]) -> str:
    """Return a case's speedup in the run that confirms its own, or "" if there is none.

    The text ends with the conditions. It says `unreliable` if the A/A pairs of the confirming run
    differ too often, and `inherited configurations` if that run did not search.
    """
    screened = bundle.identity(runs[case.run].run.path)
    for run in runs.values():
        if run.run.state.get("confirms", {}).get("manifest_sha256") != screened:
            continue
        keys = ["label", *CONTEST]
        same = run.cases[(run.cases[keys] == case[keys]).all(axis=1)]
        if len(same):
            line, doubtful = same.iloc[0], run.noise.reliability[0] is Reliability.UNRELIABLE
            words = [speedup_text(line), str(Reliability.UNRELIABLE) if doubtful else ""]
            inherited = choices_of(run.run.state) is Choices.BUNDLE
            words += ["inherited configurations"] if inherited else []
            return ", ".join(filter(None, [*words, conditions(line.on_cards, line.limited)]))
    return ""


def speedup_text(line: "pd.Series[Any]") -> str:
    """Write a case's speedup with its interval."""
    return between(line.speedup, line.speedup_low, line.speedup_high, line.uncertainty)
