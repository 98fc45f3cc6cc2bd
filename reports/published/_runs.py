"""The published runs: every bundle of a folder read once, as cases with their verdicts.

    results/published/<gpu>/<run>  ─>  Published: the run, its cases, what it says of its noise

The cases have five more columns, for tables: `run`, `shape` (n × k), `asked` (the level in
per cent), `ours` (a kernel of this project, dense ones left out) and `dense` (a portfolio that
chose a dense kernel).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from sparsebench.errors import ResultError
from sparsebench.results import store
from sparsebench.results.analysis import analyse, chose_dense
from sparsebench.results.families import ours
from sparsebench.results.noise import Noise
from sparsebench.results.provenance import device_name, flat
from sparsebench.results.statistics import FEWEST
from sparsebench.results.store import Run


@dataclass(frozen=True)
class Published:
    """A published run. `home` is the folder of its bundle, from the root."""

    run: Run
    home: str
    cases: pd.DataFrame
    noise: Noise

    @property
    def name(self) -> str:
        """Name the run as its folder does."""
        return self.run.path.name

    @property
    def gpu(self) -> str:
        """Name the GPU that it ran on."""
        return device_name(self.run.environment)

    @property
    def cards(self) -> list[str]:
        """Return the first digits of the UUID of each card; a CPU has none."""
        named = {value for name, value in self.facts.items() if name.endswith("gpu.uuid")}
        return sorted(uuid.removeprefix("GPU-")[:8] for uuid in named)

    @cached_property
    def facts(self) -> Mapping[str, str]:
        """Return what the environment says, by dotted name."""
        return flat(self.run.environment)

    @property
    def processes(self) -> int:
        """Return the number of replicates."""
        return int(self.run.state["flags"]["replicates"])

    @property
    def weight(self) -> str:
        """Say whether the run is a verdict or a look."""
        return "verdict" if self.processes >= FEWEST else "look"


def published(root: Path) -> dict[str, Published]:
    """Read all runs below results/published, by name; ResultError says which cannot be read."""
    paths = sorted(path.parent for path in (root / "results/published").glob("*/*/run.json"))
    if not paths:
        raise ResultError(f"{root / 'results/published'}: expected published runs, found none")
    found: dict[str, Published] = {}
    for path in paths:
        if path.name in found:
            raise ResultError(f"{path}: expected a name of its own, found it twice")
        found[path.name] = _read(root, path)
    return found


def _read(root: Path, path: Path) -> Published:
    run = store.read(path)
    found = analyse(run)
    home = path.relative_to(root)
    cases = with_names(found.cases, path.name)
    return Published(run, home.as_posix(), cases, found.noise)


def with_names(cases: pd.DataFrame, run: str) -> pd.DataFrame:
    """Return cases with the five columns that tables ask for."""
    sizes = zip(cases.n, cases.k, strict=True)
    return cases.assign(
        run=run,
        shape=pd.Series([None if pd.isna(n) else f"{n} × {k}" for n, k in sizes], cases.index),
        asked=[f"{np.round(100 * level, 2):g} %" for level in cases.level],
        ours=cases.kernel.isin(ours()),
        dense=chose_dense(cases),
    )
