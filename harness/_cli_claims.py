"""The commands about claims: lint, list, bound, check, report."""

from datetime import UTC, datetime
from importlib.metadata import version
from math import inf
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from sparsebench.errors import ResultError, SuiteError
from sparsebench.harness._cli import (
    BAD_INPUT,
    Data,
    Device,
    Json,
    Peers,
    Timeout,
    err,
    measuring,
    out,
    print_json,
    wide,
)
from sparsebench.harness._cli_survey import budget_s

if TYPE_CHECKING:
    from sparsebench.harness.claims.check import Evidence
    from sparsebench.results.ceilings import Ceilings
    from sparsebench.results.model_files import Pruning

claims = typer.Typer(
    help="Judge what others published about sparse formats.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Names = Annotated[
    list[str] | None, typer.Argument(help="Claims by name or file.yaml; default: all shipped.")
]
Runs = Annotated[
    list[Path] | None,
    typer.Option(
        "--from", help="Runs, or folders of runs, to take rows from; what train-lm and whole wrote."
    ),
]
Pages = Annotated[Path | None, typer.Option("--to", help="Folder for the pages.")]
Losses = Annotated[
    Path | None,
    typer.Option(help="Loss beside speed: what prune --json printed, or a Gemma 3 as .gguf."),
]


@claims.command("list")
def list_(names: Names = None, as_json: Json = False) -> None:
    """Name the claims that are known, with what each says."""
    from sparsebench.harness.claims.catalog import chosen
    from sparsebench.reports.claims.sheets import listed

    found = chosen(names or [])
    if as_json:
        print_json({w.name: w.claim.model_dump(by_alias=True) for w in found})
    else:
        wide().print(listed(found))


@claims.command()
def lint(names: Names = None, data: Data = None) -> None:
    """Check claims: every field, every suite and contender that they name. Run nothing."""
    from sparsebench.harness.claims.catalog import claims as known
    from sparsebench.harness.claims.catalog import load
    from sparsebench.harness.claims.plan import parts
    from sparsebench.results.formatting import amount

    wrong = 0
    for name in names or known():
        try:
            written = load(name)
            planned = parts(written, data)
        except SuiteError as error:
            wrong += 1
            out.print(str(error), soft_wrap=True, highlight=False, markup=False)
            continue
        cells = sum(len(part.contests) for part in planned)
        tests = amount(len(written.claim.tests), "test")
        said = f"{name}: ok, {tests} of {amount(cells, 'cell')}"
        out.print(said, soft_wrap=True, highlight=False, markup=False)
    if wrong:
        raise typer.Exit(BAD_INPUT)


