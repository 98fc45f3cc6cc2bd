"""A result for this project: checked, without private names, with the text of a pull request.

    a run, or the folder of `new-gpu`
      ─> OUT/results/published/GPU/SUITE-CARD    a bundle for `validate`; -look: few processes
      ─> OUT/pull-request.md                     what it is, its checks, facts about the machine

The folder is complete or does not exist. Names of users and hosts, paths and logs stay behind
(results/run/bundle.py); the text lists what was removed, and every fact about the machine.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsebench._writing import write_file
from sparsebench.errors import ResultError
from sparsebench.reports.archive import ORIGIN
from sparsebench.reports.tables import markdown_table
from sparsebench.reports.terminal import answer_markdown
from sparsebench.results.badges import badges
from sparsebench.results.comparison.sides import bundles, short_card
from sparsebench.results.files import from_json
from sparsebench.results.formatting import amount
from sparsebench.results.record import Status
from sparsebench.results.run import bundle, store
from sparsebench.results.run.bundle import Redaction
from sparsebench.results.run.provenance import device_id, device_name, flat, folder_name, on_gpu
from sparsebench.results.run.store import StoredRun
from sparsebench.results.statistics.ratio import FEWEST
from sparsebench.results.tables.analysis import Analysis, analyse

HOME, TEXT = Path("results/published"), "pull-request.md"
MACHINE = re.compile(r"(gpu|cpu|system|memory_gib|switches|devices\.\d+)\b")
"""Facts of environment.json that describe the machine; the others describe code and ceilings."""


@dataclass(frozen=True)
class ContributedRun:
    """A run of a contribution: its place in the folder, its checks, and what was removed."""

    place: Path
    analysis: Analysis
    identity: str
    checks: Sequence[str]
    removed: Redaction
    size: int

    @property
    def about(self) -> list[str]:
        """Return its place, cases, processes, badges and bytes."""
        cases, state = self.analysis.cases, self.analysis.run.state
        count = int(cases[~cases.twin.astype(bool)].case_id.nunique())
        words = [self.place.as_posix(), amount(count, "case")]
        words += [amount(int(state["flags"]["replicates"]), "process")]
        words += [", ".join(label.text for label in badges(self.analysis))]
        return [*words, f"{self.size / 1e6:.2g} MB"]


@dataclass(frozen=True)
class Contribution:
    """A contribution on disk.

    cards    the published cards of this kind of GPU, without this one
    machine  every fact about the machine, by its name in environment.json
    """

    folder: Path
    gpu: str
    runs: Sequence[ContributedRun]
    cards: Sequence[str]
    machine: dict[str, str]

    @property
    def welcome(self) -> str:
        """Say what the rows are for: a new kind of GPU, or another card of a known one."""
        if not on_gpu(self.runs[0].analysis.run.environment):
            return "Runs on a CPU join no estimate of the variation between cards."
        if not self.cards:
            return f"No published run is on this kind of GPU: {self.gpu} would be a new one."
        others = amount(len(self.cards), "other card")
        return (
            f"Published runs are on {others} of this kind, so cases that these share join the "
            "estimate of the variation between cards."
        )

    @property
    def removed(self) -> str:
        """Name what the copies lack, with counts."""
        texts = [f"{t} ({n})" for run in self.runs for t, n in run.removed.texts.items()]
        names = [*texts, *(file for run in self.runs for file in run.removed.files)]
        return ", ".join(dict.fromkeys(names)) or "nothing"

    @property
    def lines(self) -> list[str]:
        """Return what to read before sending it, and how to send it."""
        return [
            *(" · ".join(run.about) for run in self.runs),
            self.welcome,
            "About the machine, the files tell:",
            *(f"  {name}: {value}" for name, value in self.machine.items()),
            f"Removed: {self.removed}.",
            "",
            "Nothing was sent. In a clone of the repository, the pull request is made by",
            f"  cp -r {self.folder / HOME.parts[0]} . && git checkout -b results",
            f"  git add {HOME} && git commit -m 'results: {self.gpu}' && git push origin results",
            f"with the text of {self.folder / TEXT}.",
        ]


Check = Callable[[Path], Iterable[str]]
"""Yields a line for each check of a run; raises ResultError at the first failure."""


def contribute(
    runs: Sequence[Path], out: Path | None, published: Path, check: Check
) -> Contribution:
    """Check runs of one device, and write their contribution into a new folder.

    Raises ResultError for a run that fails a check, has no time, is published already or has the
    samples of a published one, if the runs are from several devices, or if one is named twice. Then
    nothing is written.
    """
    environments = [store.facts(run)[0] for run in runs]
    devices = {device_id(environment) for environment in environments}
    if len(devices) != 1:
        raise ResultError(f"expected runs of one device, found {', '.join(sorted(devices))}")
    (card,), gpu = devices, device_name(environments[0])
    if len({*map(bundle.identity, runs)}) < len(runs):
        raise ResultError(f"expected different runs, found one twice: {', '.join(map(str, runs))}")
    cards, identities = _published(published, gpu)
    out = out or Path(f"contribution-{folder_name(gpu)}")
    with store.new_directory(out) as fresh:
        names = _names(runs, card)
        done = [
            _contributed(run, fresh, HOME / folder_name(gpu) / name, identities, check)
            for run, name in zip(runs, names, strict=True)
        ]
        facts = {
            name: value
            for each in done
            for name, value in flat(each.analysis.run.environment).items()
            if MACHINE.match(name)
        }
        result = Contribution(out, gpu, done, sorted(cards - {card}), facts)
        write_file(fresh / TEXT, pull_request(result))
    return result


def _published(home: Path, gpu: str) -> tuple[set[str], dict[str, Path]]:
    """Return the cards of a kind of GPU in published runs, and every published run by identity."""
    cards, identities = set[str](), dict[str, Path]()
    for run in bundles([home]):
        with store.neighbour():
            environment, _ = store.facts(run)
            identities |= dict.fromkeys(_identities(run), run)
            if device_name(environment) == gpu:
                cards |= {n for k, n in flat(environment).items() if k.endswith("uuid")}
    return cards, identities


def _identities(run: Path) -> Iterator[str]:
    """Yield the identity of a published run, and of the bundle that it was made from."""
    origin, removed = run / ORIGIN, run / bundle.REMOVED
    yield origin.read_text("utf-8") if origin.exists() else bundle.identity(run)
    if removed.exists():
        yield str(from_json(removed)["of"])


def _names(runs: Iterable[Path], card: str) -> list[str]:
    """Return a name for each run: its suite, its card, and whether it is a look."""
    names: list[str] = []
    for run in runs:
        state = store.facts(run)[1]
        suite = re.sub(r"[^a-z0-9.]+", "-", Path(state["suite"]).stem.lower()).strip("-.")
        parts = [suite, short_card(card) if card.startswith("GPU-") else ""]
        parts += ["look"] * (state["flags"]["replicates"] < FEWEST)
        name = "-".join(filter(None, parts))
        count = sum(each == name or each.startswith(f"{name}-again") for each in names)
        names.append(f"{name}-again{count if count > 1 else ''}" if count else name)
    return names


def _contributed(
    run: Path, fresh: Path, place: Path, published: dict[str, Path], check: Check
) -> ContributedRun:
    identity = bundle.identity(run)
    if there := published.get(identity):
        raise ResultError(f"{run}: expected a new run, found one published as {there}")
    checks = [*check(run)]
    analysis = analyse(store.read(run))
    _require_new_samples(analysis.run, dict.fromkeys(published.values()))
    if not (analysis.cases.status == Status.OK).any():
        raise ResultError(f"{run}: expected a case with a time, found none")
    (fresh / place).mkdir(parents=True)
    removed = bundle.redact(run, fresh / place)
    copied = analyse(store.read(fresh / place))
    size = sum(file.stat().st_size for file in (fresh / place).iterdir())
    return ContributedRun(place, copied, identity, checks, removed, size)


def _require_new_samples(run: StoredRun, published: Iterable[Path]) -> None:
    """Raise ResultError if a row has the samples of a published one, as another card never would.

    The published runs of a wheel have medians, so only a clone finds such a copy.
    """
    taken: dict[tuple[float, ...], Path] = {}
    for other in published:
        if store.facts(other)[1]["suite"] == run.state["suite"]:
            taken |= dict.fromkeys((row.samples_us for row in store.rows(other)), other)
    for row in run.rows:
        if row.samples_us and (there := taken.get(row.samples_us)):
            where = f"{run.path}: {row.case.contender.label} in replicate {row.replicate}"
            raise ResultError(f"{where}: expected samples of its own, found those of {there}")


def pull_request(contribution: Contribution) -> str:
    """Return the text of a pull request, in Markdown."""
    runs, gpu = contribution.runs, contribution.gpu
    columns = ["folder", "cases", "processes", "state", "size"]
    first = runs[0].analysis.run.environment
    commit = str(first.get("commit") or "unknown")
    dirty = ", with uncommitted changes" if first.get("dirty") else ""
    parts = [
        f"# Results of {gpu}",
        contribution.welcome,
        markdown_table(columns, [run.about for run in runs]),
        f"Measured by sparsebench {first.get('sparsebench', 'unknown')}, commit {commit}{dirty}.",
        "## The answer",
        answer_markdown(runs[0].analysis).strip(),
        "## Checks",
        *(
            "\n".join([f"`{run.place.name}`:", "", *(f"- {check}" for check in run.checks)])
            for run in runs
        ),
        "## The machine",
        "Removed from the files: " + contribution.removed + ".",
        markdown_table(["fact", "value"], [[*fact] for fact in contribution.machine.items()]),
        "## For the maintainers",
        "`sparsebench validate` checks each folder again, and "
        "`python -m sparsebench.reports.published` writes every page that shows it.",
    ]
    return "\n\n".join(parts) + "\n"
