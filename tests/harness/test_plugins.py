"""Other people's formats and kernels: installed, named in a suite, measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import TESTS

PACKAGE = TESTS / "thirdparty"
SUITE = """
schema: sparsebench/suite@1
title: somebody else's
problems:
  - {op: linear, m: 8, n: 64, k: 64, dtype: fp32, pattern: banded, block: 1, sparsity: 0.984375}
contenders:
  - {format: diagonal, kernel: diagonal_torch}
  - {format: diagonal, kernel: sparsebench_example.diagonal_torch}
baselines:
  - {format: dense, kernel: torch_dense}
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Install the package into a folder of its own; return the environment that sees it."""
    target = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / "package"
    subprocess.run(["cp", "-r", PACKAGE, source], check=True)
    pip = [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--no-deps", "--target", target]
    subprocess.run([*pip, "--no-build-isolation", source], check=True, stderr=subprocess.DEVNULL)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(target), os.environ["PYTHONPATH"]])}


def sparsebench(environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-P", "-m", "sparsebench", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_installed_package_is_listed(installed: dict[str, str]) -> None:
    found = json.loads(sparsebench(installed, "list", "--json"))
    assert found["formats"]["diagonal"] == "A matrix of its main diagonal alone."
    assert found["kernels"]["diagonal_torch"] == "Diagonal product by broadcasting."


def test_an_installed_package_competes(installed: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "suite.yaml"
    path.write_text(SUITE)
    flags = "--device", "cpu", "--replicates", "1", "--out", str(tmp_path / "run")
    said = sparsebench(installed, "run", str(path), *flags, "--json")
    assert json.loads(said)["cases"] == {"ok": 3}