@claims.command()
def bound(
    names: Names = None,
    gpu: Annotated[
        Path | None, typer.Option(help="A run whose ceilings bound it: results/published/...")
    ] = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Say what could at most be reached, before any GPU time, and what nobody can meet."""
    from sparsebench.harness.claims.catalog import chosen
    from sparsebench.harness.claims.check import evidence
    from sparsebench.reports.claims.sheets import bounded

    found = evidence(chosen(names or []), data=data).asked(_ceilings(gpu))
    if not as_json:
        wide().print(bounded(found))
        return
    print_json(
        {
            each.name: {
                "tests": {test: [*most.values()] for test, most in each.bounds.items()},
                "beyond": [*each.beyond],
                "bounds": {one.of: one.most for one in each.claim.bounds},
            }
            for each in found
        }
    )


@claims.command()
def check(
    names: Names = None,
    device: Device = None,
    runs: Runs = None,
    data: Data = None,
    replicates: Annotated[
        int, typer.Option(help="Fresh processes: 1 to 5 to look, 8 to judge.", min=1, max=1000)
    ] = 8,
    timeout: Timeout = 120.0,
    to: Annotated[Path | None, typer.Option("--out", help="Folder; default: runs/...")] = None,
    budget: Annotated[
        str | None, typer.Option(help="Time to take: 90s, 10m, 2h; default: as long as it takes.")
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Say what is missing and what it takes; run nothing.")
    ] = False,
    gpu: Annotated[
        Path | None, typer.Option(help="Runs that tell what things cost: results/published/...")
    ] = None,
    losses: Losses = None,
    peers: Peers = None,
    as_json: Json = False,
) -> None:
    """Measure what is missing for claims, confirm what is promising, and judge.

    It first says which runs it will make; with --gpu also about how long they take. From 6
    processes on the best cell of a claim that asks for one is measured again, alone. With --budget
    it ends in time; the same command with --out goes on.
    """
    from sparsebench.harness.claims.catalog import chosen
    from sparsebench.harness.claims.check import check as checked
    from sparsebench.harness.claims.check import evidence, to_json
    from sparsebench.harness.claims.costs import left_out, looks
    from sparsebench.harness.machine.device import named
    from sparsebench.harness.plan.elsewhere import costs
    from sparsebench.harness.run.state import Flags
    from sparsebench.results.formatting import amount

    until = monotonic() + budget_s(budget) if budget else inf
    asked = chosen(names or [])
    there = costs(gpu) if gpu else None

    def planned(found: "Evidence") -> None:
        left = looks(found, picked, replicates, there)
        for line in [*(look.sentence for look in left), *left_out(found)]:
            err.print(line, soft_wrap=True, highlight=False, markup=False)
        known = [look.seconds for look in left if look.seconds is not None]
        total = f", about {sum(known):.0f} s" if known else ""
        made = f"{amount(len(left), 'run')} of {amount(replicates, 'process')}"
        err.print(f"{made}{total}", highlight=False)

    if plan:
        picked = device or "cuda:0"  # it need not be here
        planned(evidence(asked, _runs(runs), data))
        return
    picked = named(device)
    flags = Flags(picked, data, timeout, replicates)
    to = to or Path("runs") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-claims"
    with measuring("claims check --out") as show:
        found = checked(asked, flags, _runs(runs), to, show, until=until, planned=planned)
    if found.left:
        said = f"not all measured: {', '.join(found.left)}; claims check --out {to} goes on"
        err.print(said, soft_wrap=True, highlight=False, markup=False)
    if as_json:
        print_json(to_json(found))
    else:
        _show(found, _pruning(losses, found, picked), to / "pages")


@claims.command()
def report(
    names: Names = None,
    runs: Runs = None,
    to: Pages = None,
    data: Data = None,
    losses: Losses = None,
    as_json: Json = False,
) -> None:
    """Judge claims by rows that exist, without a GPU; --to writes a page and a badge each."""
    from sparsebench.harness.claims.catalog import chosen
    from sparsebench.harness.claims.check import evidence, to_json

    found = evidence(chosen(names or []), _runs(runs), data)
    if as_json:
        print_json(to_json(found))
    else:
        _show(found, _pruning(losses, found, "cpu"), to)


def _show(found: "Evidence", pruning: "Pruning | None", to: Path | None) -> None:
    """Print the verdicts, and write the pages of all claims where a folder is given."""
    from sparsebench.reports.claims.pages import alone, entries
    from sparsebench.reports.claims.sheets import judged

    wide().print(judged(verdict for each in found.verdicts().values() for verdict in each))
    if to is None:
        return
    made = entries(found.asked(), found.cells, pruning)
    for name, text in alone(made, version("sparsebench")):
        file = to / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    out.print(f"pages: {to / 'claims' / 'index.html'}", soft_wrap=True, highlight=False)


def _pruning(given: Path | None, found: "Evidence", device: str) -> "Pruning | None":
    """Read losses; those of a model come of pruning it now, to the fractions of the claims."""
    from sparsebench.harness.machine.device import pick, simulated
    from sparsebench.harness.models.pruning.command import parse_recipes, prune_file
    from sparsebench.results.model_files import read_pruning

    if given is None or given.suffix != ".gguf":
        return read_pruning(given) if given else None
    problems = [contest.problem for part in found.all_parts for contest in part.contests]
    hybrid = [p for p in problems if p["pattern"].startswith(("spense_", "two_four"))]
    fractions = sorted({round(1 - 2 * problem["sparsity"], 6) for problem in hybrid} - {1.0})
    if not fractions:
        expected = "a claim about 2:4 beside dense weights"
        raise SuiteError(f"--losses {given}: expected {expected}, found none")
    recipes = parse_recipes("spensegpt", ",".join(f"{each:g}" for each in fractions), "scored")
    return prune_file(given, recipes, pick("cpu" if simulated(device) else device))


def _runs(given: list[Path] | None) -> list[Path]:
    """Return the runs among some paths; a folder stands for the runs in it."""
    found = []
    for path in given or []:
        single = path.suffix == ".json" or (path / "run.json").exists()
        inside = [path] if single else sorted(
            file.parent for file in path.glob("*/run.json")
        )  # fmt: skip
        if not inside:
            raise ResultError(f"--from {path}: expected a run, or a folder of runs, found none")
        found += inside
    return found


def _ceilings(gpu: Path | None) -> "Ceilings | None":
    """Return the ceilings of a run's device; None without a run."""
    from sparsebench.results import store
    from sparsebench.results.ceilings import Ceilings

    if gpu is None:
        return None
    run = store.read(_runs([gpu])[0])
    if not run.environment.get("ceilings"):
        raise ResultError(f"--gpu {gpu}: expected a run with ceilings, found none")
    return Ceilings.from_json(run.environment["ceilings"])
