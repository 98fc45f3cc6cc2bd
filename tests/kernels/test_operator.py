"""The operator: what a search found, what lists hold, and what suites get of an engine.

Lists that cannot be read, or that hold choices of other GPUs, code or weights, cost a search.
"""

import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from sparsebench.errors import Unsupported
from sparsebench.kernels._common import choices as lists
from sparsebench.kernels._common import operator as running
from sparsebench.kernels._common import product
from sparsebench.kernels._common.cuda import require_compiled
from sparsebench.kernels._common.operator import (
    Earlier,
    Engine,
    Operator,
    OperatorCall,
    ahead,
    bucket,
    fewest,
)
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.search import Search, Trial
from sparsebench.kernels._kernel import Operands
from sparsebench.kernels.nn._bsr_pattern import pattern_of
from sparsebench.nn import BlockSparseLinear
from sparsebench.results.record import Problem

GPU = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="NVIDIA H200")
TIMES = {16: 1.05, 64: 1.0, 128: 1.2}  # µs by the tokens of a configuration
PROBLEM = {"op": "bsr.linear", "m": 64, "n": 512, "k": 512, "density": 0.1}


@dataclass(frozen=True)
class Config:
    tokens: int


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A GPU, an empty cache, and a search that takes the last candidate."""
    monkeypatch.setenv("SPARSEBENCH_CHOICES", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: GPU)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: warnings.catch_warnings())
    monkeypatch.setattr(lists, "package", lambda device: {})
    monkeypatch.setattr(product, "search", last_is_best)
    monkeypatch.setattr(running, "make_lasting", lambda make, device: make())
    return tmp_path


@pytest.fixture
def cache(gpu: Path) -> Iterator[Path]:
    """The same, while calls search."""
    with ahead(search=True):
        yield gpu


@pytest.fixture
def restart(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that moves the cache, so that this process reads it like a new one."""
    places = count()

    def move() -> None:
        folder = shutil.copytree(os.environ["SPARSEBENCH_CHOICES"], f"{cache}-{next(places)}")
        monkeypatch.setenv("SPARSEBENCH_CHOICES", str(folder))

    return move


def last_is_best(calls: list[Any], device: torch.device) -> Search:
    return Search(len(calls) - 1, tuple(Trial(float(len(calls) - i)) for i in range(len(calls))))


def engine(unfit: tuple[int, ...] = (32,), **changes: Any) -> Engine:
    """Return an engine with choices of 16, 32 and 64 tokens; those in `unfit` cannot run."""

    def plan(w: object, call: object, config: Config) -> Product:
        if config.tokens in unfit:
            raise Unsupported(f"{config.tokens} is odd")
        return Product(lambda *operands, out=None: torch.tensor(config.tokens))

    def bind(operands: Operands, engines: tuple[Engine, ...]) -> OperatorCall:
        where = torch.device("cuda")
        return OperatorCall(
            Operator(engines, lambda call: None, lambda call: PROBLEM, where), 1, ()
        )

    fields: dict[str, Any] = {"op": "linear", "consumes": "bsr", "device": "any", "name": "small"}
    fields |= {"config": Config, "plan": plan, "bind": bind}
    fields["choices"] = lambda w, call: [Config(16), Config(32), Config(64)]
    return Engine(**fields | changes)


def operator(unfit: tuple[int, ...] = (32,), **problem: Any) -> Operator:
    """Return an operator that may run any of its engines, of which there is one."""
    fields, only = PROBLEM | problem, engine(unfit)
    device = torch.device("cuda")
    return Operator((only,), lambda call: None, lambda call: fields, device, lambda call: [only])


def timed(product: Any) -> Any:
    return product.run


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(1, 1), (2, 8), (9, 16), (17, 32), (256, 256), (257, 288), (1000, 1024), (2049, 2304)],
)
def test_a_bucket_holds_its_tokens_with_little_room(tokens: int, expected: int) -> None:
    assert bucket(tokens) == expected
    assert bucket(expected) == expected
    assert bucket(fewest(expected)) == expected
    assert fewest(expected) == 1 or bucket(fewest(expected) - 1) < expected


