"""The options that share a plan out over several GPUs: --devices, --slurm, --shards."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsebench.harness.commands._options import new_run

if TYPE_CHECKING:
    from sparsebench.harness.plan.suite import Suite
    from sparsebench.harness.run.measure import RunOptions
    from sparsebench.harness.run.run_json import Flags

Devices = Annotated[str, typer.Option(help="GPUs of this host that share the plan: cuda:0,cuda:1.")]
Slurm = Annotated[
    str,
    typer.Option(
        help="Share the plan among Slurm jobs, with these options: 'partition=gpu time=60'."
    ),
]
Shards = Annotated[int, typer.Option(help="Number of jobs for --slurm.", min=0, show_default=False)]


@dataclass(frozen=True)
class Sharing:
    """The options that share a plan out; falsy if none was given."""

    devices: str = ""
    slurm: str = ""
    shards: int = 0

    def __post_init__(self) -> None:
        names = [name for name in ("devices", "slurm") if getattr(self, name)]
        if len(names) > 1:
            raise typer.BadParameter(f"expected --{names[0]} or --{names[1]}, found both")
        if bool(self.shards) != bool(self.slurm):
            raise typer.BadParameter("expected --shards N together with --slurm")

    def __bool__(self) -> bool:
        return bool(self.devices or self.slurm)

    @property
    def device_names(self) -> list[str]:
        """Return the devices of this host. Raises SuiteError if one does not exist."""
        from sparsebench.harness.machine.device import full_name

        return [full_name(name) for name in self.devices.split(",")]

    def first(self, device: str | None) -> str:
        """Return the device of the run's flags; a Slurm job looks for its GPU when it starts."""
        from sparsebench.harness.machine.device import full_name

        if self.devices:
            if device:
                raise typer.BadParameter("expected --device or --devices, found both")
            return self.device_names[0]
        if self.slurm and (device or "cuda").startswith("cuda"):
            return "cuda:0"
        return full_name(device)

    def measure(
        self,
        suite: "Suite",
        flags: "Flags",
        out: Path | None,
        options: "RunOptions",
    ) -> Path:
        """Measure a suite in parts, on one device or shared out, or what is left of it at `out`."""
        from sparsebench.harness.shared_runs.cluster_jobs import job_name, read_options
        from sparsebench.harness.shared_runs.shared_folder import Plan
        from sparsebench.harness.shared_runs.sharing import measure_alone, share

        if not self:
            return measure_alone(suite, flags, out or new_run(suite.name), options)
        devices = self.device_names if self.devices else [flags.device] * self.shards
        if not out:
            kind = "devices" if self.devices else "jobs"
            out = new_run(f"{suite.name}-{len(devices)}-{kind}")
        by = "devices" if self.devices else "slurm"
        job = "" if self.devices else job_name()
        plan = Plan(suite.name, flags, tuple(devices), by, read_options(self.slurm), job)
        return share(suite, plan, out, options)
