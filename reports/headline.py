"""The headline: ten questions, each with our fastest kernel and the best peer in one problem.

results/published/GPU/RUN ─> PublishedRun ─> one line per Question
                                └─ a run that confirms it: the same case, measured alone
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sparsebench.errors import ResultError
from sparsebench.reports.findings import by_name, contender_name, finding_of
from sparsebench.reports.grids import against, gain_text
from sparsebench.reports.tables import markdown_table
from sparsebench.results.formatting import amount, conditions, times
from sparsebench.results.run import bundle, store
from sparsebench.results.run.provenance import Choices, choices_of
from sparsebench.results.statistics.ratio import FEWEST
from sparsebench.results.tables.analysis import Analysis, tables
from sparsebench.results.tables.contests import is_replaced, is_short, usual
from sparsebench.results.tables.families import is_ours
from sparsebench.results.tables.frame import KEYS, records
from sparsebench.results.tables.grid import Case, Finding
from sparsebench.results.tables.noise import Reliability


@dataclass(frozen=True, eq=False)
class PublishedRun(Analysis):
    """A published run. `home` is the folder of its bundle, relative to the root of the checkout."""

    home: str

    @property
    def name(self) -> str:
        return self.run.path.name

    @property
    def processes(self) -> int:
        return int(self.run.state["flags"]["replicates"])

    @cached_property
    def replaced(self) -> "list[PublishedRun]":
        """Return the runs that this one replaced, the oldest first."""
        path, root = self.run.path, self.run.path.parents[len(Path(self.home).parts) - 1]
        files = sorted(path.parent.glob(f"{bundle.EARLIER}/*/{path.name}/run.json"))
        return [read_run(file.parent, root) for file in files]


@dataclass(frozen=True)
class Question:
    """A question; `where` selects one problem of a run, `subject` our contenders in it."""

    text: str
    run: str
    where: str
    subject: str = "side == 'ours'"


SPARSE = "level == 0.9"
MIDDLE = f"block == '64' and {SPARSE}"
ACTIVE = "active == 29 and skew == 'iid'"
TWO_FOUR = "m == 16 and n == 51200 and dtype == 'bf16'"
HALF_DENSE = "m == 16 and n == 25600 and dtype == 'fp8'"
FFN = f"op == 'ffn' and m == 4096 and n == 5632 and {ACTIVE}"
BY_NAME = "kernel == 'spense_wgmma'"
QUESTIONS = [
    Question("Are large blocks faster?", "sparsity-4096", f"block == '128' and {SPARSE}"),
    Question("Are small blocks faster?", "sparsity-4096", f"block == '16' and {SPARSE}"),
    Question("With 64 tokens?", "sparsity-64", f"block == '32' and {SPARSE}"),
    Question("With one token?", "decode", f"m == 1 and n == 14336 and {MIDDLE}"),
    Question("For the gradient of X?", "training", f"op == 'linear_dgrad' and {MIDDLE}"),
    Question("For the gradient of W?", "training", f"op == 'linear_wgrad' and {MIDDLE}"),
    Question("Is 2:4 faster with few tokens?", "spense-two-four", TWO_FOUR, BY_NAME),
    Question("In an MLP that stays half dense?", "spense-ffn", HALF_DENSE),
    Question("Are sparse activations faster?", "ffn", FFN),
    Question("In a training step?", "ffn-step", f"m == 16384 and {ACTIVE}"),
]


def kind_of(processes: int) -> str:
    """Return `verdict`, or `look` if there are too few processes for one."""
    return "verdict" if processes >= FEWEST else "look"


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
        runs[name] = read_run(path, root)
    if not runs:
        raise ResultError(f"{home}: expected published runs, found none")
    return runs


def read_run(path: Path, root: Path) -> PublishedRun:
    """Read a bundle of a checkout; raises ResultError."""
    run = store.read(path)
    return PublishedRun(run, *tables(run), path.relative_to(root).as_posix())


def headline(runs: Mapping[str, PublishedRun], questions: Sequence[Question] = QUESTIONS) -> str:
    """Return a Markdown table with one line per question.

    Raises ResultError if a question's run is not published or `where` selects no single problem.
    """
    columns = ["question", "problem", "our kernel", "speedup", "over", "best peer"]
    columns += ["measured alone", "in all runs", "measured on", "run"]
    return markdown_table(columns, [_answer(question, runs) for question in questions])


@dataclass(frozen=True)
class HeadlineCase:
    """The case that answers a question in a run: our fastest in its one problem.

    finding   of the case, inside a chain if the call is short and the run measured chains
    isolated  the same case as an isolated call
    """

    finding: Finding
    isolated: Case


def headline_case(question: Question, run: PublishedRun) -> HeadlineCase:
    """Return the case that answers a question; raises ResultError if it has no single problem."""
    subjects = usual(run.timed.query(question.where)).query(question.subject)
    if subjects.place.nunique() != 1:
        expected = f"expected one problem with {question.where}, found none or several"
        raise ResultError(f"{run.home}: {expected}")
    fastest = records(subjects.sort_values("gain"))[-1]
    return HeadlineCase(finding_of(fastest, run.timed), by_name(fastest, run.timed))


def _answer(question: Question, runs: Mapping[str, PublishedRun]) -> list[str]:
    if question.run not in runs:
        raise ResultError(f"headline: expected a published run, found no {question.run}")
    run = runs[question.run]
    case = headline_case(question, run)
    best, isolated = case.finding.best, case.isolated
    processes = int(best["processes"])
    beside = " isolated" if is_short(best) else ""
    if best["scope"] != isolated["scope"]:
        beside = f" inside a chain; isolated {gain_text(isolated)}"
    contest = run.timed[run.timed.place == best["place"]]
    peers = contest[~contest.kernel.map(is_ours) & ~is_replaced(contest)]
    peer = records(peers.sort_values("gain"))[-1]
    return [
        question.text,
        case.finding.group,
        f"`{case.finding.contender}`",
        gain_text(best) + beside,
        against(contest),
        f"`{contender_name(peer)}` {times(peer['gain'], peer['half'])}",
        _alone(best, run, runs) or "not yet",
        _in_all_runs(best, run, runs),
        f"{run.device}, {conditions(best)}",
        f"[{run.name}](/{run.home}), {amount(processes, 'process')}, a {kind_of(processes)}",
    ]


def confirmations_of(
    run: PublishedRun, runs: Mapping[str, PublishedRun]
) -> dict[str, PublishedRun]:
    """Return the runs that confirm a run, by name."""
    screened = bundle.identity(run.run.path)
    identities = {
        name: other.run.state.get("confirms", {}).get("manifest_sha256")
        for name, other in runs.items()
    }
    return {name: runs[name] for name, identity in identities.items() if identity == screened}


def _alone(case: Case, run: PublishedRun, runs: Mapping[str, PublishedRun]) -> str:
    """Return a case's speedup in the run that confirms its own, or "" if there is none.

    The text ends with the conditions. It says `unreliable` if the A/A pairs of the confirming run
    differ too often, and `inherited configurations` if that run did not search.
    """
    for other in confirmations_of(run, runs).values():
        same = other.timed[(other.timed[KEYS] == [case[key] for key in KEYS]).all(axis=1)]
        if same.empty:
            continue
        line = records(same)[0]
        doubtful = other.noise.reliability[0] is Reliability.UNRELIABLE
        words = [gain_text(line), str(Reliability.UNRELIABLE) if doubtful else ""]
        inherited = choices_of(other.run.state) is Choices.BUNDLE
        words += ["inherited configurations"] if inherited else []
        return ", ".join(filter(None, [*words, conditions(line)]))
    return ""


def _in_all_runs(case: Case, run: PublishedRun, runs: Mapping[str, PublishedRun]) -> str:
    """Return the range of a case's speedup over all verdicts on its GPU: `4.6× to 5.0× in 9 runs`.

    A run that was replaced counts, too. Speedups are over dense on the same zeros, because older
    runs have no others. Without a verdict the text is `no verdict`.
    """
    gains = []
    for other in (each for each in runs.values() if each.device == run.device):
        now = _gains(case, other)
        gains += (
            [*now, *(gain for old in other.replaced for gain in _gains(case, old))] if now else []
        )
    if not gains:
        return "no verdict"
    ends = dict.fromkeys(times(end, case["half"]) for end in (min(gains), max(gains)))
    zeros = " over the same zeros" if case["over"] == "original" else ""
    return f"{' to '.join(ends)}{zeros} in {amount(len(gains), 'run')}"


def _gains(case: Case, run: PublishedRun) -> list[float]:
    """Return the speedup of a case in another run, over dense on the same zeros.

    It is [] if that run has no verdict on the case.
    """
    same = run.timed[(run.timed[KEYS] == [case[key] for key in KEYS]).all(axis=1)]
    return same.zeros_gain[(same.processes >= FEWEST) & same.zeros_gain.notna()].tolist()
