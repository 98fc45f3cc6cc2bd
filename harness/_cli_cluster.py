"""Several GPUs on the command line: options of run, reproduce and new-gpu; merge and status."""

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from sparsebench.errors import SuiteError
from sparsebench.harness._cli import Data, Json, out, print_json, wide

if TYPE_CHECKING:
    from sparsebench.harness.plan.suite import Suite
    from sparsebench.harness.run.measure import RunOptions
    from sparsebench.harness.run.state import Flags
    from sparsebench.results.store import Run

Devices = Annotated[str, typer.Option(help="GPUs of this host that share the plan: cuda:0,cuda:1.")]
Slurm = Annotated[
    str,
    typer.Option(help="Send the plan to Slurm, one GPU a job: 'partition=gpu time=60 gres=gpu:1'."),
]
Submit = Annotated[str, typer.Option(help="local: jobs as of --slurm, on this host.")]
Shards = Annotated[int, typer.Option(help="How many jobs share the plan.", min=0)]
Shard = Annotated[str, typer.Option(help="Measure one part of the plan, 2/4; merge joins parts.")]


@dataclass(frozen=True)
class Ways:
    """How a plan is shared out, as asked for on the command line."""

    devices: str = ""
    slurm: str = ""
    submit: str = ""
    shards: int = 0

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        asked = [name for name in ("devices", "slurm", "submit") if getattr(self, name)]
        if len(asked) > 1:
            raise typer.BadParameter(f"expected --{asked[0]} or --{asked[1]}, found both")
        if self.submit not in ("", "local"):
            raise typer.BadParameter(f"--submit: expected local, found {self.submit!r}")
        if bool(self.shards) != bool(self.slurm or self.submit):
            raise typer.BadParameter("expected --shards N with --slurm or --submit, and only there")

    def __bool__(self) -> bool:
        """Say whether the plan is shared out at all."""
        return bool(self.devices or self.slurm or self.submit)

    @property
    def count(self) -> int:
        """Return how many devices of this host measure."""
        return len(self.devices.split(",")) if self.devices else 1

    @property
    def named(self) -> list[str]:
        """Return the devices of this host, each as it is there; SuiteError where one is not."""
        from sparsebench.harness.machine.device import named

        return [named(name) for name in self.devices.split(",")]

    def first(self, device: str | None) -> str:
        """Return the device that flags name; a job asks for its GPU where it runs."""
        from sparsebench.harness.machine.device import named

        if self.devices:
            if device:
                raise typer.BadParameter("expected --device or --devices, found both")
            return self.named[0]
        if self.slurm and (device or "cuda").startswith("cuda"):
            return "cuda:0"
        return named(device)

    def measure(
        self,
        suite: "Suite",
        flags: "Flags",
        to: Path | None,
        resume: Path | None,
        options: "RunOptions",
    ) -> Path:
        """Measure as harness/run/measure.py does, shared out; a stopped one at `to` goes on."""
        from sparsebench.harness.cluster.devices import share
        from sparsebench.harness.cluster.folder import Plan
        from sparsebench.harness.cluster.jobs import job_name, read_options, submit

        if resume:
            raise SuiteError(f"--resume {resume}: expected a run that is shared out, found another")
        count = len(self.named) if self.devices else self.shards
        to = to or _new_path(suite.name, count, "devices" if self.devices else "jobs")
        if self.devices:
            return share(suite, flags, self.named, to, options)
        by, asked = ("slurm", read_options(self.slurm)) if self.slurm else ("local", {})
        devices = (flags.device,) * count
        if by == "local" and flags.device.startswith("cuda") and count > 1:
            raise SuiteError(f"--submit local: expected --devices for {count} GPUs of this host")
        plan = Plan(suite.name, flags, devices, by, asked, job_name(), dict(options.origin or {}))
        return submit(suite, plan, to, options)


def is_shared(run: Path) -> bool:
    """Say whether a run is shared out and not merged yet."""
    from sparsebench.harness.cluster import folder as folders

    return (folders.beside(run) / "plan.json").exists() and not (run / "run.json").exists()


def not_merged(run: "Run") -> "Run":
    """Return a run that may go on by itself; SuiteError where parts of it would."""
    if run.state.get("shards"):
        said = "expected a run that was stopped, found one that is merged of several"
        raise SuiteError(f"--resume {run.path}: {said}")
    return run


def go_on(run: Path, options: "RunOptions") -> Path:
    """Go on with a run that is shared out, and return the merged one."""
    from sparsebench.harness.cluster import devices, jobs
    from sparsebench.harness.cluster import folder as folders

    folder = folders.beside(run)
    plan = folders.read(folder)
    suite = folders.suite(folder, plan)
    if plan.by == "devices":
        return devices.go_on(folder, suite, plan, options)
    return jobs.go_on(folder, suite, plan, options)


def merge(
    paths: Annotated[list[Path], typer.Argument(help="Runs that have parts of one plan.")],
    to: Annotated[Path, typer.Option("--out", help="The run to make of them.")],
    data: Data = None,
    plugins: Annotated[
        bool, typer.Option("--allow-plugins", help="Import other packages that the suite names.")
    ] = False,
) -> None:
    """Join runs that have parts of one plan into one sealed run, and write its report."""
    from sparsebench.harness.cluster.merge import merge as merged
    from sparsebench.reports.build import build
    from sparsebench.reports.terminal import Answer
    from sparsebench.results import store
    from sparsebench.results.analysis import analyse

    run = store.read(merged(paths, to, data, plugins=plugins))
    build(run, to / "report.html")
    wide().print(Answer(run, analyse(run)))
    out.print(f"report: {to / 'report.html'}", soft_wrap=True, highlight=False)


def status(
    run: Annotated[Path, typer.Argument(help="A run that is shared out, or any other.")],
    as_json: Json = False,
) -> None:
    """Say how far a run is, from any host that sees its folder."""
    from sparsebench.harness.cluster import folder as folders
    from sparsebench.harness.cluster.jobs import jobs
    from sparsebench.results import store
    from sparsebench.results.formatting import amount

    if not is_shared(run):
        state = store.read(run).state
        told = {"status": state["status"], "contests": state["contests"]}
        if as_json:
            print_json(told)
        else:
            counts = state["contests"]
            out.print(f"{state['status']}: {counts['done']} of {amount(counts['of'], 'contest')}")
        return
    folder = folders.beside(run)
    plan = folders.read(folder)
    suite = folders.suite(folder, plan)
    shares, sent = list(folders.shares(folder, plan)), jobs(folder)
    asked = folders.contests(plan, suite)
    done, total = sum(share.contests for share in shares), len(asked) * plan.flags.replicates
    left = folders.unclaimed(folder, asked)
    if as_json:
        parts = [asdict(share) | {"jobs": sent.get(str(share.number), [])} for share in shares]
        print_json({"contests": {"done": done, "of": total, "unclaimed": left}, "parts": parts})
        return
    measured = f"{done} of {amount(total, 'contest')} in all processes"
    out.print(f"{measured}, {amount(left, 'problem')} not begun")
    table = Table("part", "status", "contests", "device", "jobs", box=None)
    for share in shares:
        ids = " ".join(sent.get(str(share.number), []))
        table.add_row(str(share.number), share.status, str(share.contests), share.device, ids)
    wide().print(table)


def _new_path(suite: str, count: int, what: str) -> Path:
    return Path("runs") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{suite}-{count}-{what}"
