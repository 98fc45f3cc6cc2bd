"""The commands that measure a case again, as functions of a line of its run.

    sparsebench run sparsity --only "m=4096 n=4096 block=128 sparsity=0.9"     all its contenders
    sparsebench try bsr_wgmma m=4096 n=4096 k=4096 dtype=bf16 block=128 ...    one of them

A run names the suite of the package if it has that name, else the suite.yaml of the run. If a run
is of a part of its suite, every field is named, since the suite may hold more values of it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from sparsebench._discovery import documents, package_names
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


def again_command(run: StoredRun, cases: pd.DataFrame) -> Callable[[Mapping[Any, Any]], str]:
    """Return a function that writes the command for all contenders of the problem of a case."""
    suite, names = suite_name(run), selected_fields(run, cases)

    def command(case: Mapping[Any, Any]) -> str:
        words = _words(case, names)
        if not pd.isna(case["source"]):
            words = [f"case={case['case_id']}"]  # a pattern from a file has no field that names it
        only = f' --only "{" ".join(words)}"' if words else ""
        return f"sparsebench run {suite}{only}"

    return command


def try_command(case: Mapping[Any, Any], names: Sequence[str]) -> str:
    """Return the command for one contender, "" for a pattern from a file.

    It names the kernel that `default` chose, unless that is several or a dense one. `names` are
    the fields of problems.
    """
    if not pd.isna(case["source"]):
        return ""
    form, _, contender = str(case["label"]).partition("/")
    kernel, *options = contender.split()
    if kernel == "default":
        chosen = json.loads(case["choice"] or "{}").get("kernel", kernel)
        kernel = kernel if chosen == "dense" else chosen
    elif kernel not in package_names("kernels") and ":" not in kernel:
        kernel = "default"  # removed, or of another distribution; the layers choose another
    several = kernel == "default" or _has_value(case.get("layers"))  # kernels of models, too
    stored = [f"format={form}"] * several
    named = _words(case, ["op", *names])
    options = [word for word in options if "=" in word and word not in named]
    return " ".join(["sparsebench try", kernel, *stored, *named, *options])


def field_values(case: Mapping[Any, Any], names: Sequence[str]) -> dict[str, str]:
    """Return the fields of a problem that have a value, as commands name them."""
    return {n: _text(case[n]) for n in names if _has_value(case[n])}


def _words(case: Mapping[Any, Any], names: Sequence[str]) -> list[str]:
    return [f"{name}={value}" for name, value in field_values(case, names).items()]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "x".join(map(str, value))
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _has_value(value: Any) -> bool:
    return isinstance(value, list) or (not pd.isna(value) and value != "")