def test_a_search_is_made_once_and_kept_for_later_processes(cache, restart) -> None:
    first = operator().select(1, timed)
    assert (first.by, first.choice) == ("search", {"kernel": "small", "tokens": 64})
    assert [line["choice"]["tokens"] for line in first.lines] == [16, 64, 32]
    assert first.lines[-1]["failed"] == "Unsupported: 32 is odd"
    restart()
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


def test_another_model_may_bring_choices_while_the_nearest_is_found(gpu: Path, monkeypatch) -> None:
    choice = {"kernel": "small", "tokens": 64}
    monkeypatch.setattr(lists, "_CHECKPOINTS", {lists.key(PROBLEM): choice})
    nearest = lists.nearest

    def interrupted(problem: Any, entries: Any) -> Any:
        def each() -> Iterator[Any]:
            for entry in entries:
                lists.add({lists.key({**PROBLEM, "m": 4096}): choice})
                yield entry

        return nearest(problem, each())

    monkeypatch.setattr(lists, "nearest", interrupted)
    assert operator(m=96).select(1).by == "nearest"


def test_a_search_times_the_choice_for_more_tokens_of_the_same_weight_first(cache, monkeypatch):
    assert operator(m=128).select(1, timed).choice["tokens"] == 64
    trials = Trial(1.0), Trial(2.0)
    monkeypatch.setattr(product, "search", lambda calls, device: Search(0, trials))
    chosen = {m: operator(m=m).select(1, timed).choice["tokens"] for m in (96, 256)}
    assert chosen == {96: 64, 256: 16}
    assert operator(m=96, n=99).select(1, timed).choice["tokens"] == 16


def test_a_call_never_searches_and_a_later_search_replaces_what_it_took(gpu: Path) -> None:
    plans = operator()
    assert plans.select(1, timed).by == "model"
    assert not [*gpu.iterdir()]
    with ahead(search=True) as selected:
        assert plans.select(1, timed).by == "search"
        assert plans.select(1, timed).by == "search"
    assert [each.choice["tokens"] for each in selected] == [64, 64]
    assert plans.select(1, timed).by == "search"


def test_an_inner_search_lists_its_plans_for_the_outer_one(cache: Path) -> None:
    with ahead(search=True) as outer:
        with ahead(search=True):
            operator().select(1, timed)
        assert [each.by for each in outer] == ["search"]


class Call(NamedTuple):
    m: int
    of: str = "linear"


def test_a_plan_for_up_to_twice_as_many_tokens_computes_a_call_once(gpu: Path) -> None:
    plans = operator()
    larger = plans.select(Call(64))
    assert plans.select(Call(32)) is larger
    assert plans.select(Call(32)) is not larger
    assert plans.select(Call(64)) is larger
    assert plans.select(Call(128)) is not larger
    assert plans.select(Call(48, "other")) is not larger
    assert plans.select(Call(8)).by == "model"


def not_compiled(w: object, call: Call, config: Config) -> Product:
    """Plan a kernel that no process has compiled; it returns the tokens that it computes."""
    require_compiled("small", lambda: False)
    return Product(lambda: call.m)


def uncompiled() -> Operator:
    """Return an operator of one engine, which needs a compiler for each plan."""
    fresh = engine(plan=not_compiled, closed=lambda w, call: [Config(32), Config(64)])
    device = torch.device("cuda")
    return Operator((fresh,), lambda call: None, sized, device, lambda call: [fresh])


def sized(call: Any) -> dict[str, Any]:
    return PROBLEM | {"m": call.m}


def test_a_call_without_compiled_kernels_computes_at_most_twice_as_many_tokens(gpu: Path) -> None:
    plans, computed = uncompiled(), {}
    for m in (2048, 1100, 600, 310, 160):
        plans.select(Call(m))
        computed[m] = plans.select(Call(m)).product.run()
    assert computed == {2048: 2048, 1100: 2048, 600: 600, 310: 600, 160: 160}


def test_the_product_of_a_cover_is_replaced_ahead(gpu: Path) -> None:
    plans = uncompiled()
    with ahead(search=True):
        plans.select(Call(64), lambda product: product.run)
    for m in (48, 40):
        assert [plans.select(Call(m)).by for _ in range(3)] == ["search", "larger", "larger"]
    assert plans.select(Call(48)).problem["m"] == 48
    with ahead(search=False):
        assert plans.select(Call(40)).product.run() == 40
    with ahead(search=True):
        searched = plans.select(Call(48), lambda product: product.run)
    assert (searched.by, searched.product.run()) == ("search", 48)


