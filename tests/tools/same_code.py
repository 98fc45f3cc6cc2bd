"""Compare the machine code of the present kernels with that of published rows, on this GPU.

    python -P tests/tools/same_code.py results/published/nvidia-h200 [--kernel NAME] [--data DIR]

    published rows ─> a row per kernel and digest ─> operands, choice pinned ─> prepare ─> digest

Run it after a change that must leave device code as it is, on the kind of GPU and with the versions
of torch and Triton that measured the rows. Nothing is timed and no output is checked. It prints a
line per difference or failure, and then exits with 1. Rows that read a file need `--data`.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path

import torch

from sparsebench.errors import FormatError, SparsebenchError, SuiteError, Unsupported
from sparsebench.formats.dense import Dense
from sparsebench.harness.bench.contest_state import one_line
from sparsebench.harness.bench.operands import DenseOperands, operands
from sparsebench.harness.catalog import load_kernel, load_op, weights_format
from sparsebench.harness.ops._op import with_fields
from sparsebench.kernels._kernel import Operands, unsupported
from sparsebench.results.record import Row
from sparsebench.results.run import store

Prepare = Callable[[Row, DenseOperands], str | None]
Outcome = tuple[str, str]
"""The result for a row ("equal", "different", "failed" or why it has no digest), and a line."""


def published(folder: Path, kernel: str | None = None) -> list[Row]:
    """Return the cheapest row of each kernel and digest; prefer rows whose operands are drawn."""
    cheapest: dict[tuple[str, str], Row] = {}
    for file in sorted(folder.rglob("run.json")):
        for row in store.rows(file.parent):
            contender = row.case.contender
            if row.code and not contender.twin and kernel in (None, contender.kernel):
                key = contender.kernel, row.code
                cheapest[key] = min(
                    cheapest.get(key, row),
                    row,
                    key=lambda row: (row.case.problem.source is not None, row.dense_flops or 0.0),
                )
    return list(cheapest.values())


def digest(row: Row, dense: DenseOperands) -> str | None:
    """Prepare the row's case with its choice pinned, as a later process of a run does."""
    problem, contender = row.case.problem, row.case.contender
    op, kernel = load_op(problem.op), load_kernel(contender.kernel)
    packed = {
        name: weights_format(contender.format).from_dense(weight, **contender.params_of(name))
        for name, weight in dense.weights.items()
    }
    pattern = packed.pop(op.pattern) if op.pattern else None
    pattern = None if isinstance(pattern, Dense) else pattern
    definition = with_fields(op.definition, problem)
    pinned = Operands(problem, packed, dense.activations, definition, row.choice, pattern)
    if reason := unsupported(kernel, problem, pinned.device):
        raise Unsupported(reason)
    return kernel.prepare(pinned, **contender.options).code


def compare(row: Row, dense: DenseOperands, prepare: Prepare = digest) -> Outcome:
    """Compare the digest of a row with the one that `prepare` returns now."""
    contender, problem = row.case.contender, row.case.problem
    fields = " ".join(f"{name}={value}" for name, value in problem.fields.items())
    case = f"{contender.label} at {problem.op} {fields}"
    try:
        code = prepare(row, dense)
    except SuiteError:
        return f"{contender.kernel} was removed", case
    except (FormatError, Unsupported) as error:
        return "unsupported", f"{case}: {error}"
    except Exception as error:
        return "failed", f"{case}: {one_line(error)}"
    return ("equal", "") if code == row.code else ("different", f"{case}: {row.code}, now {code}")


def compare_all(rows: list[Row], device: str, data: Path | None) -> list[Outcome]:
    """Draw the operands of one problem, and compare all its rows."""
    problem = rows[0].case.problem
    try:
        dense = operands(problem, load_op(problem.op), torch.device(device), data)
    except SparsebenchError as error:
        return [("file not found" if problem.source else "failed", str(error))] * len(rows)
    return [compare(row, dense) for row in rows]


def result_of(task: "Future[list[Outcome]]", rows: int) -> list[Outcome]:
    """Return the outcomes of a task, or that all its rows failed, as when a process crashed."""
    error = task.exception()
    return [("failed", one_line(error))] * rows if error else task.result()


def report(outcomes: Iterable[Outcome], kernels: int) -> int:
    """Print differences, failures and the closing line; return the exit code."""
    counts: Counter[str] = Counter()
    for outcome, line in outcomes:
        counts[outcome] += 1
        if outcome in ("different", "failed", "unsupported"):
            print(f"{outcome}: {line}", flush=True)
    total, equal, different = counts.total(), counts.pop("equal", 0), counts.pop("different", 0)
    why = ", ".join(f"{reason}: {n}" for reason, n in sorted(counts.items())) or "none"
    print(
        f"{total} codes of {kernels} kernels: equal {equal}, different {different}, "
        f"not reproducible here {counts.total()} ({why})"
    )
    return 1 if different or counts["failed"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("published", type=Path, help="a folder with published runs")
    parser.add_argument("--kernel", help="compare the codes of this kernel alone")
    parser.add_argument("--device", default="cuda:0", help="the GPU (default cuda:0)")
    parser.add_argument("--data", type=Path, help="folder of the files that operands come from")
    parser.add_argument("--processes", type=int, default=4, help="that compile (default 4)")
    args = parser.parse_args()
    rows = sorted(published(args.published, args.kernel), key=lambda row: row.case.problem.id)
    problems = [list(same) for _, same in groupby(rows, key=lambda row: row.case.problem.id)]
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        tasks = {pool.submit(compare_all, s, args.device, args.data): len(s) for s in problems}
        outcomes = (o for task in as_completed(tasks) for o in result_of(task, tasks[task]))
        return report(outcomes, len({row.case.contender.kernel for row in rows}))


if __name__ == "__main__":
    sys.exit(main())
