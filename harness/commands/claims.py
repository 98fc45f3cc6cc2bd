"""`sparsebench claims`: judge published claims about sparse formats."""

import gc
from functools import partial
from importlib.metadata import version
from math import inf
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from sparsebench._writing import write_file
from sparsebench.errors import ResultError
from sparsebench.harness.commands import _options as opt
from sparsebench.harness.commands._console import (
    measuring,
    print_json,
    progress_bar,
    stderr,
    stdout,
    warn_of_changes,
    wide,
)

if TYPE_CHECKING:
    from sparsebench.harness.claims.checking import ClaimEvidence

claims = typer.Typer(
    help="Test published claims about sparse formats.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)

Names = Annotated[
    list[str] | None, typer.Argument(help="Claims, by name or as file.yaml. Default: all.")
]
EVIDENCE = "Evidence: runs, folders of runs, or the JSON of a script in experiments."
Runs = Annotated[list[Path] | None, typer.Option("--from", help=EVIDENCE)]


@claims.command("list")
def list_(names: Names = None, as_json: opt.Json = False) -> None:
    """List the known claims and what each one says."""
    from sparsebench.harness.claims.claim_plan import read_claims
    from sparsebench.reports.claims.sheets import list_table

    selected = read_claims(names or [])
    if as_json:
        print_json({each.name: each.claim.model_dump(by_alias=True) for each in selected})
    else:
        wide().print(list_table(selected))
        stdout.say("Verdicts: sparsebench claims report")


@claims.command()
def schema() -> None:
    """Print the JSON Schema of a claim file, for YAML editors."""
    from sparsebench.results.claims.schema import Claim

    print_json(Claim.model_json_schema(by_alias=True))


@claims.command()
def check(
    names: Names = None,
    device: opt.Device = None,
    runs: Runs = None,
    data: opt.Data = None,
    replicates: opt.Replicates = 8,
    timeout: opt.Timeout = 120.0,
    out: opt.Out = None,
    budget: opt.Budget = None,
    plan: Annotated[bool, typer.Option("--plan", help="Only print the missing runs.")] = False,
    peers: opt.Peers = None,
    as_json: opt.Json = False,
) -> None:
    """Measure what claims still need, and give verdicts.

    The missing runs are printed first. With 6 processes or more, the best case of each claim that
    needs confirmation is measured again, alone. If --budget ends the check early, the same command
    with --out resumes it.
    """
    from sparsebench.harness.claims import checking
    from sparsebench.harness.claims.claim_plan import read_claims
    from sparsebench.harness.machine.device import full_name
    from sparsebench.harness.run.measure import RunOptions, Unfinished
    from sparsebench.harness.run.run_json import Flags
    from sparsebench.harness.shared_runs.sharing import measure_alone
    from sparsebench.results.formatting import amount
    from sparsebench.results.run import store

    until = monotonic() + opt.budget_s(budget) if budget else inf
    picked = (device or "cuda:0") if plan else full_name(device)  # --plan needs no device here

    def print_plan(result: "ClaimEvidence") -> None:
        planned = checking.missing(result, picked, replicates)
        for line in [*(run.sentence for run in planned), *checking.left_out(result)]:
            stderr.say(line)
        stderr.say(f"{amount(len(planned), 'run')} of {amount(replicates, 'process')}")

    if plan:
        print_plan(_evidence(names, runs, data))
        return
    flags = Flags(picked, data, timeout, replicates)
    out = out or opt.new_run("claims")
    with measuring(out=out) as show:
        options = RunOptions(progress=show, until=until)
        engine = partial(measure_alone, as_begun=True)
        written, given = read_claims(names or []), _runs(runs)
        try:
            result = checking.check(written, flags, given, out, options, engine, print_plan)
        except Unfinished as left:
            contests = f"{left.done} of {amount(left.of, 'contest')}"
            rest = f"`sparsebench claims check --out {out}` measures the rest"
            stderr.say(f"{left.path.name}: the time ended after {contests}; {rest}")
            result = checking.evidence(written, [*given, *store.runs_in(out)], data)
    if as_json:
        print_json(checking.to_json(result))
    else:
        _show(result, out / "pages")


@claims.command()
def report(
    names: Names = None,
    runs: Annotated[
        list[Path] | None, typer.Option("--from", help=f"{EVIDENCE} Default: the published runs.")
    ] = None,
    out: Annotated[Path | None, opt.out_file("Folder for pages.")] = None,
    data: opt.Data = None,
    as_json: opt.Json = False,
) -> None:
    """Judge claims by existing runs, without a GPU."""
    from sparsebench.harness.claims.checking import to_json
    from sparsebench.reports.published_runs import published_evidence

    result = _evidence(names, runs or published_evidence(), data)
    if as_json:
        print_json(to_json(result))
    else:
        _show(result, out)


def _evidence(
    names: list[str] | None, runs: list[Path] | None, data: Path | None
) -> "ClaimEvidence":
    """Return claims, all by default, with the runs to judge them by."""
    from sparsebench.harness.claims.checking import evidence
    from sparsebench.harness.claims.claim_plan import read_claims

    written, paths = read_claims(names or []), _runs(runs)
    gc.freeze()  # modules outlive the command: to look at them again and again took 0.7 s
    with progress_bar() as show:
        result = evidence(written, paths, data, show)
    warn_of_changes(result.runs.values())
    return result


def _show(result: "ClaimEvidence", out: Path | None) -> None:
    """Print the verdicts, and write the pages of all claims if a folder is given."""
    from sparsebench.reports.claims.sheets import verdict_table

    wide().print(verdict_table(verdict for each in result.verdicts().values() for verdict in each))
    if out is None:
        return
    from sparsebench.reports.claims.pages import alone, entries  # imports matplotlib, 0.2 s

    pages = entries(result.planned(), result.cells)
    for name, text in alone(pages, version("sparsebench")):
        file = out / name
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, text)
    stdout.say(f"pages: {out / 'claims' / 'index.html'}")


def _runs(paths: list[Path] | None) -> list[Path]:
    """Return runs and JSON files as given, and those inside each folder."""
    from sparsebench.results.run import store

    runs = list[Path]()
    for path in paths or []:
        if path.suffix == ".json" or (path / "run.json").exists():
            inside = [path]
        else:
            inside = store.runs_in(path) or [
                run for folder in sorted(path.glob("*/")) for run in store.runs_in(folder)
            ]
            inside = inside or sorted(path.glob("*.json"))
        if not inside:
            raise ResultError(f"--from {path}: expected a run, or a folder of runs, found none")
        runs += inside
    return runs
