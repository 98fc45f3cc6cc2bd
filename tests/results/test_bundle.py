"""Bundles: sealed, moved, compressed, damaged. Rows are made up; nothing is measured."""

import gzip
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from sparsebench.errors import ResultError, SuiteError
from sparsebench.harness.commands._console import UNCHECKED
from sparsebench.harness.plan.selection import planned_contests
from sparsebench.harness.plan.suite import expand, read
from sparsebench.harness.run.validation import validate
from sparsebench.results.record import OLDER_ROWS, ROWS_SCHEMA, Row, Status
from sparsebench.results.run import bundle, store
from sparsebench.results.tables.analysis import analyse
from tests.tools.command_line import sparsebench
from tests.tools.paths import PUBLISHED
from tests.tools.rows import right_rows
from tests.tools.suites import ON_CPU, linear

SUITE = linear(
    "m: [4, 8], n: 32, k: 64, dtype: fp32, pattern: blocks, block: 8, sparsity: 0.5",
    "{format: csr, kernel: scipy_csr}",
    baselines=(ON_CPU,),
    title="small",
)
FLAGS = {"device": "cpu", "data": None, "timeout_s": 60.0, "replicates": 2, "only": ""}
STATE = {"suite": "small", "status": "finished", "flags": FLAGS}
CPU = {"cpu": {"name": "a CPU"}, "gpu": None}


def rows(suite: Path, data: Path | None = None, only: str = "") -> list[Row]:
    """Return what a run of the suite in two processes gives: A/A pairs, then the suite's rows."""
    suite_plan = replace(read(str(suite), data), name="small")
    return right_rows(planned_contests(suite_plan, "cpu", only))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    store.create(path, SUITE, CPU, STATE)
    store.append(path, rows(path / "suite.yaml"))
    bundle.seal(path)
    return path


