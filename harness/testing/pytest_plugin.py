"""pytest: `pytest SUITE.yaml --benchmark-only` collects a suite's cases as benchmarks.

Every pytest session of an environment imports this file. So it imports nothing: torch and the rest
of the package (_pytest_nodes.py) come when a suite is collected.
"""

import re
from pathlib import Path

import pytest

OURS = re.compile(rb"^(schema:\s*['\"]?sparsebench/suite@|contenders:)", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options --device, --data and --only of `sparsebench run`."""
    group = parser.getgroup("sparsebench", "sparsebench: pytest SUITE.yaml --benchmark-only")
    group.addoption(
        "--sparsebench-device",
        metavar="NAME",
        help="cpu, cuda or cuda:N; default: the best there is.",
    )
    group.addoption(
        "--sparsebench-data",
        metavar="DIR",
        type=Path,
        help="Folder that a suite's source files are in.",
    )
    group.addoption(
        "--sparsebench-only",
        metavar="WHAT",
        default="",
        help="Measure less: 'block=64 sparsity=0.8|0.9'.",
    )


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect a YAML file that was named on the command line and is a suite of any version."""
    named = file_path.suffix in (".yaml", ".yml") and parent.session.isinitpath(file_path)
    if not named or not OURS.search(file_path.read_bytes()):
        return None
    from sparsebench.harness.testing._pytest_nodes import SuiteFile

    return SuiteFile.from_parent(parent, path=file_path)
