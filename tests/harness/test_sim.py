"""The simulated GPU: the whole pipeline, by the command line, in seconds."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sparsebench.errors import SuiteError
from sparsebench.harness.bench.contest_state import ContestOptions
from sparsebench.harness.bench.sampling import SAMPLES_PER_ROUND
from sparsebench.harness.catalog import load_op
from sparsebench.harness.plan.suite import read as read_suite
from sparsebench.harness.run.measure import measure
from sparsebench.harness.run.run_json import Flags
from sparsebench.harness.sim.gpu_model import (
    LIMITED_CARD,
    Spec,
    call_us,
    card_effects,
    read,
    samples,
)
from sparsebench.harness.sim.simulated_contest import _work, unsupported
from sparsebench.harness.sim.simulated_contest import run as run_contest
from sparsebench.results.ceilings import Ceilings
from sparsebench.results.record import Case, Contender, Problem, Row, Status
from sparsebench.results.run import store
from sparsebench.results.tables.families import QUANTISED
from sparsebench.results.tables.frame import frame
from tests.simulated.in_process import in_this_process
from tests.tools import worker_timeouts
from tests.tools.command_line import output
from tests.tools.marks import exhaustive
from tests.tools.suites import BSR as BSR_ENTRY
from tests.tools.suites import CSR, linear

pytestmark = pytest.mark.usefixtures("no_figures")
SUITE = linear("n: 4096, k: 4096, m: [16, 64], sparsity: [0.5, 0.9]", BSR_ENTRY, CSR)
BSR = Contender("bsr", "bsr_triton")
STILL = Spec(noise={1.0: 0.0}, drift=0.0, step=0.0, process=0.0, bandwidth_gb_per_s=1000.0)


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sim") / "simulated.yaml"
    path.write_text(SUITE)
    return path


@pytest.fixture(scope="module")
def whole(suite: Path) -> Path:
    """A run of three processes, by the command line."""
    out = suite.parent / "whole"
    output("run", suite, "--device", "sim", "--replicates", 3, "--out", out)
    return out


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the simulated worker run in this process."""
    in_this_process(monkeypatch)


def all_rows(run: Path) -> dict[tuple[str, int], Row]:
    return {(row.case.id, row.replicate): row for row in store.rows(run)}


def spec(folder: Path, text: str) -> str:
    """Write a spec and return the device's name."""
    file = folder / "spec.yaml"
    file.write_text(text)
    return f"sim:{file}"


def faulty(suite: Path, folder: Path, fault: str) -> list[Row]:
    """Run one process of a plan in which bsr_triton at m=64 and a sparsity of 0.9 goes wrong."""
    plan = read_suite(str(suite))
    cases = [
        Case(contest.problem, replace(contender, twin=twin))
        for contest in plan.contests
        for contender in contest.contenders
        for twin in (False, True)
    ]
    text = f"faults: [{{when: 'kernel=bsr_triton m=64 sparsity=0.9', fault: {fault}, process: 0}}]"
    flags = Flags(spec(folder, text), timeout_s=2, replicates=1)
    with pytest.MonkeyPatch.context() as patch:
        worker_timeouts.only_with({case.id for case in cases if struck(case)}, patch)
        return store.rows(measure(plan, flags, folder / "run", None))


def struck(case: Case) -> bool:
    planned = case.contender.kernel == "bsr_triton"
    return planned and (case.problem["m"], case.problem["sparsity"]) == (64, 0.9)


def test_the_whole_pipeline_runs_and_is_marked_as_simulated(whole: Path) -> None:
    run = store.read(whole)
    assert (whole / "report.html").stat().st_size > 10_000
    assert "simulated H200" in (whole / "report.html").read_text()
    assert run.state["status"] == "finished"
    assert run.environment["gpu"]["name"] == "simulated H200"
    rows = store.rows(whole)
    assert {row.status for row in rows} == {Status.OK}
    assert {row.clock for row in rows} == {"sim"}
    assert {row.device for row in rows} == {"sim-0", run.environment["gpu"]["uuid"]}
    assert {row.replicate for row in rows} == {0, 1, 2}
    assert len([row for row in rows if not row.reference]) == 3 * (4 * 3 + 3)  # twins in one


