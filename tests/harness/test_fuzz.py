"""Mutated suites, bundles, patterns, weights and options: one clear line, and a documented code.

A command ends with 0, 2 (bad input), 3 (a case failed) or 5 (not checked); 70 is a defect of ours.
"""

import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparsebench.harness.plan.selection import planned_contests
from sparsebench.harness.plan.suite import expand
from sparsebench.results.run import bundle, store
from tests.tools.command_line import refusal, sparsebench
from tests.tools.rows import right_rows

SUITE = """
schema: sparsebench/suite@1
title: small
description: of three lines
problems:
  - {op: linear, m: [4, 8], shape: {n: 32, k: 64}, dtype: fp32, pattern: blocks, block: 8,
     sparsity: 0.5, seed: [0, 1]}
  - {op: ffn, m: 4, n: 64, k: 64, dtype: fp32, activation: relu, active: 4}
contenders:
  - {format: bsr, kernel: scipy_bsr, params: {block: [$block, 4]}, op: linear}
  - {format: csr, kernel: scipy_csr, options: {}, op: linear}
baselines:
  - {format: dense, kernel: torch_dense}
scopes: [kernel]
caches: [cold, hot]
"""
FLAGS = {"device": "cpu", "data": None, "timeout_s": 60.0, "replicates": 2, "only": ""}
STATE = {"suite": "small", "status": "finished", "flags": FLAGS, "seconds": 1.0}
STRANGE: list[Any] = [
    *(None, True, -1, 0, 1, 2**31, 10**40, -0.5, 0.5, 1e300, float("nan"), float("inf")),
    *("", "x", "$", "$nothing", "..", "/etc/passwd", "é\u202e", "=1+1", r"$\frac{$", "a.b"),
    *([], [[]], {}, [None], [1, 2, 3], {"a": {"b": []}}, list(range(3000)), "x" * 5000),
]
QUICK = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def places(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to every value inside, and to the whole."""
    yield at
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from places(value, (*at, key))


def mutated(data: Any, draw: random.Random) -> Any:
    """Return data in which one thing is replaced, removed, added or nested."""
    changed = [copy.deepcopy(data)]
    *way, last = (0, *draw.choice([*places(data)]))
    inner: Any = changed
    for key in way:
        inner = inner[key]
    match draw.choice(["replace", "replace", "remove", "add", "nest"]):
        case "remove" if len(way):
            del inner[last]
        case "add" if isinstance(inner, dict):
            inner[draw.choice(["x", "", "op", "seed", "source", 3])] = draw.choice(STRANGE)
        case "nest":
            inner[last] = [inner[last]]
        case _:
            inner[last] = draw.choice(STRANGE)
    return changed[0]


def ends_well(*command: object, codes: tuple[int, ...] = (0, 2)) -> None:
    done = sparsebench(*command)
    assert done.returncode in codes, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    if done.returncode == 2:
        assert done.stderr.startswith(("error: ", "Usage: ")), done.stderr
        assert done.stderr.startswith("Usage: ") or done.stderr.count("\n") == 1, done.stderr


def torn(text: str, draw: random.Random) -> str:
    """Return a text in which a few characters are others, or are gone."""
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(text) or 1)
        other = draw.choice(["", "\0", "{", "[", "'", ": ", "&a ", "*a", "9"])
        text = text[:at] + other + text[at + 1 :]
    return text


@QUICK
@given(st.integers(0, 2**32))
def test_a_mutated_suite(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    written = yaml.safe_dump(mutated(yaml.safe_load(SUITE), draw))
    path = tmp_path / "mutated.yaml"
    path.write_text(torn(SUITE, draw) if seed % 4 == 0 else written)
    ends_well("check", path, "--device", "cpu")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a small bundle."""
    path = tmp_path_factory.mktemp("fuzz") / "small"
    environment = {"cpu": {"name": "a CPU"}, "gpu": None, "versions": {"torch": "2"}, "commit": "0"}
    store.create(path, SUITE, environment, STATE)
    rows = right_rows(planned_contests(expand("small", SUITE), "cpu"))
    store.append(path, rows)
    bundle.seal(path)
    return path


def broken(files: dict[str, str], draw: random.Random) -> dict[str, str]:
    """Return the files of a bundle, one of them changed."""
    name = draw.choice(["rows.jsonl", "rows.jsonl", "run.json", "environment.json", "suite.yaml"])
    text = files[name]
    if name == "suite.yaml":
        text = yaml.safe_dump(mutated(yaml.safe_load(text), draw))
    elif draw.random() < 0.2:
        text = torn(text, draw)
    elif name == "rows.jsonl":
        lines = text.splitlines()
        at = draw.randrange(len(lines))
        lines[at] = json.dumps(mutated(json.loads(lines[at]), draw))
        text = "\n".join(lines) + "\n"
    else:
        text = json.dumps(mutated(json.loads(text), draw))
    return files | {name: text}


@QUICK
@given(st.integers(0, 2**32))
def test_a_mutated_bundle_sealed_anew(tmp_path: Path, whole: Path, seed: int) -> None:
    draw, path = random.Random(seed), tmp_path / "small"
    path.mkdir(exist_ok=True)
    files = {file.name: file.read_text() for file in whole.iterdir()}
    for name, text in broken(files, draw).items():
        (path / name).write_text(text)
    with patch.object(bundle, "lock", lambda: "# no packages\n"):  # the real one takes 0.5 s
        bundle.seal(path)
    ends_well("validate", path, codes=(0, 2, 5))
    if seed % 6 == 0:
        ends_well("compare", path, path, "--json")
    elif seed % 30 == 1:
        ends_well("report", path, "--out", tmp_path / "r.html", "--csv", tmp_path / "r.csv")


OPTIONS: dict[str, list[object]] = {
    "--device": ["cpu:3", "cuda:99999", "cuda:256", "simulated", "meta", "", "\udcff"],
    "--only": ["=", "m", "m=", "m=4|", "block=[4]", "m=nan", "case=0", "x=1,", "m=4 m=8"],
    "--replicates": [0, -1, 10**9, "1.5", "x"],
    "--timeout": ["inf", "nan", "-inf", 0, "1e400"],
    "--data": ["/nowhere", "", "/dev/null", "\udcff"],
    "--out": ["/dev/null/x", "\udcff", "x" * 300, "/dev/null"],
}


@pytest.mark.parametrize(("option", "value"), [(o, v) for o in OPTIONS for v in OPTIONS[o]])
def test_a_strange_option(tmp_path: Path, option: str, value: object) -> None:
    suite = tmp_path / "s.yaml"
    suite.write_text(SUITE)
    device = [] if option == "--device" else ["--device", "cpu"]
    command = ["run", suite, *device, option, value]
    refusal(*command, *([] if option == "--out" else ["--out", "/dev/null/run"]))
    assert [*tmp_path.iterdir()] == [suite]


LARGE: dict[str, Callable[[], str]] = {
    "a sweep of 10^12": lambda: SUITE.replace("m: [4, 8]", f"m: {list(range(1, 5001))}").replace(
        "seed: [0, 1]", f"seed: {list(range(5000))}"
    ),
    "20,000 keys": lambda: SUITE + "".join(f"k{i}: 1\n" for i in range(20_000)),
    "an alias bomb": lambda: (
        "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
        + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    ),
    "a contender of 10^8 points": lambda: SUITE.replace(
        "options: {}", f"options: {{a: {list(range(9999))}, b: {list(range(9999))}}}"
    ),
    "10,000 levels": lambda: "a: " + "[" * 10_000,
    "a megabyte": lambda: "#" * 2**20 + SUITE,
}


@pytest.mark.parametrize("name", LARGE)
def test_excessive_requests_are_refused_by_a_named_limit(tmp_path: Path, name: str) -> None:
    suite = tmp_path / "large.yaml"
    suite.write_text(LARGE[name]())
    line = refusal("check", suite, "--device", "cpu")
    assert name == "20,000 keys" or re.search(r"\([A-Z_]+\)", line)