def complaint(path: Path) -> str:
    """Return the error of a damaged bundle without its path."""
    with pytest.raises(ResultError) as error:
        list(validate(path))
    message = str(error.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message.removeprefix(str(path))


def lines(path: Path, data: Path | None = None) -> list[str]:
    return [line.text for line in validate(path, data)]


def damaged(path: Path, change: Callable[[list[Row]], list[Row]]) -> str:
    """Change the rows, seal them again, and return the error."""
    store.replace_rows(path, change(store.rows(path)))
    bundle.seal(path)
    return complaint(path)


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


def first(**changes: Any) -> Callable[[list[Row]], list[Row]]:
    """Return a function that changes the first of some rows."""
    return lambda rows: [replace(rows[0], **changes), *rows[1:]]


def with_error(row: Row, at_most: float, error: float) -> Row:
    contender = replace(row.case.contender, error={"at_most": at_most, "why": "8 bits"})
    return replace(row, case=replace(row.case, contender=contender), error=error)


def spread(us: float, count: int) -> tuple[float, ...]:
    """Return so many different samples of about a time."""
    return tuple(us + i / 1000 for i in range(count))


NO_CLOCK: Mapping[str, float] = {}


def loaded(
    change: dict[str, Any], clock: Mapping[str, float] = NO_CLOCK, **others: Any
) -> Callable[[list[Row]], list[Row]]:
    """Return a function that gives all rows two loads, and changes those of the first."""
    load: dict[str, float] = {"us_per_call": 2000.0, "j_per_call": 0.5, "window_s": 3.0}
    load |= {"calls": 1400.0} | clock
    loads = {"half": {**load, "calls": 740.0}, "full": load}
    right: dict[str, Any] = {"loads": loads, "energy_j": 0.5, "energy_window_s": 3.0}
    wrong = {**right, "loads": {**loads, "full": {**load, **change}}, **others}
    return lambda rows: [
        replace(row, **(right if i or not (change or others) else wrong))
        for i, row in enumerate(rows)
    ]


BOUND = {"clock": "graph", "bound_us": 10.0, "bound_by": "memory"}
DAMAGES: dict[str, tuple[Callable[[list[Row]], list[Row]], str]] = {
    "another device": (first(device="GPU-2"), "found GPU-2"),
    "a row twice": (lambda r: [*r, r[0]], "found another in line 2"),
    "a row less": (lambda r: r[:-1], "in replicate 1: expected a row"),
    "a replicate more": (lambda r: r + [replace(row, replicate=2) for row in r[:4]], "replicate 2"),
    "samples of a wrong row": (first(status=Status.WRONG), "found 5 in a wrong row"),
    **{f"a time of {us}": (first(samples_us=(1.0, us)), f"found {us}") for us in (0.0, -1.0)},
    **{f"a time of {us}": (first(samples_us=(1.0, us)), f"found {us}") for us in (nan, inf)},
    "more late samples than samples": (first(late=1.5), "found 1.5"),
    "other operands": (lambda r: [*r[:-1], replace(r[-1], digest="other")], "found other"),
    "no case": (
        lambda r: [x for x in r if x.case.contender.kernel != "scipy_csr"],
        "csr/scipy_csr",
    ),
    "no A/A pairs": (lambda r: [row for row in r if not row.reference], "A/A pairs"),
    "no twins": (lambda r: [x for x in r if x.reference or not x.case.contender.twin], "(twin)"),
    "a large error": (first(error_of_bound=1e6), "found 1000000.0"),
    "no error": (first(error=None), "found None"),
    "an error above what the suite allows": (
        lambda r: [with_error(r[0], at_most=1e-3, error=2e-3), *r[1:]],
        "found 0.002",
    ),
    "a choice of 22 MB": (first(choice={"tiles": "x" * 22_000_000}), "ROW_BYTES"),
    "a clock of a GPU": (first(clock="graph"), "expected a clock of a CPU, found graph"),
    "samples of another process": (
        lambda r: [*r[:-1], replace(r[-1], samples_us=r[15].samples_us)],
        "expected samples of its own, found those of csr/scipy_csr",
    ),
    "samples of another process in another order": (
        lambda r: [*r[:-1], replace(r[-1], samples_us=r[15].samples_us[::-1])],
        "expected samples of its own",
    ),
    "samples of a rival": (
        lambda r: [replace(r[0], samples_us=r[1].samples_us), *r[1:]],
        "expected samples of its own",
    ),
    "constant samples": (first(samples_us=(8000.0,) * 5), "found the first 1 again and again"),
    "the best samples again": (
        first(samples_us=(8000.0, 8000.5) * 3),
        "found the first 2 again and again",
    ),
    "three samples": (first(samples_us=(8000.0, 8000.1, 8000.2)), "found 3 samples, 1 per round"),
    "more rounds than there are": (first(samples_us=spread(8000, 49)), "found 49 samples"),
    "a part of a round": (first(samples_us=spread(50, 380), samples_per_block=8), "found 380"),
    "half of the rounds": (first(samples_us=spread(50, 192), samples_per_block=8), "found 192"),
    "a round of no samples": (first(samples_per_block=0), "0 per round"),
    "fewer samples in every process": (
        lambda r: [
            replace(row, samples_us=spread(50 + 2 * i, 48)) if i in (0, 16) else row
            for i, row in enumerate(r)
        ],
        "expected about 48 rounds of 2",
    ),
    "equal draws in a row": (first(draws=(1, 1)), "expected draws that differ, found [1, 1]"),
    "draws of another process": (
        lambda r: [*r[:-1], replace(r[-1], draws=r[0].draws)],
        "expected draws of its own contest",
    ),
    "two draws of another problem": (
        lambda r: [replace(r[0], draws=(r[2].draws[1], 99, r[2].draws[0])), *r[1:]],
        "expected draws of its own contest",
    ),
    **{
        f"{name} of {value}": (first(**{name: value}), f"expected {name} of 0 or more")
        for name, value in {"prepare_s": -1.0, "flops": inf, "nnz": -1, "energy_j": nan}.items()
    },
    "energy beside the board's": (
        first(energy_j=-1.0, telemetry={"energy_j": 5.0}),
        "expected energy_j of 0 or more",
    ),
    "a load of other energy": (loaded({"j_per_call": 0.6}), "expected energy_j as j_per_call"),
    "a load of no time": (loaded({"us_per_call": 0.0}), "calls of load full that fill 3 s"),
    "a load of shorter calls": (loaded({"us_per_call": 20.0}), "calls of load full that fill 3 s"),
    "a load of more calls": (loaded({"calls": 1600.0}), "calls of load full that fill 3 s"),
    "a load of no calls": (loaded({"calls": 0.0}), "found 0 of 2000 µs"),
    "a load that is unknown": (loaded({}, loads={"max": {}}), "loads half and full, found max"),
    "a row without loads": (loaded({}, loads={}), "expected loads in all rows"),
    "a load of another window": (loaded({}, energy_window_s=2.0), "as window_s of load full, 3.0"),
    "energy of no window": (
        first(energy_j=0.5),
        "energy_window_s beside energy_j, 0.5, found None",
    ),
    "a window of no energy": (first(energy_window_s=3.0), "energy_window_s beside energy_j, None"),
    "no draws": (
        first(draws=()),
        "expected draws of the activations that were checked, found none",
    ),
    "more zeros than elements": (first(sparsity=2.0), "expected sparsity of 0 to 1, found 2.0"),
    "a reference row less in every process": (
        lambda r: [x for x in r if x.case != next(y.case for y in r if y.reference)],
        "expected a reference row, found none",
    ),
    "a row of the suite as a reference": (
        lambda r: [replace(x, reference=x.reference or x.case.problem["m"] == 4) for x in r],
        "expected none (suite.yaml), found a reference row",
    ),
    "negative seconds of telemetry": (first(telemetry={"seconds": -1.0}), "expected seconds of 0"),
}


GPU = {"name": "a GPU", "uuid": "GPU-1", "sm_clock_mhz": 210, "sm_clock_max_mhz": 1980}
CEILINGS = {"read_gb_per_s": 4e3, "copy_gb_per_s": 4e3, "matrix_tflops": {"bf16": 800.0}}
CEILINGS |= {"launch_us": 5.0, "l2_bytes": 2**26}
AT_1755 = {"sm_mhz": 1755.0}
ON_GPU: dict[str, tuple[Callable[[list[Row]], list[Row]], str]] = {
    "too fast": (first(samples_us=spread(0.001, 384), samples_per_block=8), "at least 9.50 µs"),
    "too few samples": (first(samples_us=spread(50, 48)), "expected about 48 rounds of 8"),
    "too many samples": (first(samples_us=spread(900, 96), samples_per_block=2), "of 1 (sampling"),
    "a clock of a CPU": (first(clock="host"), "expected a clock of a GPU, found host"),
    "loads without SM clocks": (loaded({}), "expected sm_mhz of load half, found none"),
    "an SM clock of 1 THz": (
        loaded({"sm_mhz": 1e6}, AT_1755),
        "expected sm_mhz of load full of at most 1980 (environment.json), found 1000000.0",
    ),
    "an SM clock of 0": (loaded({"sm_mhz": 0.0}, AT_1755), "load full of at most 1980"),
    "an SM clock of telemetry": (
        first(telemetry={"sm_mhz": 1981.0}),
        "expected sm_mhz of telemetry of at most 1980",
    ),
}


@pytest.fixture
def gpu_run(run: Path) -> Path:
    write_environment(run)
    rows = [replace(row, **BOUND, device="GPU-1") for row in store.rows(run)]
    store.replace_rows(run, rows)
    bundle.seal(run)
    return run


def write_environment(run: Path, **changes: Any) -> None:
    environment = {"schema": store.ENVIRONMENT_SCHEMA, "gpu": GPU, "ceilings": CEILINGS}
    store.write_json(run / "environment.json", environment | changes)
    bundle.seal(run)


@pytest.mark.parametrize("damage", ON_GPU)
def test_times_and_clocks_of_a_gpu_are_held_against_its_limits(damage: str, gpu_run: Path) -> None:
    change, message = ON_GPU[damage]
    assert message in damaged(gpu_run, change)


def test_a_clock_that_the_board_does_not_report_is_not_required(gpu_run: Path) -> None:
    store.replace_rows(gpu_run, loaded({}, AT_1755)(store.rows(gpu_run)))
    bundle.seal(gpu_run)
    assert any(line.startswith("SM clocks: 32 rows, each") for line in lines(gpu_run))
    store.replace_rows(gpu_run, loaded({})(store.rows(gpu_run)))
    write_environment(gpu_run, gpu={"name": "a GPU", "uuid": "GPU-1"})
    assert not any(line.startswith("SM clocks") for line in lines(gpu_run))


def test_the_highest_clock_of_a_gpu_is_a_number(gpu_run: Path) -> None:
    write_environment(gpu_run, gpu=GPU | {"sm_clock_max_mhz": "1980"})
    assert "gpu.sm_clock_max_mhz: expected" in complaint(gpu_run)


@pytest.mark.parametrize(
    ("ceilings", "message"),
    [
        ({}, "expected the ceilings of a GPU, found none"),
        (CEILINGS | {"copy_gb_per_s": 0.0}, "ceilings.copy_gb_per_s: expected greater than 0"),
        (CEILINGS | {"launch_us": nan}, "ceilings.launch_us: expected"),
        (CEILINGS | {"matrix_tflops": {"bf16": "800"}}, "ceilings.matrix_tflops.bf16: expected"),
        (CEILINGS | {"read_gb": 1.0}, "ceilings.read_gb: unknown key"),
        ({"launch_us": 5.0}, "ceilings.read_gb_per_s: expected a value, found none"),
    ],
)
def test_ceilings_of_a_gpu_are_whole(ceilings: Any, message: str, gpu_run: Path) -> None:
    assert lines(gpu_run)
    write_environment(gpu_run, ceilings=ceilings)
    assert message in complaint(gpu_run)


def test_rows_with_loads_are_accepted(run: Path) -> None:
    store.replace_rows(run, loaded({})(store.rows(run)))
    bundle.seal(run)
    assert lines(run)


@pytest.mark.parametrize("damage", DAMAGES)
def test_rows_that_were_changed_and_sealed_again_are_refused(damage: str, run: Path) -> None:
    change, message = DAMAGES[damage]
    assert message in damaged(run, change)


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
