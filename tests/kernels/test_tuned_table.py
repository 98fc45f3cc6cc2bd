"""Tables of tuned configurations: lookups, and how `sparsebench tune` fills them."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from sparsebench.errors import SuiteError, TableError, Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.harness.machine.device import environment
from sparsebench.harness.ops.linear import definition
from sparsebench.harness.plan.suite import Contest, Suite, read
from sparsebench.harness.run import tuning as tuning
from sparsebench.harness.run.worker_process import ContestResult
from sparsebench.kernels._common import tuned_table
from sparsebench.kernels._common.tuned_table import SCHEMA, Entry, Sizes, Table, blocked
from sparsebench.kernels._kernel import Operands
from sparsebench.kernels.bsr import bsr_triton, bsr_wgmma
from sparsebench.results.record import Case, Contender, Problem, Row, Status
from tests.tools.command_line import refusal
from tests.tools.suites import ON_CPU, linear

GPU = torch.device("cuda:0")
AT = Sizes(4096, 4096, 4096, "bf16", (64, 64), 0.1)
TILE = {"tokens": 256, "cluster": 1}


def entry(sizes: Sizes = AT, kernel: str = "bsr_wgmma", **changes: Any) -> Entry:
    digest = tuned_table.source(kernel)
    result = Entry(kernel, sizes, dict(TILE), 100.0, 120.0, digest, "0" * 16, {"torch": "2.11.0"})
    return replace(result, **changes)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Path]]:
    """Use tables in a temporary folder, and a fake GPU with 132 multiprocessors."""
    places = {"user": tmp_path / "user", "package": tmp_path / "package"}
    for folder in places.values():
        folder.mkdir()
    monkeypatch.setattr(tuned_table, "folders", lambda: places)
    gpu = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    yield places
    tuned_table.read.cache_clear()


def put(folder: Path, *entries: Entry) -> Path:
    file = folder / "sm90_132.json"
    tuned_table.write(file, Table(SCHEMA, "NVIDIA H200", list(entries)))
    return file


def tokens_of(sizes: Sizes, kernel: str = "bsr_wgmma", **fixed: Any) -> int | None:
    match = tuned_table._find(kernel, sizes, GPU, fixed)
    choice = match and match[1].choice
    return choice["tokens"] if choice else None


def test_the_users_table_has_precedence_over_the_packages(folders: dict[str, Path]) -> None:
    assert tokens_of(AT) is None
    put(folders["package"], entry(), entry(replace(AT, m=64)))
    assert tokens_of(AT) == 256
    put(folders["user"], entry(choice={"tokens": 128, "cluster": 1}))
    assert tokens_of(AT) == 128
    assert tokens_of(replace(AT, m=64)) == 256


def test_folders_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.delenv("SPARSEBENCH_TUNED", raising=False)
    assert tuned_table.folders()["user"] == Path("/cache/sparsebench/tuned")
    monkeypatch.setenv("SPARSEBENCH_TUNED", "/mine")
    assert list(tuned_table.folders()) == ["user", "package"]
    assert tuned_table.folders()["user"] == Path("/mine")
    assert tuned_table.folders()["package"].parts[-2:] == ("kernels", "tuned")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 256),
        ({"m": 8192, "n": 2048, "k": 5000, "density": 0.06}, 256),
        ({"m": 8193}, None),
        ({"n": 2047}, None),
        ({"density": 0.04}, None),
        ({"m": 600}, 64),  # between 512 and 1024: the nearer
        ({"m": 900}, 128),
        ({"dtype": "fp16"}, None),
        ({"block": (64, 32)}, None),
        ({"block": None}, None),
    ],
)
def test_the_nearest_entry_within_a_factor_of_two_is_taken(changes, expected, folders) -> None:
    near = [
        entry(replace(AT, m=512), choice={"tokens": 64, "cluster": 1}),
        entry(replace(AT, m=1024), choice={"tokens": 128, "cluster": 1}),
    ]
    put(folders["package"], *near, entry())
    assert tokens_of(replace(AT, **changes)) == expected


def test_other_code_another_kernel_and_another_path_are_not_used(folders: dict[str, Path]) -> None:
    put(folders["user"], entry(source="of before"))
    assert tokens_of(AT) is None
    put(folders["user"], entry(kernel="bsr_triton", choice=TILE | {"path": "tma"}))
    assert tokens_of(AT) is None
    assert tokens_of(AT, "bsr_triton", path="pointers") is None
    assert tokens_of(AT, "bsr_triton", path="tma") == 256
    assert tuned_table._find("bsr_triton", AT, torch.device("cpu"), {}) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "top: expected Invalid JSON"),
        ("{}", "schema: expected a value; found none"),
        ('{"schema": "sparsebench/tuned@9", "gpu": "", "entries": []}', "schema: expected"),
        (
            '{"schema": "sparsebench/tuned@1", "gpu": "", "entries": [{}]}',
            "entries.0.kernel: expected a value; found none",
        ),
        (
            json.dumps(asdict(Table(SCHEMA, "", [entry(replace(AT, m="many"))]))),  # type: ignore[arg-type]
            "entries.0.sizes.m: expected a valid integer; found 'many'",
        ),
    ],
)
def test_a_malformed_table_is_one_line_that_names_the_file(text, message, folders) -> None:
    file = folders["user"] / "sm90_132.json"
    file.write_text(text)
    with pytest.raises(TableError) as error:
        tuned_table._find("bsr_wgmma", AT, GPU, {})
    assert str(error.value).startswith(f"{file}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_run_with_a_malformed_table_is_refused_before_it_starts(tmp_path, folders) -> None:
    file = folders["user"] / "sm80_108.json"
    file.write_text("[]")
    line = refusal("run", "quick", "--device", "cpu", "--out", tmp_path / "run")
    assert f"{file}: top: expected" in line
    assert not (tmp_path / "run").exists()


def test_a_digest_covers_code_but_not_comments(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tuned_table, "files", lambda package: tmp_path)
    family = tmp_path / "family"
    family.mkdir()
    (family / "base.py").write_text("A = 1\n")
    (family / "base.cu").write_text("int a; // one\n")
    kernel = family / "kernel.py"

    def digest(text: str) -> str:
        kernel.write_text("from sparsebench.kernels.family.base import A\n" + text)
        tuned_table.source.cache_clear()
        return tuned_table.source("kernel")

    before = digest('def f(a):\n    """Say."""\n    return a\n')
    assert before == digest('# why\n\ndef f(a):\n  """Say more."""\n  return a  # that\n')
    assert before == digest("import os\nfrom os import (\n    sep,\n)\ndef f(a):\n    return a\n")
    assert before != digest("def f(a):\n    return -a\n")
    assert before != digest("def f(a):\n    yield from a\n    return a\n")
    (family / "base.cu").write_text("/* two */\nint  a;\n")
    assert before == digest("def f(a):\n    return a\n")
    (family / "base.cu").write_text("int b;\n")
    assert before != digest("def f(a):\n    return a\n")
    assert tuned_table.source("none") == ""
    tuned_table.source.cache_clear()


def test_a_written_table_is_read_back_and_has_one_entry_per_line(folders: dict[str, Path]) -> None:
    entries = [entry(), entry(Sizes(1, 2, 3, "fp32"), "csr_cuda", untuned_us=None)]
    file = put(folders["user"], *entries)
    assert tuned_table.read(file) == Table(SCHEMA, "NVIDIA H200", entries)
    assert len(file.read_text().splitlines()) == 2 + len(entries)


def test_a_run_records_the_tables_in_force(folders: dict[str, Path]) -> None:
    assert tuned_table.in_force(GPU) is None
    put(folders["package"], entry(), entry(source="of before"))
    (table,) = tuned_table.in_force(GPU) or []
    assert table.pop("sha256")
    assert table == {"of": "package", "file": "sm90_132.json", "entries": 2, "current": 1}
    assert environment(torch.device("cpu"))["tuned"] is None


@pytest.mark.parametrize(("tuned", "by"), [(True, "search"), (False, "default"), ("wide", "wide")])
def test_a_launch_records_the_origin_of_its_configuration(tuned: Any, by: str) -> None:
    packed = Bsr.from_dense(torch.ones(128, 256).half(), block=64)
    problem = Problem("linear", {"m": 32, "n": 128, "k": 256, "dtype": "fp16"})
    x = torch.ones(32, 256).half()
    operands = Operands(problem, {"w": packed}, {"x": x}, definition)
    launch = bsr_triton.prepare(operands, tuned=tuned)  # a CPU takes the first without timing
    assert launch.choice["by"] == by
    again = bsr_triton.prepare(replace(operands, pinned=launch.choice), tuned=tuned)
    assert again.choice == launch.choice


def test_a_tables_configuration_is_taken_alone_and_recorded(folders: dict[str, Path]) -> None:
    few = bsr_wgmma.configurations(4096, 4096)
    chosen = (bsr_wgmma.Config, SimpleNamespace(pinned=None, device=GPU), AT)
    assert tuned_table.choose("bsr_wgmma", *chosen, True, few) == (few, {"by": "search"})
    file = put(folders["package"], entry())
    expected = [bsr_wgmma.Config(**TILE)], {"by": "table of the package"}
    assert tuned_table.choose("bsr_wgmma", *chosen, True, few) == expected
    assert tuned_table.choose("bsr_wgmma", *chosen, False, few) == (few[:1], {"by": "default"})
    with pytest.raises(Unsupported, match="expected true, false or wide, found 'much'"):
        tuned_table.choose("bsr_wgmma", *chosen, "much", few)
    put(folders["package"], entry(choice={"rows": 1}))
    with pytest.raises(TableError, match=f"{file}: entry of bsr_wgmma at .*'rows'"):
        tuned_table.choose("bsr_wgmma", *chosen, True, few)


@pytest.mark.parametrize("m", [1, 64, 512, 4096])
@pytest.mark.parametrize("side", [16, 32, 64, 128, 10])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_space_contains_the_search_and_is_bounded(m: int, side: int, dtype: str) -> None:
    size = 4 if dtype == "fp32" else 2
    for path in ("tma", "pointers"):
        sizes = blocked(m, 4096, 4096, dtype, (side, side), stored=40)
        few = bsr_triton.configurations(m, (side, side), size, path)
        wide = bsr_triton.space(sizes, size, path, 132)
        assert wide[: len(few)] == few
        assert len(few) <= len(set(wide)) == len(wide) <= 40


OURS = "{format: bsr, kernel: bsr_triton, params: {block: $block}, options: {tuned: [true, false]}}"
OTHERS = "bsr_wgmma", "torch_bsr"
SUITE = linear(
    "m: [64, 128, 256], n: 256, k: 256",
    OURS,
    *(f"{{format: bsr, kernel: {name}, params: {{block: $block}}}}" for name in OTHERS),
    baselines=(ON_CPU,),
)


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    (tmp_path / "suite.yaml").write_text(SUITE)
    return read(str(tmp_path / "suite.yaml"))


class Bench:
    """A fake runner: searches find 2 µs, the default takes 3, and `ends` gives the status."""

    seen: ClassVar[list[int]]
    ends: ClassVar[dict[str, Status]]
    interrupted_at: ClassVar[int | None] = None

    def __init__(self, device: str, data: Path | None, timeout_s: float) -> None:
        gpu = {"name": "NVIDIA H200", "compute_capability": "9.0", "multiprocessors": 132}
        libraries = {"torch": "2.11.0", "triton": "3.6.0", "numpy": "2"}
        self.about = {"environment": {"gpu": gpu | {"driver": "580"}, "versions": libraries}}

    def run(self, contests: list[Contest]) -> Iterator[ContestResult]:
        for contest in contests:
            if len(self.seen) == self.interrupted_at:
                raise KeyboardInterrupt
            self.seen.append(contest.problem["m"])
            yield ContestResult([self.row(contest.problem, c) for c in contest.contenders], {})

    def row(self, problem: Problem, contender: Contender) -> Row:
        if contender.kernel == "default":
            choice: dict[str, Any] = {"kernel": "bsr_small", "by": "search"}
            return Row(Case(problem, contender), Status.OK, choice=choice, samples_us=(2.0,))
        wide = contender.options["tuned"] == "wide"
        sizes = blocked(problem["m"], problem["n"], problem["k"], "bf16", (64, 64), 8)
        by = {"by": "wide", "sizes": asdict(sizes)} if wide else {"by": "default"}
        status = self.ends.get(contender.kernel, Status.OK) if wide else Status.OK
        choice = {"tokens": 256 if wide else 64, **by}
        samples = (2.0, 2.0) if wide else (3.0, 3.0)
        if status is not Status.OK:
            return Row(Case(problem, contender), status, detail="element [0, 0] is 1")
        return Row(Case(problem, contender), status, choice=choice, samples_us=samples)

    def kill(self) -> None:
        pass


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> type[Bench]:
    Bench.seen, Bench.ends, Bench.interrupted_at = [], {}, None
    monkeypatch.setattr(tuning, "Runner", Bench)
    return Bench


def test_tuning_fills_the_users_table_that_lookups_then_find(suite, bench, folders) -> None:
    outcome = tuning.tune(suite, "cuda:0", 1)
    assert outcome.file == folders["user"] / "sm90_132.json"
    assert (outcome.new, outcome.left, outcome.failures) == (6, 0, [])
    assert "speedup by tuning: median 1.50, at most 1.50" in outcome.lines[1]
    first = tuned_table.read(outcome.file).entries[0]
    assert (first.time_us, first.untuned_us, first.choice) == (2.0, 3.0, {"tokens": 256})
    assert first.versions == {"driver": "580", "torch": "2.11.0", "triton": "3.6.0"}
    sizes = blocked(256, 256, 256, "bf16", (64, 64), stored=8)
    assert tokens_of(sizes) == tokens_of(sizes, "bsr_triton") == 256
    assert tuning.tune(suite, "cuda:0", 1).new == 0  # everything is in the table
    assert len(bench.seen) == 3


def test_what_users_get_is_searched_beside_the_tables(suite, bench, tmp_path) -> None:
    users = "contenders:\n  - {format: bsr, params: {block: $block}}"
    (tmp_path / "both.yaml").write_text(SUITE.replace("contenders:", users))
    outcome = tuning.tune(read(str(tmp_path / "both.yaml")), "cuda:0", 1)
    assert (outcome.new, outcome.choices, outcome.failures) == (6, 3, [])


def test_a_default_that_is_faster_than_the_searchs_choice_goes_into_the_table(
    suite, bench, monkeypatch
) -> None:
    original = bench.row

    def slower(self: Bench, problem: Problem, contender: Contender) -> Row:
        row = original(self, problem, contender)
        return replace(row, samples_us=(4.0,)) if contender.options["tuned"] == "wide" else row

    monkeypatch.setattr(bench, "row", slower)
    entries = tuning.tune(suite, "cuda:0", 1).table.entries
    assert {(e.choice["tokens"], e.time_us, e.untuned_us) for e in entries} == {(64, 3.0, 3.0)}


def test_a_wrong_configuration_never_enters_a_table_and_is_reported(suite, bench) -> None:
    bench.ends = {"bsr_wgmma": Status.WRONG, "bsr_triton": Status.UNSUPPORTED}
    outcome = tuning.tune(suite, "cuda:0", 1)
    assert outcome.table.entries == []
    assert len(outcome.failures) == 3
    assert outcome.failures[0].startswith("wrong: bsr/bsr_wgmma tuned=wide, case ")


def test_tuning_ends_at_its_time_limit_and_resumes(suite, bench, monkeypatch) -> None:
    times = iter([0.0, 0.0, 100.0])
    monkeypatch.setattr(tuning, "monotonic", lambda: next(times))
    outcome = tuning.tune(suite, "cuda:0", 1)
    assert (outcome.new, outcome.left) == (2, 2)
    assert "2 problems left" in outcome.lines[-1]
    monkeypatch.setattr(tuning, "monotonic", lambda: 0.0)
    assert tuning.tune(suite, "cuda:0", 1).new == 4
    assert sorted(bench.seen) == [64, 128, 256]


def test_an_interruption_keeps_the_results(suite, bench, tmp_path) -> None:
    bench.interrupted_at = 2
    with pytest.raises(KeyboardInterrupt):
        tuning.tune(suite, "cuda:0", 1, out=tmp_path / "new" / "mine.json")
    assert len(tuned_table.read(tmp_path / "new" / "mine.json").entries) == 4


def test_each_kernel_that_tunes_is_searched_once_beside_its_default(suite: Suite) -> None:
    contests = tuning.searches(suite, "")
    labels = ["bsr/bsr_triton tuned=wide", "bsr/bsr_triton tuned=False"]
    labels += [label.replace("triton", "wgmma") for label in labels]
    assert [[c.label for c in contest.contenders] for contest in contests] == 3 * [labels]
    (one,) = tuning.searches(suite, "m=64 kernel=bsr_wgmma")
    assert [c.label for c in one.contenders] == labels[2:]
    with pytest.raises(SuiteError, match="expected a contender whose kernel tunes"):
        tuning.searches(suite, "kernel=torch_bsr")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu"], "--device cpu: expected an NVIDIA GPU to tune for"),
        (["--device", "sim"], "--device sim: expected an NVIDIA GPU to tune for"),
        (["quik", "--device", "cpu"], "did you mean quick?"),
        (["--minutes", "0"], "--minutes"),
    ],
)
def test_an_impossible_tuning_is_one_line_and_exit_2(arguments: list[str], message: str) -> None:
    assert message in refusal("tune", *arguments)


def test_the_packages_tables_match_the_present_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for file in sorted(tuned_table.folders()["package"].glob("*.json")):
        table = tuned_table.read(file)
        assert file.name.startswith("sm")
        assert [entry.case for entry in table.entries if not entry.current] == []


@pytest.mark.gpu
def test_a_search_of_the_whole_space_is_right_and_fills_a_table(suite, tmp_path, monkeypatch):
    monkeypatch.undo()
    out = tmp_path / "mine.json"
    outcome = tuning.tune(suite, "cuda:0", 5, "m=64 kernel=bsr_triton", out)
    assert (outcome.failures, outcome.new, outcome.left) == ([], 1, 0)