def test_a_simulated_row_has_the_fields_of_a_measured_one(whole: Path) -> None:
    for row in store.rows(whole):
        assert len(row.samples_us) % row.samples_per_block == 0
        assert row.bound_us is not None
        assert 0 < row.bound_us < float(np.median(row.samples_us))
        missing = {name for name, value in vars(row).items() if value is None}
        assert missing == {"code", "energy_j", "energy_window_s", "raises"}


@pytest.mark.usefixtures("here")
def test_a_killed_run_has_recorded_the_time_of_every_contest(suite, tmp_path, monkeypatch) -> None:
    states, append = [], store.append

    def append_and_look(path: Path, rows: list[Row]) -> None:
        append(path, rows)
        states.append(store.read(path).state)

    monkeypatch.setattr(store, "append", append_and_look)
    measure(read_suite(str(suite)), Flags("sim", replicates=1), tmp_path / "run", None)
    assert [state["contests"]["done"] for state in states[1:]] == [*range(1, len(states))]
    seconds = [state["seconds"] for state in states]
    assert seconds == sorted(seconds)
    assert all(state["status"] == "running" for state in states)


@pytest.mark.usefixtures("here")
def test_the_same_seed_gives_the_same_samples_and_another_seed_others(suite, whole, tmp_path):
    plan = read_suite(str(suite))
    one = replace(Flags("sim"), replicates=1)
    first = {key: row for key, row in all_rows(whole).items() if key[1] == 0}
    assert all_rows(measure(plan, one, tmp_path / "same", None)) == first
    seeded = replace(one, device=spec(tmp_path, "seed: 1"))
    other = all_rows(measure(plan, seeded, tmp_path / "other", None))
    assert other.keys() == first.keys()
    assert not {row.samples_us for row in other.values()} & {r.samples_us for r in first.values()}
    assert {row.device for row in other.values()} == {"sim-1"}


@pytest.mark.parametrize(
    ("device", "suite"), [("sim", "core"), ("sim:l4", "core"), ("sim", "decode-int4")]
)
def test_no_sparse_kernel_is_faster_than_its_zeros_allow(device: str, suite: str) -> None:
    quiet = {"noise": {1.0: 0.0}, "drift": 0.0, "step": 0.0, "process": 0.0, "regret": 0.0}
    model = read(device).model_copy(update=quiet)
    for contest in [c for c in read_suite(suite).contests if c.problem.op == "linear"]:
        rows = run_contest(
            model, contest.problem, contest.contenders, ContestOptions(), lambda *at: None
        )
        times = [(r.case.contender, np.median(r.samples_us)) for r in rows if r.samples_us]
        base = [us for contender, us in times if contender.baseline]
        for contender, us in times if base else ():
            if contender.format in QUANTISED:
                continue
            assert base[0] / us <= 1 / (1 - contest.problem["sparsity"]) + 1e-3


@pytest.mark.parametrize(
    ("device", "kernel", "supported"),
    [
        ("sim:a100", "bsr_wgmma", False),
        ("sim:l4", "bsr_triton", True),
        ("sim:rtx-4090", "spense_mma", True),
        ("sim", "bsr_wgmma", True),
    ],
)
def test_another_generation_gets_the_portable_kernels(device, kernel, supported) -> None:
    model, answers = read(device), set()
    for contest in read_suite("core").contests:
        for contender in contest.contenders:
            if contender.kernel == kernel and contest.problem["dtype"] == "bf16":
                answers.add(unsupported(model, contest.problem, contender) is None)
    assert answers == {supported}


