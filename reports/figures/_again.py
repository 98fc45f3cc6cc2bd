"""The commands that measure a case again.

    sparsebench run sparsity --only "m=4096 n=4096 block=128 sparsity=0.9"     all its contenders
    sparsebench try bsr_wgmma m=4096 n=4096 k=4096 dtype=bf16 block=128 ...    one of them

A run names the suite of the package if it has that name, else the suite.yaml of the run. If a run
is of a part of its suite, every field is named, since the suite may hold more values of it.
"""

from typing import Any

import pandas as pd

from sparsebench._discovery import documents
from sparsebench.results.formatting import plain
from sparsebench.results.run.store import StoredRun
from sparsebench.results.tables.frame import fields


def suite_name(run: StoredRun) -> str:
    """Return the argument of `sparsebench run` for the suite of a run."""
    name = str(run.state.get("suite", ""))
    return name if name in documents("suites") else "suite.yaml"


def selected_fields(run: StoredRun, cases: pd.DataFrame) -> list[str]:
    """Return the fields that select a problem of a run from its suite."""
    named = ["op", *fields(cases)]
    part = bool(run.state.get("flags", {}).get("only"))
    return [n for n in named if (part and n != "op") or cases[n].nunique(dropna=False) > 1]


def again_command(run: StoredRun, cases: pd.DataFrame, case_id: str) -> str:
    """Return the command that measures the problem of a case again, with all its contenders."""
    case = cases[cases.case_id == case_id].iloc[0]
    words = [f"{n}={plain(case[n])}" for n in selected_fields(run, cases) if _has_value(case[n])]
    if not pd.isna(case.source):
        words = [f"case={case_id}"]  # a pattern from a file has no field that names it
    only = f' --only "{" ".join(words)}"' if words else ""
    return f"sparsebench run {suite_name(run)}{only}"


def _has_value(value: Any) -> bool:
    return not pd.isna(value) and bool(value != "")
