"""A device's measured ceilings, the bounds that follow, and times that are impossibly short.

    bound = max( bytes that must move / bandwidth,  FLOPs of the non-zeros / matrix rate )

    bytes, cold   every operand once, and the part of the output that exceeds the L2 cache, since
                  the rest may be written back after the sample
    bytes, hot    what exceeds the L2 cache
    bandwidth     the highest of reading, writing and copying
    rate, fp32    that of TF32: an fp32 product takes at least one pass of it, whatever the method
    rate, others  if the device has no such products, the highest rate: operands are converted

On a CPU, whose cores other work shares, no ceilings are measured, and rows have no bound.

A median below LIGHT x bound is a measurement error: `faster_than_light`. If a reference contest
(dense against dense) is faster than the bound, the ceiling was too low. Its rows stay ok and say
so, and the following contests use the raised ceiling:

    environment.json   ceilings before the first contest
    rows, in order     `raises` of a reference row is the factor by which it was faster (`after`)
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Self

from sparsebench.results.record import Row, Status

LIGHT = 0.95  # fraction of the limit, because ceilings are measured, too
FP32, TF32 = "fp32", "tf32"

Bound = tuple[float, str]
"""The shortest time of an op in µs, and whether memory or compute limits it."""


@dataclass(frozen=True)
class Ceilings:
    """One device's ceilings.

    read_gb_per_s, copy_gb_per_s, write_gb_per_s  copying counts bytes read and bytes written
    matrix_tflops   of large products, by dtype
    launch_us       the empty launch: a sample of almost no work, the floor of an isolated call
    by              the measurement that reached each ceiling: read, copy, write or a dtype
    age_s           their age at the start of the run, if another run of the sitting measured them

    None means unknown.
    """

    read_gb_per_s: float
    copy_gb_per_s: float
    matrix_tflops: Mapping[str, float]
    launch_us: float
    l2_bytes: int
    write_gb_per_s: float | None = None
    by: Mapping[str, str] = field(default_factory=dict)
    age_s: float = 0.0

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**data)

    @property
    def bandwidth(self) -> float:
        """Return the highest GB/s at which memory was read, written or copied."""
        return max(self.read_gb_per_s, self.copy_gb_per_s, self.write_gb_per_s or 0.0)

    def bound(
        self,
        dtype: str,
        flops: float,
        fewest_bytes: int,
        output_bytes: int,
        cache: str,
        layers: int = 1,
    ) -> Bound | None:
        """Return the bound of an op; None if it needs an unknown ceiling.

        With several `layers`, each with its own bytes, it is the bound of one: they share L2.
        """
        share = self.l2_bytes / layers
        cached = share if cache == "hot" else min(output_bytes, share)
        moved, rate = max(0, fewest_bytes - cached), self.matrix_tflops.get(self._rate(dtype), 0.0)
        if (moved and not self.bandwidth) or (flops and not rate):
            return None
        memory_us = moved / self.bandwidth / 1e3 if moved else 0.0
        compute_us = flops / rate / 1e6 if flops else 0.0
        return max(memory_us, compute_us), "memory" if memory_us >= compute_us else "compute"

    def after(self, rows: Iterable[Row]) -> tuple[Self, list[str]]:
        """Return the ceilings after the rows of a run, in order, and a line for each raise.

        The bounds in the rows follow from the ceilings at the time of their contest.
        """
        ceilings, lines = self, []
        reference = [row for row in rows if row.reference]
        for _, contest in groupby(reference, lambda row: (row.replicate, row.case.problem.id)):
            fastest: dict[str | None, Row] = {}
            for row in sorted(contest, key=lambda row: row.raises or 0.0):
                fastest[row.bound_by] = row
            for row in fastest.values():
                if row.raises:
                    ceilings, line = ceilings._raise_ceiling(row, row.raises)
                    lines.append(line)
        return ceilings, lines

    def _rate(self, dtype: str) -> str:
        """Return the dtype whose matrix rate bounds a dtype."""
        rates = self.matrix_tflops
        name = TF32 if dtype == FP32 else dtype
        return name if rates.get(name) else max(rates, key=lambda n: rates[n], default=name)

    def _raise_ceiling(self, row: Row, factor: float) -> tuple[Self, str]:
        """Raise the ceiling that limited a row by a factor; return it with a line for the log."""
        fields = row.case.problem.fields
        who = f"{row.case.contender.kernel} (m {fields['m']}, n {fields['n']}, k {fields['k']}, "
        who += f"{fields['dtype']}, {row.cache}, replicate {row.replicate})"
        if row.bound_by == "memory":
            name, unit, before = "read", "GB/s", self.bandwidth
            raised = replace(self, read_gb_per_s=factor * before)
        else:
            name, unit = self._rate(str(fields["dtype"])), "TFLOP/s"
            before = self.matrix_tflops[name]
            rates = {**self.matrix_tflops, name: factor * before}
            raised = replace(self, matrix_tflops=rates)
        line = f"{name} raised from {before:.6g} to {factor * before:.6g} {unit} by {who}"
        return replace(raised, by={**self.by, name: who}), line


def check_bound(row: Row, time_us: float) -> Row:
    """Compare a median with its row's bound (see LIGHT); a reference row raises the ceiling."""
    if row.bound_us is None:
        return row
    actual = f"{time_us:.2f} µs, but {row.bound_by} allows at least {row.bound_us:.2f} µs"
    if row.reference:
        if time_us >= row.bound_us:
            return row
        raises = row.bound_us / time_us
        return replace(row, detail=f"{actual}: this raises the ceiling", raises=raises)
    if time_us < LIGHT * row.bound_us:
        return replace(row, status=Status.FASTER_THAN_LIGHT, detail=actual)
    return row