@pytest.mark.parametrize(
    ("fault", "status", "message"),
    [
        ("crash", Status.FAILED, "exit code 7: a planned crash"),
        exhaustive(("hang", Status.TIMEOUT, "no answer within 2 s")),
        ("out_of_memory", Status.OUT_OF_MEMORY, "planned"),
        ("failed", Status.FAILED, "planned"),
        ("wrong", Status.WRONG, "planned"),
    ],
)
def test_a_fault_ends_its_own_row_and_no_other(
    fault, status, message, suite, tmp_path, monkeypatch
):
    if fault not in ("crash", "hang"):  # these end a process, or wait for one
        in_this_process(monkeypatch)
    rows = faulty(suite, tmp_path, fault)
    assert {(struck(row.case), row.status) for row in rows} == {(True, status), (False, Status.OK)}
    assert all(message in row.detail and not row.samples_us for row in rows if struck(row.case))
    assert all(row.samples_us for row in rows if not struck(row.case))


@pytest.mark.usefixtures("here")
def test_a_throttled_contest_slows_all_and_is_marked(suite, whole, tmp_path) -> None:
    rows = faulty(suite, tmp_path, "throttle")
    problem = next(row.case.problem.id for row in rows if struck(row.case))
    for row in rows:
        calm = all_rows(whole)[row.case.id, 0]
        here = row.case.problem.id == problem
        half = len(row.samples_us) // 2
        ratio = np.array(row.samples_us) / np.array(calm.samples_us)
        assert np.allclose(ratio[:half], 1, atol=0.001)
        assert np.allclose(ratio[half:], 1 / 0.7 if here else 1, atol=0.001)
        assert (row.telemetry["thermal_us"] > 0) is here


@pytest.mark.usefixtures("here")
def test_a_slow_start_is_in_the_first_block_alone(suite: Path, whole: Path, tmp_path: Path) -> None:
    for row in faulty(suite, tmp_path, "slow_start"):
        ratio = np.array(row.samples_us) / np.array(all_rows(whole)[row.case.id, 0].samples_us)
        assert np.allclose(ratio[: row.samples_per_block], 2 if struck(row.case) else 1, atol=0.001)
        assert np.allclose(ratio[row.samples_per_block :], 1)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("here")
def test_a_row_for_which_the_host_was_late_is_marked(suite: Path, tmp_path: Path) -> None:
    table = frame(faulty(suite, tmp_path, "host_late"))
    marked = table[table["mark"] == "host late"]
    assert set(marked.kernel) == {"bsr_triton"}
    assert set(marked.late) == {1 / SAMPLES_PER_ROUND}


@pytest.mark.usefixtures("here")
def test_a_time_below_the_bound_is_rejected(suite: Path, tmp_path: Path) -> None:
    flags = Flags(
        spec(tmp_path, "launch_us: 0.1\nefficiency: {csr/cusparse_csr: 2.0}"), replicates=1
    )
    rows = store.rows(measure(read_suite(str(suite)), flags, tmp_path / "run", None))
    fast = [row for row in rows if row.status is Status.FASTER_THAN_LIGHT]
    assert {row.case.contender.kernel for row in fast} == {"cusparse_csr"}
    assert "memory allows" in fast[0].detail


@pytest.mark.usefixtures("here")
def test_each_scope_and_cache_state_is_a_row(suite: Path, tmp_path: Path) -> None:
    path = tmp_path / "four.yaml"
    path.write_text(SUITE + "scopes: [kernel, op]\ncaches: [cold, hot]\n")
    rows = store.rows(
        measure(read_suite(str(path)), Flags("sim", replicates=1), tmp_path / "r", None)
    )
    medians: dict[str, dict[tuple[str, str], float]] = {}
    for row in rows:
        measure_of = row.scope, row.cache
        medians.setdefault(row.case.id, {})[measure_of] = float(np.median(row.samples_us))
    for taken in medians.values():
        assert taken.keys() == {
            ("kernel", "cold"),
            ("kernel", "hot"),
            ("op", "cold"),
            ("op", "hot"),
        }
        assert taken["kernel", "hot"] < 1.1 * taken["kernel", "cold"]
        assert taken["kernel", "cold"] < 1.1 * taken["op", "cold"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sede: 1", "did you mean seed?"),
        ("seed: one", "expected a valid integer; found 'one'"),
        ("drift: 2", "drift: expected less than or equal to 1"),
        ("faults: [{when: kernel=cublas, fault: sulk}]", "faults.0.fault: expected 'crash'"),
        ("faults: [{when: kernel=nobody, fault: crash}]", "expected at least one case, found none"),
        ("schema: sparsebench/sim@2", "sparsebench/sim@1"),
        ("seed: 1\nseed: 2", "found 'seed' twice"),
    ],
)
def test_a_bad_spec_is_one_line_and_writes_nothing(text, message, suite, tmp_path) -> None:
    with pytest.raises(SuiteError) as error:
        measure(read_suite(str(suite)), Flags(spec(tmp_path, text)), tmp_path / "run", None)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_spec_that_is_not_there_is_refused_and_an_empty_one_has_the_defaults(tmp_path) -> None:
    with pytest.raises(SuiteError, match=r"sim:nowhere\.yaml: expected a readable file"):
        read("sim:nowhere.yaml")
    with pytest.raises(SuiteError, match=r"did you mean a100\?"):
        read("sim:a10")
    assert read(spec(tmp_path, "schema: sparsebench/sim@1")) == read("sim") == Spec()