def test_calls_ahead_compile_what_other_numbers_of_tokens_take(gpu, monkeypatch) -> None:
    compiled: list[int] = []

    def plan(w: object, call: Call, config: Config) -> Product:
        if config.tokens == 32:
            raise Unsupported("32 is odd")
        compiled.append(config.tokens)
        return Product(lambda: call.m)

    only = engine(plan=plan, closed=lambda w, call: [Config(32), Config(64), Config(16)])
    plans = Operator((only,), lambda c: None, sized, torch.device("cuda"), lambda c: [only])
    plans.select(Call(128))
    assert compiled == [64]
    with ahead(search=False):
        plans.select(Call(256))
    assert compiled == [64, 64, 16, 64]


def test_a_layer_plans_each_number_that_it_is_given(gpu: Path) -> None:
    layer = BlockSparseLinear(64, 64, block=32, sparsity=0)
    pattern = pattern_of(layer.offsets, layer.columns)
    pattern.operator = uncompiled()
    layer.plan([64, 32], search=False)
    plans = pattern.operator.plans.items()
    assert {call.m: plan.by for call, plan in plans} == {64: "model", 32: "model"}


def test_threads_may_call_while_others_plan(gpu: Path) -> None:
    plans = operator()

    def call(start: int) -> None:
        for i in range(start, start + 1000):
            plans.select(Call(3 * 10**6 * i))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            [*pool.map(call, range(1, 4001, 1000))]
    finally:
        sys.setswitchinterval(before)


