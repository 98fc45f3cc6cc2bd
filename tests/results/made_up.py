"""Runs that are made up: of dense and BSR, in as many processes as a test needs."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparsebench.results.record import Contender, Row
from sparsebench.results.run.store import StoredRun

DENSE = Contender("dense", "cublas", baseline=True)
TWIN = replace(DENSE, baseline=False, twin=True)
BSR = Contender("bsr", "bsr_triton")
WOBBLE = [0.001, -0.001, 0.002, -0.002, 0.003, -0.003, 0.004, -0.004]  # of the log, by process


def stored(
    rows: Iterable[Row],
    name: str = "one",
    environment: Mapping[str, Any] | None = None,
    reference: Iterable[Row] = (),
    **state: Any,
) -> StoredRun:
    """Return a finished run of these rows."""
    facts = {"status": "finished", **state}
    return StoredRun(Path(name), {}, "", dict(environment or {}), facts, [*rows], [*reference])