def test_the_work_of_a_case_is_counted_by_hand() -> None:
    """410 of 4096 blocks of 64 x 64 are kept; at 1000 GB/s a megabyte takes a microsecond."""
    fields = {"m": 16, "n": 4096, "k": 4096, "dtype": "bf16", "pattern": "blocks", "block": 64}
    problem = Problem("linear", {**fields, "sparsity": 0.9})
    efficiency = {"dense/cublas": 1.0, "bsr/bsr_triton": 0.5}
    gpu = STILL.model_copy(update={"launch_us": 0.1, "efficiency": efficiency})
    options = ContestOptions(ceilings=Ceilings(1000.0, 1000.0, {"bf16": 800.0}, 0.1, 10**6))
    contenders = [Contender("dense", "cublas", baseline=True), BSR]
    dense, sparse = run_contest(gpu, problem, contenders, options, lambda case, stage: None)
    elements, tokens = 410 * 64 * 64, 16 * 4096
    assert sparse.nnz == dense.nnz == elements
    assert sparse.flops == 2 * 16 * elements
    assert sparse.fewest_bytes == 2 * (elements + tokens + tokens)
    assert set(sparse.samples_us) == {round(sparse.fewest_bytes / 1e6 / 0.5, 3)}
    assert set(dense.samples_us) == {round(2 * (4096 * 4096 + tokens + tokens) / 1e6, 3)}
    assert sparse.bound_us == pytest.approx(2 * (elements + tokens) / 1e6)  # the output stays in L2
    assert sparse.bound_by == "memory"


