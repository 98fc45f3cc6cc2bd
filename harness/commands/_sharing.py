"""The options that share a plan out over several GPUs: --devices, --slurm, --submit, --shards."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsebench.errors import SuiteError

if TYPE_CHECKING:
    from sparsebench.harness.plan.suite import Suite
    from sparsebench.harness.run.measure import RunOptions
    from sparsebench.harness.run.run_json import Flags

Devices = Annotated[
    str, typer.Option(help="GPUs of this host that share the plan, such as cuda:0,cuda:1.")
]
Slurm = Annotated[
    str,
    typer.Option(help="Share the plan over Slurm jobs of one GPU: 'partition=gpu time=60'."),
]
Submit = Annotated[str, typer.Option(help="'local' runs the jobs of --slurm on this host.")]
Shards = Annotated[int, typer.Option(help="Number of jobs that share the plan.", min=0)]
Shard = Annotated[
    str, typer.Option(help="Measure one part of the plan, such as 2/4; `merge` joins the parts.")
]


@dataclass(frozen=True)
class Sharing:
    """How the command line asks to share a plan out; false if it does not."""

    devices: str = ""
    slurm: str = ""
    submit: str = ""
    shards: int = 0

    def __post_init__(self) -> None:
        """Raise BadParameter for contradicting options."""
        given = [name for name in ("devices", "slurm", "submit") if getattr(self, name)]
        if len(given) > 1:
            raise typer.BadParameter(f"expected --{given[0]} or --{given[1]}, found both")
        if self.submit not in ("", "local"):
            raise typer.BadParameter(f"--submit: expected local, found {self.submit!r}")
        if bool(self.shards) != bool(self.slurm or self.submit):
            raise typer.BadParameter("expected --shards N together with --slurm or --submit")

    def __bool__(self) -> bool:
        """Return whether the plan is shared out."""
        return bool(self.devices or self.slurm or self.submit)

    @property
    def count(self) -> int:
        """Return how many devices of this host measure; 0 if jobs do."""
        if self.slurm or self.submit:
            return 0
        return len(self.devices.split(",")) if self.devices else 1

    @property
    def device_names(self) -> list[str]:
        """Return the devices of this host. Raises SuiteError if one does not exist."""
        from sparsebench.harness.machine.device import named

        return [named(name) for name in self.devices.split(",")]

    def first(self, device: str | None) -> str:
        """Return the device of the run's flags; a Slurm job looks for its GPU when it starts."""
        from sparsebench.harness.machine.device import named

        if self.devices:
            if device:
                raise typer.BadParameter("expected --device or --devices, found both")
            return self.device_names[0]
        if self.slurm and (device or "cuda").startswith("cuda"):
            return "cuda:0"
        return named(device)

    def measure(
        self,
        suite: "Suite",
        flags: "Flags",
        out: Path | None,
        resume: Path | None,
        options: "RunOptions",
    ) -> Path:
        """Measure a suite as run/measure.py does, shared out; resume a stopped run at `out`."""
        from sparsebench.harness.shared_runs.cluster_jobs import job_name, read_options, submit
        from sparsebench.harness.shared_runs.local_gpus import share
        from sparsebench.harness.shared_runs.shared_folder import Plan

        if resume:
            raise SuiteError(f"--resume {resume}: expected a run that is shared out, found another")
        count = len(self.device_names) if self.devices else self.shards
        if not out:
            kind = "devices" if self.devices else "jobs"
            out = Path("runs") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{suite.name}-{count}-{kind}"
        if self.devices:
            return share(suite, flags, self.device_names, out, options)
        by, job_options = ("slurm", read_options(self.slurm)) if self.slurm else ("local", {})
        if by == "local" and flags.device.startswith("cuda") and count > 1:
            raise SuiteError(f"--submit local: expected --devices for {count} GPUs of this host")
        devices = (flags.device,) * count
        plan = Plan(
            suite.name, flags, devices, by, job_options, job_name(), dict(options.origin or {})
        )
        return submit(suite, plan, out, options)


def is_shared(run: Path) -> bool:
    """Return whether a run is shared out and not merged yet."""
    from sparsebench.harness.shared_runs import shared_folder as folders

    return (folders.beside(run) / "plan.json").exists() and not (run / "run.json").exists()


def resume_shared(run: Path, options: "RunOptions") -> Path:
    """Resume a run that is shared out, and return the merged run."""
    from sparsebench.harness.shared_runs import cluster_jobs, local_gpus
    from sparsebench.harness.shared_runs import shared_folder as folders

    folder = folders.beside(run)
    plan = folders.read(folder)
    suite = folders.suite(folder, plan)
    if plan.by == "devices":
        return local_gpus.go_on(folder, suite, plan, options)
    return cluster_jobs.go_on(folder, suite, plan, options)
