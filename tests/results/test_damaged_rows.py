"""Rows of a bundle that were changed and sealed again, and times beyond a GPU's limits."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from sparsebench.results.record import Row, Status
from sparsebench.results.run import bundle, store
from tests.results.bundle_examples import complaint, lines, sealed


def damaged(path: Path, change: Callable[[list[Row]], list[Row]]) -> str:
    """Change the rows, seal them again, and return the error."""
    store.replace_rows(path, change(store.rows(path)))
    bundle.seal(path)
    return complaint(path)


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
def run(tmp_path: Path) -> Path:
    return sealed(tmp_path)


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
