"""What is published can be read, says where it comes from, and is about the bits we draw today."""

import io
import json
import shutil
import subprocess
import sys
import tarfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsebench.harness.bench import operands
from sparsebench.harness.catalog import load_op
from sparsebench.harness.run.validation import validate
from sparsebench.reports.picture import picture
from sparsebench.results import files
from sparsebench.results.record import Problem
from sparsebench.results.run import bundle, store
from sparsebench.results.statistics.ratio import FEWEST
from sparsebench.results.tables.analysis import analyse
from tests.tools.marks import exhaustive, sampled
from tests.tools.paths import PUBLISHED, ROOT

RUNS = sorted(path.parent for path in PUBLISHED.rglob("run.json"))


NO_SOURCES = {"dlmc", "dlmc-csr", "trained"}  # they take files that the repository does not hold


SAMPLE = {"quick", "dlmc", "trained", "quick-cpu", "spense-ffn"}  # every kind of plan
MARKED = [path if path.name in SAMPLE else exhaustive(path) for path in RUNS]


def commit_of(environment: Mapping[str, Any]) -> str:
    """Return a run's commit; the next test shows that the code of `commits.json` is its code."""
    commits = json.loads((PUBLISHED / "commits.json").read_text())
    return str(environment["commit"] or commits[environment["code_sha256"]])


@pytest.mark.parametrize("path", MARKED, ids=lambda p: str(p.relative_to(PUBLISHED)))
def test_a_published_run_validates_and_names_its_commit(path: Path, tmp_path: Path) -> None:
    _, listed, *rest, plan = validate(path, data=tmp_path)
    assert f"SHA-256 {bundle.identity(path)}, as listed" in listed.text
    assert plan.checked == (path.name not in NO_SOURCES)
    state, environment = (files.from_json(path / name) for name in ("run.json", "environment.json"))
    assert state["contests"]["done"] == state["contests"]["of"]
    rows = bundle.content(path, bundle.ROWS).count(b'"reference":false')
    assert rows == sum(state["cases"].values())
    assert len(commit_of(environment)) == 40
    if path.parent.name == "nvidia-h200" and state["flags"]["replicates"] >= FEWEST:
        # No verdict has a tuned contender behind its default (results/tables/tuning_doubts.py).
        assert not [line.text for line in rest if line.text.startswith("warning: ")]


def named_code() -> set[tuple[str, str]]:
    facts = (json.loads((path / "environment.json").read_text()) for path in RUNS)
    return {(commit_of(each), each["code_sha256"]) for each in facts}


@pytest.mark.parametrize(("commit", "digest"), sampled(sorted(named_code()), -1))
def test_a_published_run_was_measured_by_the_code_of_its_commit(commit, digest, tmp_path) -> None:
    archive = ["git", "archive", commit, ".", ":!results/published"]  # of 11 times the bytes
    archived = subprocess.run(archive, cwd=ROOT, capture_output=True, check=False)
    if archived.returncode:
        pytest.skip("needs the history of a checkout: git fetch --unshallow")
    tree, package = tmp_path / "tree", tmp_path / "sparsebench"
    with tarfile.open(fileobj=io.BytesIO(archived.stdout)) as file:
        file.extractall(tree, filter="data")
    # Up to 0.2.0 the modules of the import package itself were in harness/_root.
    home = tree / "src/sparsebench" if (tree / "src").exists() else tree / "harness/_root"
    shutil.copytree(home, package)
    for folder in ("harness", "formats", "kernels", "results"):
        shutil.copytree(tree / folder, package / folder, dirs_exist_ok=True)
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from sparsebench.harness.machine import code; print(code.__file__, code.code_sha256())"
    )
    command = [sys.executable, "-P", "-S", "-c", program]  # -S: no installed sparsebench
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.split() == [f"{tmp_path}/sparsebench/harness/machine/code.py", digest]


def test_the_figure_of_the_readme_is_drawn_from_a_published_run(tmp_path: Path) -> None:
    run = store.read(PUBLISHED / "nvidia-h200" / "sparsity-4096")
    picture(analyse(run).cases, tmp_path / "speedup.svg")
    assert "128 × 128 blocks" in (tmp_path / "speedup.svg").read_text()


@pytest.mark.parametrize("most", [4, exhaustive(100)])
def test_a_cpu_draws_the_bits_that_every_gpu_drew(most: int) -> None:
    problems, digests = dict[str, Problem](), defaultdict[str, set[str]](set)
    for path in (path for path in RUNS if path.name == "quick"):
        for row in store.read(path).rows:
            if row.digest:
                problems[row.case.problem.id] = row.case.problem
                digests[row.case.problem.id].add(row.digest)
    assert len(digests) >= 8
    for problem in sorted(problems.values(), key=lambda each: each["m"] * each["n"])[:most]:
        drawn = operands.operands(problem, load_op(problem.op), torch.device("cpu"), None)
        assert {drawn.digest} == digests[problem.id]


def test_an_op_that_gains_a_field_keeps_the_ids_of_its_rows() -> None:
    fields = {"m": 4, "n": 64, "k": 64, "dtype": "bf16"}
    op = load_op("ffn")
    now = Problem("ffn", op.defaults | fields, 1, defaults=op.defaults)
    assert Problem.from_json(asdict(now)).id == now.id
    wider = op.defaults | {"bias": False}  # the op of some later commit
    assert Problem("ffn", wider | fields, 1, defaults=wider).id == now.id
    assert Problem("ffn", wider | fields | {"bias": True}, 1, defaults=wider).id != now.id
    assert Problem("ffn", wider | fields | {"skew": "zipf"}, 1, defaults=wider).id != now.id
