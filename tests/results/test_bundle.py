"""Bundles: sealed, moved, compressed, with damaged files. Rows are made up; nothing is measured."""

import gzip
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from sparsebench.errors import ResultError, SuiteError
from sparsebench.harness.commands._console import UNCHECKED
from sparsebench.harness.plan.suite import expand
from sparsebench.harness.run.validation import validate
from sparsebench.results.record import OLDER_ROWS, ROWS_SCHEMA
from sparsebench.results.run import bundle, store
from sparsebench.results.tables.analysis import analyse
from tests.results.bundle_examples import (
    FLAGS,
    STATE,
    SUITE,
    complaint,
    lines,
    rows,
    sealed,
)
from tests.tools.command_line import sparsebench
from tests.tools.paths import PUBLISHED


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return sealed(tmp_path)


def test_a_sealed_run_passes_every_check(run: Path) -> None:
    checks = [line.partition(": ")[::2] for line in lines(run)]
    counts = {"rows": 32, "replicates": 2, "A/A pairs": 7, "samples": 160, "errors": 32}
    counts |= {"draws": 14, "operands": 7, "sample counts": 32, "plan": 6}  # a CPU has no limit
    assert [name for name, _ in checks] == ["files", "bundle", *counts]
    assert {name: int(text.split()[0].strip(",")) for name, text in checks[2:]} == counts


def test_the_pairs_of_the_suite_are_counted_as_in_the_report() -> None:
    quick = PUBLISHED / "nvidia-h200" / "quick"
    (line,) = (line.text for line in validate(quick) if line.text.startswith("A/A pairs"))
    pairs = len(analyse(store.read(quick)).noise.pairs)
    assert line.startswith(f"A/A pairs: {pairs} in each")


def test_a_selection_of_a_suite_is_named(run: Path) -> None:
    store.replace_rows(run, rows(run / "suite.yaml", only="m=4"))
    store.set_state(run, STATE | {"flags": FLAGS | {"only": "m=4"}})
    bundle.seal(run)
    assert lines(run)[-1].startswith("plan: 4 rows")
    assert "--only 'm=4'" in lines(run)[-1]


