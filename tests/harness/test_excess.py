"""Strange options and excessive suites: one clear line, and nothing is written."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools.command_line import refusal

SUITE = """
schema: sparsebench/suite@1
title: small
problems:
  - {op: linear, m: [4, 8], n: 32, k: 64, dtype: fp32, pattern: blocks, block: 8, sparsity: 0.5,
     seed: [0, 1]}
contenders:
  - {format: csr, kernel: scipy_csr, options: {}}
baselines:
  - {format: dense, kernel: torch_dense}
"""
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
