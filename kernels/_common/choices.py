"""The store of choices: which kernel and configuration was the fastest for a product's sizes.

    $SPARSEBENCH_CHOICES, else $XDG_CACHE_HOME/sparsebench/choices             the user's cache
      └─ sm90_132-NVIDIA_H200-1f2e3d4c.choices     GPU, and a digest of the code of the engines
    kernels/tuned/sm90_132.choices                                             the package's list
    MODEL/sparsebench-sm90_132.choices                                         a checkpoint's file
           {"problem": {...}, "kernel": "bsr_strips", "config": {...}, "code": "sass:..."}

A search appends to the cache (operator.py), and `sparsebench tune` makes searches. The package's
list is made from published runs. It and a checkpoint's file, whose first line says what it was
made for, hold while the machine code is the one of the line. A line of
a kernel that the caller named has this kernel in its problem, so it is no choice of others.

`nearest` is the one rule for sizes that were not searched: the line of the same problem, apart from
sizes, whose m, n, k and density are within a factor of two and together the closest.

A process reads a file once, and appends its choices with one write each, so several processes may
search at once; the last line of a problem counts. A line that is damaged, or names a kernel or a
configuration that no longer exists, is skipped. If a file cannot be written, each process searches,
and warns once.
"""

import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from importlib.util import find_spec
from math import ceil, log2
from pathlib import Path
from typing import Any

import torch

from sparsebench._writing import cache_folder
from sparsebench.kernels._common.source_code import source

Choices = dict[str, dict[str, Any]]
"""Choices by problem (`key`)."""

LARGER = 2  # choices for more tokens that a search times
REACH = 1.0  # |log2| of a ratio of sizes, at most: a factor of 2
SIZES = "m", "n", "k", "density"
MOST = 2**53  # of a size, so that ratios of sizes are numbers
HEADER = "tuned"  # key of the first line of a checkpoint's file


def file_name(capability: tuple[int, int], multiprocessors: int) -> str:
    """Return the name of the package's list for a kind of GPU: sm90_132.choices."""
    return f"sm{capability[0]}{capability[1]}_{multiprocessors}.choices"


def package_file(device: torch.device) -> Path:
    gpu = torch.cuda.get_device_properties(device)
    name = file_name((gpu.major, gpu.minor), gpu.multi_processor_count)
    return package_folder() / name


def package_folder() -> Path:
    return Path(str(files("sparsebench.kernels"))) / "tuned"


def user_file(device: torch.device, engines: tuple[str, ...]) -> Path:
    gpu = torch.cuda.get_device_properties(device).name
    name = "".join(c if c.isalnum() else "_" for c in gpu)
    stem = f"{package_file(device).stem}-{name}-{code_of(engines)}"
    return cache_folder("choices", "SPARSEBENCH_CHOICES") / f"{stem}.choices"


@cache
def code_of(engines: tuple[str, ...]) -> str:
    """Return a digest of the code of kernels and of the compilers' versions."""
    versions = [version(name) for name in ("torch", "triton") if find_spec(name)]
    parts = [source(name) for name in engines] + versions
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@cache
def package(device: torch.device) -> Choices:
    """Return the package's choices for this kind of GPU, made with any code of the kernels."""
    return read(package_file(device))


def package_summary(device: torch.device) -> dict[str, Any] | None:
    """Return file, digest and number of lines of the package's list, which a run records."""
    if device.type != "cuda" or not (file := package_file(device)).exists():
        return None
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return {"file": file.name, "sha256": digest, "choices": len(package(device))}


def density_of(n: int, k: int, block: tuple[int, int], stored: int) -> float:
    """Return stored blocks over all blocks, in two digits."""
    return float(f"{max(stored, 1) / (ceil(n / block[0]) * ceil(k / block[1])):.2g}")


_FILES: dict[Path, Choices] = {}
"""The choices of each file by problem, read once."""