def test_a_captured_call_has_a_plan_of_its_own(gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = operator()
    larger = plans.select(Call(64))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert plans.select(Call(32), timed) is not larger


def test_choices_of_a_checkpoint_come_before_those_of_the_cache(cache, monkeypatch) -> None:
    monkeypatch.setattr(lists, "_CHECKPOINTS", {})
    assert operator().select(1, timed).choice["tokens"] == 64
    lists.add({lists.key(PROBLEM): {"kernel": "small", "tokens": 16}})
    chosen = operator().select(1, timed)
    assert (chosen.by, chosen.choice["tokens"]) == ("checkpoint", 16)
    assert operator().select(1, timed, Earlier(None, ())).by == "cache"  # a run takes none


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"problem": 1}',
        '{"problem": {}, "kernel": "small", "config": {"tokens": 16}',
        "\x00\xff",
        json.dumps({"problem": PROBLEM, "kernel": "gone", "config": {}}),
        json.dumps({"problem": PROBLEM, "kernel": "small", "config": {"tokens": 32}}),
        "[" * 100_000,
        json.dumps({"problem": {"op": "bsr.linear"}, "kernel": "small", "config": {}}),
        *[
            json.dumps({"problem": PROBLEM | {"m": m}, "kernel": "small", "config": {"tokens": 16}})
            for m in ("63", None, [63], 10**400, -1)
        ],
    ],
)
def test_a_damaged_or_outdated_line_costs_a_search(cache: Path, line: str) -> None:
    file = lists.user_file(torch.device("cuda"), ("small",))
    file.write_text(line + "\n", encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert operator().select(1).by == "model"
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
        monkeypatch.setattr(lists, "code_of", lambda engines: "0123")
    assert operator().select(1, timed).by == "search"
    assert len([*cache.iterdir()]) == 2


def test_processes_that_search_at_the_same_time_lose_nothing(cache: Path, restart) -> None:
    assert operator(m=64).select(1, timed).by == "search"
    (file,) = cache.iterdir()
    first = file.read_text()
    file.write_text("")  # and another process, which has read nothing yet, appends
    assert operator(m=128).select(1, timed).by == "search"
    file.write_text(first + file.read_text())
    restart()
    assert [operator(m=m).select(1, timed).by for m in (64, 128)] == ["cache"] * 2


@pytest.mark.parametrize(("code", "by"), [(None, "package"), ("old", "search")])
def test_a_list_of_the_package_holds_for_the_machine_code_that_was_measured(
    cache, code, by, monkeypatch
) -> None:
    choice = {"kernel": "small", "tokens": 16} | ({"code": code} if code else {})
    choices = {lists.key(PROBLEM): choice}
    monkeypatch.setattr(lists, "package", lambda device: choices)
    assert operator().select(1, timed).by == by


def test_a_weight_that_a_listed_choice_does_not_fit_is_searched_once(restart) -> None:
    assert operator().select(1, timed).choice["tokens"] == 64
    other = operator(unfit=(32, 64)).select(1, timed)
    assert (other.by, other.choice["tokens"]) == ("search", 16)
    restart()
    again = operator(unfit=(32, 64)).select(1, timed)
    assert (again.by, again.choice["tokens"]) == ("cache", 16)


def test_a_choice_of_the_package_that_fits_stands_in_for_one_of_the_cache(cache, monkeypatch):
    operator().select(1, timed)
    package = {lists.key(PROBLEM): {"kernel": "small", "tokens": 16}}
    monkeypatch.setattr(lists, "package", lambda device: package)
    assert operator().select(1, timed).choice["tokens"] == 64
    other = operator(unfit=(32, 64)).select(1, timed)
    assert (other.by, other.choice["tokens"]) == ("package", 16)


def test_a_row_has_what_a_list_needs(cache: Path) -> None:
    row = operator().select(1, timed).row
    assert row == {"kernel": "small", "tokens": 64, "by": "search", "problem": PROBLEM}
    assert operator().select(1, timed, Earlier(row, ())).choice == {"kernel": "small", "tokens": 64}


def test_a_choice_that_a_run_made_is_taken_again(cache: Path) -> None:
    pinned = {"kernel": "small", "tokens": 16, "by": "search"}
    assert operator().select(1, timed, Earlier(pinned, ())).choice["tokens"] == 16
    with pytest.raises(Unsupported):
        operator().select(1, timed, Earlier(pinned | {"tokens": 32}, ()))


def test_a_process_of_a_run_searches_anew_among_the_finalists_of_the_first(restart) -> None:
    operator().select(1, timed)  # fills the user's cache
    restart()
    first = operator().select(1, timed, Earlier(None, ()))
    assert (first.by, len(first.lines)) == ("search", 3)
    assert operator().select(1, timed, Earlier(None, ())).by == "cache"  # of this process
    restart()
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
    monkeypatch.setattr(running, "PLANS", 2)
    plans = Operator((engine(),), lambda call: None, lambda call: PROBLEM, torch.device("cpu"))
    for call in (1, 2, 3):
        plans.select(call)
    assert [*plans.plans] == [2, 3]


# ---- the contract of a suite ----


def of_suite(pinned: Any = None) -> Operands:
    return Operands(Problem("linear", {"dtype": "bf16"}), {}, {}, lambda: None, pinned)


def test_a_suite_gets_the_choice_of_a_search_and_its_row(cache: Path) -> None:
    launch = engine().prepare(of_suite())
    assert int(launch()) == launch.choice["tokens"] == 64
    assert launch.choice["by"] == "search"
    assert [line["choice"]["tokens"] for line in launch.candidates] == [16, 64, 32]


def test_a_search_of_a_named_kernel_is_no_choice_of_the_layers(cache: Path) -> None:
    engine().prepare(of_suite())
    assert operator().select(1, timed, Earlier(None, ())).by == "search"


def test_without_tuning_a_suite_gets_the_likeliest_configuration(cache: Path) -> None:
    launch = engine().prepare(of_suite(), tuned=False)
    assert (launch.choice["by"], launch.choice["tokens"]) == ("default", 16)
    assert not [*cache.iterdir()]


def test_tuning_adds_to_the_cache_and_takes_from_it(restart) -> None:
    assert engine().prepare(of_suite(), cache=True).choice["by"] == "search"
    restart()
    assert engine().prepare(of_suite(), cache=True).choice["by"] == "cache"
    assert engine().prepare(of_suite()).choice["by"] == "search"


def test_a_pinned_choice_of_an_older_version_is_taken(cache: Path) -> None:
    assert engine().prepare(of_suite({"tokens": 16, "by": "search"})).choice["tokens"] == 16


def test_the_long_search_of_older_versions_is_refused_with_what_replaced_it(cache: Path) -> None:
    with pytest.raises(Unsupported, match="sparsebench tune"):
        engine().prepare(of_suite(), tuned="wide")
