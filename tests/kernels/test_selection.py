"""Choosing a kernel: what a search found, what lists hold, and lists that cannot be read."""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsebench.errors import Unsupported
from sparsebench.kernels._common import choice_lists, selection
from sparsebench.kernels._common.search import Search, Trial
from sparsebench.kernels._common.selection import Candidate, Earlier, Operator, bucket

GPU = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="NVIDIA H200")
TIMES = {16: 1.05, 64: 1.0, 128: 1.2}  # µs by the tokens of a configuration
PROBLEM = {"op": "bsr.linear", "m": 64, "n": 512, "k": 512, "density": 0.1}


@dataclass(frozen=True)
class Config:
    tokens: int


class Product:
    code = pack = order = None

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def run(self) -> int:
        return self.tokens


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, a GPU, and a search that takes the last candidate."""
    monkeypatch.setenv("SPARSEBENCH_CHOICES", str(tmp_path))
    monkeypatch.setenv("SPARSEBENCH_SEARCH", "1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: GPU)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: warnings.catch_warnings())
    monkeypatch.setattr(choice_lists, "package", lambda device: {})
    monkeypatch.setattr(choice_lists, "_FILES", {})
    monkeypatch.setattr(choice_lists, "_PROCESS_CHOICES", {})
    monkeypatch.setattr(choice_lists, "_WARNINGS", set())
    monkeypatch.setattr(selection, "search", last_is_best)
    monkeypatch.setattr(selection, "make_lasting", lambda make, device: make())
    return tmp_path


def last_is_best(calls: list[Any], device: torch.device) -> Search:
    return Search(len(calls) - 1, tuple(Trial(float(len(calls) - i)) for i in range(len(calls))))


def operator(unfit: tuple[int, ...] = (32,), **problem: Any) -> Operator:
    """Offer 16, 32 and 64 tokens; those in `unfit` cannot run."""

    def plan(tokens: int) -> Product:
        if tokens in unfit:
            raise Unsupported(f"{tokens} is odd")
        return Product(tokens)

    def offer(call: object, choice: Any) -> list[list[Candidate]]:
        sizes = [choice["tokens"]] if choice else [16, 32, 64]
        return [[Candidate("small", Config(t), lambda t=t: plan(t)) for t in sizes]]

    fields = PROBLEM | problem
    return Operator(("small",), offer, lambda call: fields, torch.device("cuda"))


def timed(product: Any) -> Any:
    return product.run


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(1, 1), (2, 8), (9, 16), (17, 32), (256, 256), (257, 288), (1000, 1024), (2049, 2304)],
)
def test_a_bucket_holds_its_tokens_with_little_room(tokens: int, expected: int) -> None:
    assert bucket(tokens) == expected
    assert bucket(expected) == expected


def test_a_search_is_made_once_and_kept_for_later_processes(cache: Path) -> None:
    first = operator().select(1, timed)
    assert (first.by, first.choice) == ("search", {"kernel": "small", "tokens": 64})
    assert [line["choice"]["tokens"] for line in first.lines] == [16, 64, 32]
    assert first.lines[-1]["failed"] == "Unsupported: 32 is odd"
    choice_lists._FILES.clear()  # as in a new process
    again = operator().select(1, timed)
    assert (again.by, again.choice) == ("cache", first.choice)
    (file,) = cache.iterdir()
    assert "H200" in file.name


def test_without_a_search_the_nearest_choice_is_taken_and_else_the_likeliest(cache: Path) -> None:
    assert operator().select(1).choice["tokens"] == 16
    operator().select(1, timed)
    near = operator(m=96).select(1)
    assert (near.by, near.choice["tokens"]) == ("nearest", 64)
    assert operator(m=256).select(1).by == "model"
    assert operator(m=96, op="bsr.dgrad").select(1).by == "model"


def test_a_search_times_the_choice_for_more_tokens_of_the_same_weight_first(cache, monkeypatch):
    assert operator(m=128).select(1, timed).choice["tokens"] == 64
    trials = Trial(1.0), Trial(2.0)
    monkeypatch.setattr(selection, "search", lambda calls, device: Search(0, trials))
    chosen = {m: operator(m=m).select(1, timed).choice["tokens"] for m in (96, 256)}
    assert chosen == {96: 64, 256: 16}
    assert operator(m=96, n=99).select(1, timed).choice["tokens"] == 16


def test_a_search_can_be_switched_off(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEBENCH_SEARCH", "0")
    assert operator().select(1, timed).by == "model"
    assert not [*cache.iterdir()]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"problem": 1}',
        '{"problem": {}, "kernel": "small", "config": {"tokens": 16}',
        "\x00\xff",
        json.dumps({"problem": PROBLEM, "kernel": "gone", "config": {}}),
        json.dumps({"problem": PROBLEM, "kernel": "small", "config": {"tokens": 32}}),
    ],
)
def test_a_damaged_or_outdated_line_costs_a_search(cache: Path, line: str) -> None:
    file = choice_lists.user_file(torch.device("cuda"), ("small",))
    file.write_text(line + "\n", encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert operator().select(1, timed).by == "search"


def test_a_cache_that_cannot_be_written_is_said_once(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSEBENCH_CHOICES", str(tmp_path / "file" / "below"))
        with pytest.warns(UserWarning, match="choices are not"):
            assert operator().select(1, timed).by == "search"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert operator().select(1, timed).by == "cache"  # of this process


@pytest.mark.parametrize("other", ["GPU", "code"])
def test_choices_of_another_gpu_or_version_are_not_read(cache, other, monkeypatch) -> None:
    operator().select(1, timed)
    if other == "GPU":
        renamed = SimpleNamespace(**{**vars(GPU), "name": "NVIDIA H100 PCIe"})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: renamed)
    else:
        monkeypatch.setattr(choice_lists, "_code_of", lambda engines: "0123")
    assert operator().select(1, timed).by == "search"
    assert len([*cache.iterdir()]) == 2


def test_processes_that_search_at_the_same_time_lose_nothing(cache, monkeypatch) -> None:
    file = choice_lists.user_file(torch.device("cuda"), ("small",))
    processes: list[dict[Path, Any]] = [{file: {}}, {file: {}}]  # both read an empty file
    for files, sizes in zip(processes, ((64,), (64, 128)), strict=True):
        monkeypatch.setattr(choice_lists, "_FILES", files)
        assert [operator(m=m).select(1, timed).by for m in sizes] == ["search"] * len(sizes)
    monkeypatch.setattr(choice_lists, "_FILES", {})
    assert [operator(m=m).select(1, timed).by for m in (64, 128)] == ["cache"] * 2


@pytest.mark.parametrize(("code", "by"), [(None, "package"), ("old", "search")])
def test_a_list_of_the_package_holds_for_the_machine_code_that_was_measured(
    cache, code, by, monkeypatch
) -> None:
    choice = {"kernel": "small", "tokens": 16} | ({"code": code} if code else {})
    choices = {choice_lists.key(PROBLEM): choice}
    monkeypatch.setattr(choice_lists, "package", lambda device: choices)
    assert operator().select(1, timed).by == by


def test_a_weight_that_a_listed_choice_does_not_fit_has_a_choice_of_its_own(cache: Path) -> None:
    assert operator().select(1, timed).choice["tokens"] == 64
    other = operator(unfit=(32, 64)).select(1, timed)
    assert (other.by, other.choice["tokens"]) == ("search", 16)
    assert other.row["problem"] == PROBLEM | {"fits": False}
    choice_lists._FILES.clear()  # as in a new process
    for unfit, tokens in (((32,), 64), ((32, 64), 16)):
        again = operator(unfit).select(1, timed)
        assert (again.by, again.choice["tokens"]) == ("cache", tokens)
    assert operator(unfit=(32, 64)).select(1).choice["tokens"] == 16  # without a search


def test_a_choice_of_the_package_that_fits_stands_in_for_one_of_the_cache(cache, monkeypatch):
    operator().select(1, timed)
    package = {choice_lists.key(PROBLEM): {"kernel": "small", "tokens": 16}}
    monkeypatch.setattr(choice_lists, "package", lambda device: package)
    assert operator().select(1, timed).choice["tokens"] == 64
    other = operator(unfit=(32, 64)).select(1, timed)
    assert (other.by, other.choice["tokens"]) == ("package", 16)


def test_a_row_has_what_a_list_needs(cache: Path) -> None:
    row = operator().select(1, timed).row
    assert row == {"kernel": "small", "tokens": 64, "by": "search", "problem": PROBLEM}
    assert operator().select(1, timed, Earlier(row, ())).choice == {"kernel": "small", "tokens": 64}


def test_a_capture_needs_a_plan(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="captur"):
        operator().select(1, timed)


def test_a_choice_that_a_run_made_is_taken_again(cache: Path) -> None:
    pinned = {"kernel": "small", "tokens": 16, "by": "search"}
    assert operator().select(1, timed, Earlier(pinned, ())).choice["tokens"] == 16
    with pytest.raises(Unsupported):
        operator().select(1, timed, Earlier(pinned | {"tokens": 32}, ()))


def test_a_process_of_a_run_searches_anew_among_the_finalists_of_the_first(cache: Path) -> None:
    operator().select(1, timed)  # fills the user's cache
    choice_lists._FILES.clear()
    choice_lists._PROCESS_CHOICES.clear()
    first = operator().select(1, timed, Earlier(None, ()))
    assert (first.by, len(first.lines)) == ("search", 3)
    assert operator().select(1, timed, Earlier(None, ())).by == "cache"  # of this process
    choice_lists._PROCESS_CHOICES.clear()
    lines = [
        {"choice": {"kernel": "small", "tokens": t}, "median_us": us} for t, us in TIMES.items()
    ]
    later = operator().select(1, timed, Earlier(None, lines))
    assert (later.by, [line["choice"]["tokens"] for line in later.lines]) == ("search", [16, 64])


def test_the_parts_of_a_layer_have_their_own_choices_and_finalists() -> None:
    whole = Earlier({"up": {"kernel": "a"}}, [{"of": "up", "choice": {}}, {"of": "down"}])
    assert whole.part("up") == Earlier({"kernel": "a"}, [{"choice": {}}])
    assert whole.part("gate") == Earlier(None, [])


def test_plans_that_were_used_first_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "PLANS", 2)
    plans = Operator(
        ("small",),
        lambda call, choice: [[Candidate("small", Config(1), lambda: Product(1))]],
        lambda call: PROBLEM,
        torch.device("cpu"),
    )
    for call in (1, 2, 3):
        plans.select(call)
    assert [*plans.plans] == [2, 3]