def read(file: Path) -> Choices:
    """Return the choices of a file by problem, as they were when this process read it first."""
    if file not in _FILES:
        _FILES[file] = parse(file)
    return _FILES[file]


def parse(file: Path) -> Choices:
    """Return the choices of a file by problem; none if it cannot be read."""
    choices: Choices = {}
    try:
        text = file.read_text("utf-8", errors="replace")
    except FileNotFoundError:
        text = ""
    except OSError as error:
        _warn(f"{file}: choices are not read: {error}")
        text = ""
    for line in text.splitlines():
        try:
            if HEADER in (written := json.loads(line)):
                continue
            code = {"code": written["code"]} if "code" in written else {}
            choice = {"kernel": written["kernel"], **written["config"], **code}
            problem = dict(written["problem"])
            if not all(0 <= problem[size] <= MOST for size in SIZES):
                raise ValueError
            choices[key(problem)] = choice
        except (ValueError, KeyError, TypeError, RecursionError):
            _warn(f"{file}: a line that is no choice is skipped: {line[:60]!r}")
    return choices


_PROCESS_CHOICES: dict[Path, Choices] = {}


def process_choices(file: Path) -> Choices:
    """Return the choices that this process has appended to a file, by problem."""
    return _PROCESS_CHOICES.setdefault(file, {})


def append(file: Path, problem: Mapping[str, Any], choice: Mapping[str, Any]) -> None:
    """Keep a choice in this process, and in the file if it can be written."""
    read(file)[key(problem)] = process_choices(file)[key(problem)] = dict(choice)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "a", encoding="utf-8") as end:
            end.write(line(problem, choice) + "\n")
    except OSError as error:
        _warn(f"{file}: choices are not kept, so every process searches: {error}")


def line(problem: Mapping[str, Any], choice: Mapping[str, Any], code: str | None = None) -> str:
    """Return the line of a choice; with a code, it holds while the machine code is this one."""
    config = {name: value for name, value in choice.items() if name != "kernel"}
    fields = {"problem": dict(problem), "kernel": choice["kernel"], "config": config}
    return json.dumps(fields | ({"code": code} if code else {}))


_CHECKPOINTS: Choices = {}


def of_checkpoints() -> Choices:
    """Return the choices that checkpoints brought, those of the last one first."""
    return _CHECKPOINTS


def add(choices: Choices) -> None:
    """Take the choices of a checkpoint before all others."""
    _CHECKPOINTS.update(choices)


def key(problem: Mapping[str, Any]) -> str:
    return json.dumps(dict(problem), sort_keys=True)


def larger(
    problem: Mapping[str, Any], choices: Iterable[tuple[str, dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the choices for the next larger numbers of tokens, at most LARGER.

    A search times them, so that fewer tokens do not take longer than more.
    """
    by_tokens: dict[int, dict[str, Any]] = {}
    for text, choice in choices:
        other = json.loads(text)
        if other.get("m", 0) > problem["m"] and other == {**problem, "m": other["m"]}:
            by_tokens.setdefault(other["m"], choice)
    return [by_tokens[m] for m in sorted(by_tokens)[:LARGER]]


def nearest(
    problem: Mapping[str, Any], choices: Iterable[tuple[str, dict[str, Any]]]
) -> dict[str, Any] | None:
    """Return the choice of the problem nearest in size, each within a factor of two, or None."""
    best, least = None, float("inf")
    rest = {name: value for name, value in problem.items() if name not in SIZES}
    for text, choice in choices:
        other = json.loads(text)
        if {name: value for name, value in other.items() if name not in SIZES} != rest:
            continue
        apart = [abs(log2(max(other[s], 1e-6) / max(problem[s], 1e-6))) for s in SIZES]
        if max(apart) <= REACH and sum(apart) < least:
            best, least = choice, sum(apart)
    return best


_WARNINGS: set[str] = set()


def _warn(message: str) -> None:
    if message not in _WARNINGS:
        _WARNINGS.add(message)
        warnings.warn(message, stacklevel=3)