MATRIX = {"m": 8, "n": 64, "k": 32}
ACTIVE = {"activation": "relu", "active": 2.0, "skew": "iid"}
MASK = {"m": 40, "context": 56, "batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}
MASK |= {"block": 8, "pattern": "top_k_blocks", "sparsity": 0.3}


@pytest.mark.parametrize(
    ("op", "fields", "elements"),
    [
        ("ffn", MATRIX | ACTIVE, 8 * 32),
        ("mlp", MATRIX | ACTIVE, 8 * 32),
        ("linear", MATRIX, 8 * 64),
        ("linear_dgrad", MATRIX, 8 * 32),
        ("linear_wgrad", MATRIX | {"pattern": "blocks", "block": 16, "sparsity": 0.5}, 64 * 32 / 2),
        ("attention", MASK, 2 * 40 * 4 * 16),
        ("attention_backward", MASK, 2 * (40 * 4 + 2 * 56 * 2) * 16),
    ],
)
def test_the_output_size_does_not_depend_on_the_reads(op, fields, elements) -> None:
    problem = Problem(op, {**load_op(op).defaults, "dtype": "bf16", **fields})
    assert _work(problem).output_bytes == 2 * elements


@pytest.mark.usefixtures("here")
def test_few_active_units_are_not_faster_than_light(tmp_path: Path) -> None:
    """Bytes leave out weights of units that are off: less the operands, they are no output."""
    path = tmp_path / "active.yaml"
    path.write_text("""
schema: sparsebench/suite@1
title: Active
problems:
  - {op: ffn, n: 5632, k: 2048, m: [1, 4096], dtype: bf16, activation: relu, active: [8, 600]}
  - {op: mlp, n: 8192, k: 2048, m: [1, 4096], dtype: bf16, activation: relu, active: 8}
contenders:
  - {op: ffn, format: cvse, kernel: ffn_sparse}
  - {op: mlp, format: cvse, kernel: mlp_sparse}
baselines:
  - {format: dense, kernel: cublas}
""")
    rows = store.rows(
        measure(read_suite(str(path)), Flags("sim", replicates=1), tmp_path / "r", None)
    )
    assert {row.status for row in rows} == {Status.OK}


def test_a_call_takes_the_largest_of_three_over_its_efficiency() -> None:
    fields = {"launch_us": 5.0, "host_us": 7.0, "efficiency": {"bsr/bsr_triton": 0.5}}
    plain = STILL.model_copy(update=fields)
    assert call_us(plain, BSR, "bf16", 0.0, 0, "kernel") == 5.0 / 0.5
    assert call_us(plain, BSR, "bf16", 0.0, 0, "op") == 7.0 / 0.5
    assert call_us(plain, BSR, "bf16", 0.0, 10**8, "kernel") == pytest.approx(100 / 0.5)
    assert call_us(plain, BSR, "bf16", 1.6e11, 0, "kernel") == pytest.approx(200 / 0.5)


def test_an_unnamed_contender_and_its_twin_have_one_efficiency() -> None:
    kernels = [Contender("bsr", name) for name in ("bsr_triton", "torch_bsr", "cusparse_bsr")]
    times = [call_us(Spec(), contender, "bf16", 0.0, 10**9, "kernel") for contender in kernels]
    assert len(set(times)) == 3
    ideal_us = 1e9 / 4100 / 1e3
    assert all(ideal_us / 0.9 <= us <= ideal_us / 0.3 for us in times)
    assert times[0] == call_us(Spec(), replace(BSR, twin=True), "bf16", 0.0, 10**9, "kernel")


def test_drift_and_steps_move_the_contenders_of_a_block_alike() -> None:
    shaken = Spec(noise={1.0: 0.0}, drift=0.02, step=0.1, step_odds=1.0, process=0.0)
    taken = samples(shaken, [10.0, 10.0], np.random.default_rng(0), processes=200)
    logs = np.median(np.log(taken), axis=3)
    assert logs.std() > 0.05
    assert np.abs(np.median(logs[:, 0] - logs[:, 1], axis=1)).max() < 0.01


@pytest.mark.parametrize(
    ("us", "iqr"), [(4.5, 0.063), (18.0, 0.025), (100.0, 0.005), (5000.0, 0.005)]
)
def test_noise_is_as_wide_as_on_the_h200(us: float, iqr: float) -> None:
    alone = Spec(drift=0.0, step=0.0, process=0.0)
    taken = samples(alone, [us], np.random.default_rng(0), processes=1000)
    low, high = np.quantile(taken, [0.25, 0.75])
    assert (high - low) / us == pytest.approx(iqr, rel=0.02)


def test_process_effects_are_those_of_ratios() -> None:
    alone = Spec(noise={1.0: 0.0}, drift=0.0, step=0.0, process=0.004)
    taken = samples(alone, [10.0, 10.0], np.random.default_rng(0), processes=4000)
    ratios = np.log(taken[:, 0] / taken[:, 1])
    assert float(ratios[:, 0, 0].std()) == pytest.approx(0.004, rel=0.05)
    assert np.allclose(ratios, ratios[:, :1, :1])


def test_cards_differ_by_contender_and_more_at_the_power_limit() -> None:
    draws = [np.random.default_rng(1) for _ in range(3)]
    specs = Spec(), Spec(card=0.01), Spec(card=0.01, limited=0.5)
    sds = [card_effects(spec, draw, (4000,)).std() for spec, draw in zip(specs, draws, strict=True)]
    assert sds == pytest.approx([0.0, 0.01 / 2**0.5, LIMITED_CARD * 0.01 / 2**0.5], rel=0.05)