def test_a_bundle_that_is_compressed_and_moved_keeps_its_name(run: Path, tmp_path: Path) -> None:
    name, plain = bundle.identity(run), run / "rows.jsonl"
    (run / "rows.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes(), 9))
    plain.unlink()
    assert len(lines(run)) == 11
    bundle.seal(run)
    moved = Path(shutil.move(run, tmp_path / "elsewhere"))
    assert len(lines(moved)) == 11
    assert bundle.identity(moved) == name


def test_reports_and_logs_are_no_evidence(run: Path) -> None:
    (run / "report.html").write_text("written again")
    (run / "worker.log").write_text("chatter")
    assert len(lines(run)) == 11


def test_the_lock_can_be_installed_and_leaves_us_out() -> None:
    pins = [line for line in bundle.lock().splitlines() if line[0] not in "#-"]
    named = {Requirement(pin).name: Requirement(pin).specifier for pin in pins}
    assert all(str(version).startswith("==") for version in named.values())
    assert {"torch", "numpy", "pytest"} <= named.keys()
    assert "sparsebench" not in named
    assert list(named) == sorted(named)


@pytest.mark.parametrize("name", sorted(bundle.REQUIRED))
def test_a_changed_or_missing_file_is_named(name: str, run: Path) -> None:
    content = bytearray((run / name).read_bytes())
    content[len(content) // 2] ^= 1
    (run / name).write_bytes(content)
    assert complaint(run).startswith(f"/{name}: expected SHA-256 ")
    (run / name).unlink()
    assert complaint(run).startswith(f"/{name}: expected a readable file")


def test_rows_of_an_older_schema_stay_valid_and_of_a_newer_one_are_refused(run: Path) -> None:
    text = (run / "rows.jsonl").read_text()
    for schema in OLDER_ROWS:
        (run / "rows.jsonl").write_text(text.replace(ROWS_SCHEMA, schema))
        bundle.seal(run)
        assert len(lines(run)) == 11
    (run / "rows.jsonl").write_text(text.replace(ROWS_SCHEMA, "sparsebench/rows@99"))
    bundle.seal(run)
    assert complaint(run).endswith('found {"schema": "sparsebench/rows@99"}')


def edited(name: str, old: str, new: str) -> Callable[[Path], None]:
    """Return a function that replaces the first `old` in a file of a run and seals it again."""

    def change(run: Path) -> None:
        text = (run / name).read_text()
        assert old in text
        (run / name).write_text(text.replace(old, new, 1))
        bundle.seal(run)

    return change


def with_state(**changes: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        store.set_state(run, {**STATE, **changes})
        bundle.seal(run)

    return change


def killed(run: Path) -> None:
    store.set_state(run, STATE | {"status": "running"})
    bundle.unseal(run)


def with_manifest(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    """Return a function that changes the files that a manifest names, and their digests."""

    def changed(run: Path) -> None:
        manifest = json.loads((run / "manifest.json").read_text())
        change(manifest["files"])
        (run / "manifest.json").write_text(json.dumps(manifest))

    return changed


def torn(run: Path) -> None:
    with (run / "rows.jsonl").open("a") as file:
        file.write('{"case": {')
    bundle.seal(run)


def bomb(run: Path) -> None:
    """Write 130 MiB of zeros as members of a gzip file, one after the other."""
    (run / "rows.jsonl").unlink()
    (run / "rows.jsonl.gz").write_bytes(gzip.compress(bytes(2**20)) * 130)


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no seal": (bundle.unseal, ": expected manifest.json"),
    "a run that was killed": (killed, "sparsebench run --resume"),
    "a torn last line": (torn, 'found a torn last line {"case": {'),
    "another folder": (with_manifest(lambda f: f.update({"../a": "0"})), "found ../a"),
    "an absolute path": (with_manifest(lambda f: f.update({"/etc/a": "0"})), "found /etc/a"),
    "no rows": (with_manifest(lambda f: f.pop("rows.jsonl")), "expected rows.jsonl"),
    "a row without a field": (edited("rows.jsonl", '"digest":', '"digset":'), "line 2: "),
    "a smaller suite": (edited("suite.yaml", "m: [4, 8]", "m: [4]"), "found a row"),
    "a run that was stopped": (with_state(status="interrupted"), "found interrupted with 32 rows"),
    "a key twice in rows": (
        edited("rows.jsonl", '"status"', '"status":"ok","status"'),
        "each key once",
    ),
    "a key twice in state": (edited("run.json", '"suite"', '"suite": "a", "suite"'), "each key"),
    "130 MiB of rows": (bomb, "ROWS_BYTES"),
    **{
        f"a run of {state}": (with_state(**state), message)
        for state, message in (
            ({"started": "2999-01-01T00:00:00+00:00"}, "expected started from 2024 to now"),
            ({"started": "2023-12-31T23:00:00+00:00"}, "expected started from 2024 to now"),
            ({"started": "yesterday"}, "expected started as a date, found yesterday"),
            ({"started": "2026-01-01T00:00:00", "seconds": 9e8}, "expected an end before now"),
            ({"started": "2026-01-01T00:00:00", "wall_s": 9e8}, "expected an end before now"),
            ({"seconds": -5}, "seconds: expected greater than or equal to 0; found -5"),
            ({"seconds": nan}, "seconds: expected a finite number"),
            ({"spent_s": {"timing": -1}}, "spent_s.timing: expected greater"),
            ({"contests": {"done": -1}}, "contests.done: expected greater"),
            ({"fitness": None}, "fitness: expected"),
            ({"fitness": {"during": [{"level": "ok"}]}}, "fitness.during.0: expected"),
            ({"fitness": {"later": []}}, "fitness.later"),
        )
    },
    "a billion processes": (
        with_state(flags=FLAGS | {"replicates": 10**9}),
        "replicates: expected",
    ),
}


@pytest.mark.parametrize("damage", FILES)
def test_a_damaged_bundle_is_refused_in_one_line(damage: str, run: Path) -> None:
    change, token = FILES[damage]
    change(run)
    assert token in complaint(run)


GRAPH = "2, 4, 3\n0 2 3\n0 3 1\n"
CHANGED = "2, 4, 3\n0 2 3\n0 3 2\n"


def test_sources_are_those_of_the_run_in_the_folder_that_the_reader_names(run, tmp_path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.smtx").write_text(GRAPH)
    (run / "suite.yaml").write_text(
        SUITE.replace("m: [4, 8], n: 32, k: 64", "m: 4, source: {file: '*.smtx'}")
        .replace("blocks, block: 8, sparsity: 0.5", "file")
    )  # fmt: skip
    store.set_state(run, {**STATE, "flags": {**FLAGS, "data": str(data)}})
    store.replace_rows(run, rows(run / "suite.yaml", data))
    bundle.seal(run)
    assert lines(run, data)[-1].startswith("plan: 4 rows")
    *_, plan = validate(run)
    assert not plan.checked
    assert "expected --data DIR, the folder of *.smtx" in plan.text
    (data / "a.smtx").write_text(CHANGED)
    assert "expected a.smtx with SHA-256 " in lines(run, data)[-1]
    (data / "a.smtx").write_text(GRAPH)
    (data / "b.smtx").write_text(CHANGED)
    assert "found b.smtx" in lines(run, data)[-1]
    for glob in ("/etc/*", "../*", "a/../../*"):
        with pytest.raises(SuiteError, match="expected a GLOB of files below --data"):
            expand("s", (run / "suite.yaml").read_text().replace("*.smtx", glob), tmp_path)


@pytest.mark.parametrize("name", ["lock.txt", "rows.jsonl", "rows.jsonl.gz", "manifest.json"])
def test_a_link_out_of_a_run_is_refused(name: str, run: Path, tmp_path: Path) -> None:
    if name.endswith(".gz"):
        (run / name).write_bytes(gzip.compress((run / "rows.jsonl").read_bytes()))
        (run / "rows.jsonl").unlink()
    (run / name).rename(tmp_path / name)
    (run / name).symlink_to(tmp_path / name)
    (tmp_path / "to").mkdir()
    assert complaint(run).startswith(f"/{name}: expected a file of the run, found a link out of it")
    with pytest.raises(ResultError, match="a link out of it"):
        bundle.redact(run, tmp_path / "to")
    assert not list((tmp_path / "to").iterdir())


def test_a_link_within_a_run_is_a_file_of_it(run: Path) -> None:
    (run / "lock.txt").rename(run / "lock-here.txt")
    (run / "lock.txt").symlink_to("lock-here.txt")
    bundle.seal(run)
    assert lines(run)


HUGE = str(10**400)
INTEGERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a row": (edited("rows.jsonl", '"nnz":null', f'"nnz":{HUGE}'), "line 2: .*found nnz, "),
    "a float of a row": (edited("rows.jsonl", '"flops":null', f'"flops":{2**63}'), "found flops, "),
    "a field": (edited("rows.jsonl", '"m":', f'"x":-{2**64},"m":'), r"case\.problem\.fields\.x, "),
    "a list": (edited("rows.jsonl", '"draws":[', f'"draws":[{2**63},'), r"found draws\.0, "),
    "a choice": (edited("rows.jsonl", '"choice":{', f'"choice":{{"a":[{HUGE}]'), r"choice\.a\.0, "),
    "the state": (edited("run.json", '"replicates": 2', f'"replicates": {HUGE}'), r"flags\.repl"),
    "the environment": (
        edited("environment.json", '"gpu": null', f'"gpu": {{"l2_bytes": {HUGE}}}'),
        r"gpu\.l2_bytes, ",
    ),
    "a suite": (edited("suite.yaml", "n: 32", f"n: {10**30}"), "line .*of at most 64 bits"),
    "the manifest": (
        with_manifest(lambda entries: entries.update({"a": 10**400})),  # type: ignore[dict-item]
        r"found files\.a, ",
    ),
}


@pytest.mark.parametrize("place", INTEGERS)
def test_an_integer_beyond_64_bits_is_named_by_every_reader(place: str, run: Path) -> None:
    change, message = INTEGERS[place]
    change(run)
    assert re.search(message, text := complaint(run))
    assert len(text) < 250
    if place != "the manifest":
        with pytest.raises(ResultError, match=message):
            store.read(run)


@pytest.mark.parametrize("digits", [2**63 - 1, -(2**63), 0])
def test_an_integer_of_64_bits_is_read(digits: int, run: Path) -> None:
    edited("rows.jsonl", '"nnz":null', f'"nnz":{digits}')(run)
    assert store.rows(run)[0].nnz == digits


@pytest.mark.parametrize(("key", "most"), [("title", 200), ("description", 4000)])
def test_a_text_of_a_suite_has_a_limit(key: str, most: int, run: Path) -> None:
    text = SUITE.replace("title: small", f"title: small\ndescription: {'a' * 10}")
    long = re.sub(f"{key}: .*", f"{key}: {'a' * (most + 1)}", text)
    expected = f"{key}: expected at most {most} characters; found 'aaa"
    (run / "suite.yaml").write_text(long)
    with pytest.raises(ResultError, match=expected):
        store.read(run)
    with pytest.raises(SuiteError, match=expected):
        expand("s", long)
    assert expand("s", long.replace("aa", "a", 1)).text


def test_a_published_digest_tells_a_bundle_that_was_sealed_anew(run: Path, tmp_path: Path) -> None:
    home = tmp_path / "published" / "gpu" / "small"
    home.parent.mkdir(parents=True)
    shutil.copytree(run, home)
    page = tmp_path / "published" / "README.md"
    page.write_text(f"```\n{bundle.identity(home)}  gpu/small/manifest.json\n```\n")
    assert "as listed in README.md" in lines(home)[1]
    store.replace_rows(home, [replace(row, error=2e-7) for row in store.rows(home)])
    bundle.seal(home)
    assert "expected a manifest with SHA-256 " in complaint(home)


def test_a_stranger_s_bundle_runs_none_of_its_code(run, tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    mark = tmp_path / "it ran"
    code = f"import pathlib\npathlib.Path({str(mark)!r}).write_text('')\nraise SystemExit(0)\n"
    (tmp_path / "somebody_elses.py").write_text(code)
    suite = (run / "suite.yaml").read_text()
    for name in ("somebody_elses.kernel", "os.path"):
        (run / "suite.yaml").write_text(suite.replace("scipy_csr", name))
        bundle.seal(run)
        done = sparsebench("validate", run)
        assert done.returncode == UNCHECKED
        assert "plan: not checked" in done.stdout
        assert not mark.exists()
    (run / "suite.yaml").write_text(suite.replace("scipy_csr", "somebody_elses.kernel"))
    bundle.seal(run)
    done = sparsebench("validate", run, "--allow-plugins")
    assert mark.exists()
    assert done.returncode == UNCHECKED
    assert "found SystemExit: 0" in done.stdout
