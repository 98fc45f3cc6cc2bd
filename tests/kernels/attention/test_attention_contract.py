"""The contract of every engine of attention and of its gradients, found by name, against fp64.

    in Triton's interpreter   those in Triton, in fp16 and fp32, by pointers and by TMA
    emulated on a CPU         those in CUDA C++, thread by thread (on_cpu.py)
    compiled                  what Hopper would load, without a spill; what Triton compiles for
                              each generation fits the shared memory
    on a GPU                  all of them, also with large masks

An engine is run in each configuration that it offers. test_attention_wgmma.py has the tests that
only its kernels need.
"""

import math
from collections.abc import Sequence
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench._discovery import modules
from sparsebench.errors import Unsupported
from sparsebench.harness.catalog import load_kernel
from sparsebench.kernels._common.operator import Engine
from sparsebench.kernels._common.tape import taping
from sparsebench.kernels._common.triton import BoundKernel, Template
from sparsebench.kernels.attention import (
    _gathered_tiles,
    _gathered_wgmma,
    _stored,
    attention_gathered,
    attention_split,
    attention_triton,
    attention_wgmma,
)
from sparsebench.kernels.attention._call import AttentionCall, ListedMask
from tests.compiling.nvcc import CLEAN, assert_compiles_cleanly, by_nvcc
from tests.compiling.triton_kernels import SHARED_BYTES, complaint_about_launch
from tests.kernels.attention.cases import (
    DEVICE,
    Case,
    flat,
    gradients,
    moved,
    rising,
    selection_mask,
    sides_of,
    with_more_behind,
    without,
)
from tests.kernels.attention.on_cpu import on_two_sms
from tests.tools.marks import crossed, needs_gxx, sampled
from tests.tools.paths import KERNELS

ENGINES: dict[str, Engine] = {
    name: engine
    for name, place in modules("kernels").items()
    if ".attention." in place and isinstance(engine := load_kernel(name), Engine)
}
CUDA = [name for name in ENGINES if (KERNELS / "attention" / f"{name}.cu").exists()]
TRITON = [name for name in ENGINES if name not in CUDA]
OF_QUERIES = "attention_gathered", "attention_gathered_backward"  # lists of single queries
ALLOWED = {"bf16": 6e-3, "fp16": 4e-3, "fp32": 1e-5}  # norm of the difference over the norm
UNSEEN = 1  # block of keys that no query selects, with NaN

# Odd lengths, an empty row, one block, all blocks, heads that share lists and keys, decoding,
# empty places.
SMALL = [
    Case((60, 90), 32, (4, 2), batch=2, lists=4, causal=True, head_dim=32),
    Case((45, 70), (24, 40), (2, 1), lists=2, causal=True, head_dim=32, dtype="fp32"),
    Case((50, 100), 16, (4, 2), lists=2, bits=True, head_dim=32),
    Case((50, 70), 16, (2, 2), lists=2, head_dim=48, density=0, dtype="fp32"),
    Case((64, 64), 64, (2, 2), lists=2, head_dim=48),
    Case((40, 40), 16, (4, 1), causal=True, density=1, head_dim=32),
    Case((33, 33), 48, (1, 1), bits=True, head_dim=32, dtype="fp32"),
    Case((1, 130), (1, 16), (8, 2), batch=3, lists=2, head_dim=32, dtype="fp32"),
    Case((1, 130), (16, 64), (8, 2), batch=3, lists=2, causal=True, head_dim=32),
    Case((3, 90), 16, (4, 1), batch=2, causal=True, head_dim=32, dtype="fp32"),
    Case((16, 50), 16, (2, 2), lists=2, bits=True, head_dim=32, dtype="fp32"),
    Case((45, 200), 32, (4, 2), lists=2, head_dim=32, places=True),
    Case((5, 290), 16, (4, 2), batch=2, lists=2, causal=True, head_dim=32, places=True),
    Case((50, 100), 16, (4, 2), lists=2, bits=True, head_dim=32, places=True),
    Case((70, 90), (1, 32), (4, 2), batch=2, lists=2, causal=True, head_dim=32),  # lists of queries
    Case((50, 100), (1, 24), (6, 3), lists=6, head_dim=48, dtype="fp32", places=True),
    Case((40, 300), (1, 140), (2, 1), causal=True, head_dim=32, places=True),
]
# The same for Hopper. Those behind the places have a tile that is split, and sequences in sections.
HOPPER = [
    Case((200, 270), 128, (2, 1), batch=2, lists=2, causal=True, dtype="bf16"),
    Case((150, 200), 64, (4, 2), lists=2, bits=True, head_dim=64),
    Case((150, 260), (64, 128), (2, 1), causal=True, head_dim=64, dtype="bf16"),
    Case((150, 260), (64, 128), (2, 1), head_dim=64, density=0),
    Case((264, 200), (256, 192), (2, 1), lists=2, head_dim=64, density=1),
    Case((90, 170), 16, (4, 1), batch=2, causal=True),
    Case((150, 200), 32, (4, 2), lists=2, head_dim=64, dtype="bf16"),
    Case((150, 200), (16, 64), (4, 1), bits=True, head_dim=64),
    Case((150, 200), (64, 32), (2, 2), lists=2, causal=True, density=1),
    Case((40, 130), (64, 8), (1, 1), bits=True),
    Case((150, 500), 64, (2, 1), lists=2, head_dim=64, places=True),
    Case((150, 400), 128, (1, 1), batch=2, causal=True, places=True),
    Case((150, 400), 64, (4, 2), lists=2, bits=True, head_dim=64, places=True),
    Case((320, 900), 64, (1, 1), head_dim=64, density=0, places=True),  # parts without a block
    Case((320, 384), 64, (1, 1), head_dim=64, density=1),
    Case((64, 128), 64, (1, 1), batch=5, density=1),
]
# Lists of a head's queries: one tile of a block and several, ragged blocks, no block, all blocks.
GATHERED = [
    Case((300, 300), (1, 128), (2, 1), lists=2, causal=True, places=True),
    Case((150, 300), (1, 256), (2, 2), batch=2, lists=2, causal=True, head_dim=64, dtype="bf16"),
    Case((200, 330), (1, 128), (2, 1), lists=2, head_dim=64, dtype="bf16"),
    Case((300, 300), (1, 128), (2, 1), lists=2, density=0, causal=True, head_dim=64),
    Case((150, 150), (1, 128), (2, 1), lists=2, density=1, causal=True),
    Case((300, 400), (1, 128), (2, 1), 2, 2, True, False, 64, density=0.8, places=True),
]
LARGE = [
    Case((1000, 777), 128, (4, 4), lists=4, dtype="bf16"),
    Case((1000, 777), 64, (8, 2), batch=2, lists=8, causal=True, dtype="bf16"),
    Case((600, 1000), 64, (8, 1), batch=2, head_dim=64),
    Case((1000, 777), (64, 128), (4, 4), batch=2, lists=4, bits=True),
    Case((333, 500), 16, (8, 2), lists=2, causal=True, dtype="bf16"),
    Case((333, 500), 32, (4, 2), lists=2),
    Case((500, 700), (256, 192), (2, 1), dtype="bf16"),
    Case((500, 700), (64, 8), (2, 2), lists=2, bits=True, head_dim=64, dtype="bf16"),
    Case((500, 700), (16, 64), (4, 1), bits=True, head_dim=64, dtype="bf16"),
    Case((150, 301), (24, 40), (4, 1), lists=4, head_dim=96, bits=True),
    Case((130, 200), 32, (2, 2), head_dim=64, dtype="fp32", causal=True),
    Case((1, 1000), (16, 64), (8, 2), batch=3, lists=2, causal=True, dtype="bf16"),
    Case((1, 1000), 16, (8, 2), batch=3, lists=2, causal=True, dtype="bf16"),
    Case((1000, 4000), 64, (4, 2), lists=2, dtype="bf16", places=True),
    Case((1000, 4000), 128, (4, 2), lists=2, causal=True, dtype="bf16", density=0.1, places=True),
    Case((1, 4000), (16, 64), (8, 2), batch=3, lists=2, dtype="bf16", places=True),
    Case((1000, 777), (64, 128), (4, 4), batch=2, lists=4, bits=True, places=True),
    Case((333, 500), 64, (4, 2), lists=2, dtype="bf16", density=0),
    Case((333, 500), 64, (4, 2), lists=2, dtype="bf16", density=1),
    Case((1000, 1000), (1, 64), (32, 2), lists=2, causal=True, dtype="bf16", density=0.3),
    Case((1000, 1000), (1, 64), (8, 2), batch=2, lists=2, causal=True, dtype="bf16", places=True),
    Case((1500, 1500), (1, 512), (4, 2), lists=4, causal=True, dtype="bf16", places=True),
    Case((700, 900), (1, 200), (4, 4), lists=4, head_dim=64, places=True),
]
# As MoBA selects: the first rows have no choice.
LARGE_CHOICE = [
    (Case((2100, 2100), (1, 512), (4, 2), batch=2, lists=4, causal=True, dtype="bf16"), 3),
    (Case((1000, 2600), (1, 512), (4, 1), lists=4, causal=True, head_dim=64), 4),
    (Case((1500, 1000), (1, 256), (2, 2), lists=2, causal=True, dtype="bf16"), 2),
]


def choices(engine: Engine, w: ListedMask, call: AttentionCall) -> list[Any]:
    """Return the configurations of an engine; none if it refuses the call."""
    try:
        return [*engine.choices(w, call)]
    except Unsupported:
        return []


def run_engine(
    name: str, case: Case, *, rises: bool = False, every: int = 1, keep: int | None = None
) -> int:
    """Check an engine on a case, and return the number of its configurations.

    Keys and values are NaN in a block that no query selects, where a mask can have one.

    rises  scores rise along each list
    every  the configurations between those that are checked
    keep   blocks of a row of a mask that scores select; all can be seen, and the first rows that
           see any have no choice
    """
    engine, operands = ENGINES[name], case.operands()
    mask = selection_mask(case, 0, keep=keep) if keep else case.mask()
    operands = rising(operands) if rises else operands
    unseen = not (keep or case.bits or case.density == 1 or mask.shape[1] == 1)
    mask = without(mask, UNSEEN) if unseen else mask
    o, lse, expected = gradients(operands, mask)
    if unseen:
        for x in operands[1:3]:
            x[:, UNSEEN * mask.block[1] : (UNSEEN + 1) * mask.block[1]] = torch.nan
    q, k, v, do = (flat(x) for x in operands)
    inputs = [q, k, v, flat(o.to(q.dtype)), lse.flatten(0, 1).float(), do]
    allowed = ALLOWED[case.dtype]
    if engine.op == "attention":
        inputs, expected, out = inputs[:3], (o,), torch.empty_like(q)
    else:
        rows = (q.numel() + 2 * k.numel()) // case.head_dim
        out, allowed = q.new_empty(rows, case.head_dim), 2 * allowed
    mask = with_more_behind(moved(mask)) if case.places else moved(mask)
    w, call = ListedMask(mask), case.call(engine.op)
    configs = choices(engine, w, call)[::every]
    for config in configs:
        first, second = run_twice(engine, w, call, config, [*map(moved, inputs)], moved(out))
        assert all(map(torch.equal, first, second)), config
        for actual, right in zip(first, expected, strict=False):
            assert error(actual, right) < allowed, config
        if engine.op == "attention":
            log_sum = first[1].double().view(lse.shape)
            torch.testing.assert_close(log_sum, lse, atol=1e-4, rtol=1e-5)
    return len(configs)


def run_twice(
    engine: Engine,
    w: ListedMask,
    call: AttentionCall,
    config: Any,
    inputs: Sequence[Tensor],
    out: Tensor,
) -> list[list[Tensor]]:
    """Return the results of a plan: in new memory, and into NaN from operands that are elsewhere.

    A plan that keeps counters or memory must leave them as it found them.
    """
    product = engine.plan(w, call, config)
    with taping() as tape:
        first = product.run(*inputs)
    written = {t.data_ptr() for t in tape.outputs}
    assert not tape.complete or {t.data_ptr() for t in first} <= written
    second = product.run(*[x.clone() for x in inputs], out=out.fill_(torch.nan))
    assert not out.isnan().any()
    assert second[0].data_ptr() == out.data_ptr()
    return [[x.cpu() for x in results] for results in (first, second)]


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm; infinite if it is not finite."""
    ratio = float((actual.double().view(expected.shape) - expected).norm() / expected.norm())
    return ratio if math.isfinite(ratio) else math.inf


def skip_unless_possible(name: str, case: Case) -> None:
    engine = ENGINES[name]
    if reason := engine.unsupported(case.call(engine.op).problem, DEVICE):
        pytest.skip(reason)


# ---- in Triton's interpreter ----


def take_path(path: str, patch: pytest.MonkeyPatch) -> None:
    """Read heads on a CPU by TMA, if their rows allow it, or by pointers; and split lists."""
    patch.setattr(
        attention_triton, "choose_path", lambda reason, device: "pointers" if reason else path
    )
    patch.setattr(attention_split, "multiprocessors", lambda device: 12)


# Both paths read blocks of every kind; behind them, the paths alternate.
BY_PATH = [
    *product(SMALL[:7], ["tma", "pointers"]),
    *zip(SMALL[7:], cycle(["pointers", "tma"]), strict=False),
]


def few_queries(name: str, case: Case) -> Case:
    """Leave 7 queries to a kernel that has a program for each, which takes 30 ms there."""
    if name in OF_QUERIES or sides_of(case.block)[0] > 1:
        return case
    return case._replace(tokens=(min(7, case.tokens[0]), case.tokens[1]))


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("case", "path"), sampled(BY_PATH, 0, 3, 4, 15, 18, 19, 21, 22, 23), ids=str
)
@pytest.mark.parametrize("name", TRITON)
def test_results_are_right_in_the_interpreter(name, case, path, poisoned, monkeypatch) -> None:
    case = few_queries(name, case)
    skip_unless_possible(name, case)
    take_path(path, monkeypatch)
    assert run_engine(name, case, every=3)


@pytest.mark.interpreted
@pytest.mark.parametrize("name", TRITON)
def test_scores_that_rise_along_a_list_are_right_in_the_interpreter(name, monkeypatch) -> None:
    take_path("tma", monkeypatch)
    case = {"attention_split": SMALL[8], **dict.fromkeys(OF_QUERIES, SMALL[14])}.get(name, SMALL[0])
    assert run_engine(name, case, rises=True, every=3)


# ---- emulated on a CPU ----


@needs_gxx
@pytest.mark.parametrize(
    ("case", "late"), sampled(zip(HOPPER, cycle([False, True]), strict=False), 1, 10, -1), ids=str
)
@pytest.mark.parametrize("name", CUDA)
def test_results_are_right_on_a_cpu(name, case, late, poisoned, monkeypatch) -> None:
    on_two_sms(monkeypatch, late)
    monkeypatch.setattr(_stored, "SECTION_BYTES", 1)  # a section for each KV head
    assert run_engine(name, case) or name == "attention_wgmma_backward"


@needs_gxx
@pytest.mark.parametrize("case", sampled([HOPPER[2], HOPPER[0], HOPPER[1]], 0), ids=str)
@pytest.mark.parametrize("name", CUDA)
def test_scores_that_rise_along_a_list_are_right_on_a_cpu(name, case, monkeypatch) -> None:
    on_two_sms(monkeypatch, late=False)
    assert run_engine(name, case, rises=True)


def gather_by_wgmma(patch: pytest.MonkeyPatch) -> None:
    """Let attention_gathered run by wgmma on a CPU, as on a Hopper."""
    patch.setattr(_gathered_wgmma, "unsupported", _gathered_wgmma.unsupported_lists)


@needs_gxx
@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("case", "late", "rises"), crossed(GATHERED, [True, False], [False, True]), ids=str
)
def test_tiles_gathered_for_wgmma_are_right(case, late, rises, poisoned, monkeypatch) -> None:
    on_two_sms(monkeypatch, late)
    gather_by_wgmma(monkeypatch)
    monkeypatch.setattr(_gathered_tiles, "SECTION_BYTES", 1 << 16)  # several sections
    assert run_engine("attention_gathered", case, rises=rises, every=6) == 1


# Queries behind and before the keys, ragged blocks and tiles, a query that sees one key.
WITHOUT_CHOICE = [
    (Case((300, 400), (1, 128), (2, 1), batch=2, lists=2, causal=True, head_dim=64), 2),
    (Case((350, 300), (1, 128), (2, 2), lists=2, causal=True, dtype="bf16", places=True), 2),
    (Case((330, 530), (1, 256), (2, 1), lists=2, causal=True, head_dim=64, places=True), 2),
    (Case((300, 300), (1, 128), (1, 1), causal=True), 1),
    (Case((150, 300), (1, 128), (2, 1), lists=2, dtype="bf16"), 3),  # not causal: all keep all
]


@needs_gxx
@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("of_rows", "late", "rises"), crossed(WITHOUT_CHOICE, [True, False], [False, True]), ids=str
)
def test_queries_without_a_choice_are_right_by_wgmma(
    of_rows, late, rises, poisoned, monkeypatch
) -> None:
    on_two_sms(monkeypatch, late)
    gather_by_wgmma(monkeypatch)
    case, keep = of_rows
    if case.places:
        monkeypatch.setattr(_gathered_tiles, "SECTION_BYTES", 1 << 16)
    assert run_engine("attention_gathered", case, rises=rises, every=6, keep=keep) == 1


# ---- compiled ----

# The producers of differentiate have 24 registers, and spill one for small blocks.
ONE_REGISTER = "8 bytes stack frame, 4 bytes spill stores,"


@by_nvcc
@pytest.mark.parametrize("case", HOPPER, ids=str)
@pytest.mark.parametrize("name", CUDA)
def test_what_an_engine_loads_compiles_cleanly(name, case, loads, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(attention_wgmma, "multiprocessors", lambda device: 2)  # a tile is split
    w, call = ListedMask(case.mask()), case.call(ENGINES[name].op)
    for config in choices(ENGINES[name], w, call):
        ENGINES[name].plan(w, call, config)
    for source, constants, _ in dict.fromkeys(loads):
        # With short steps, ptxas serialises some products. That costs 0 to 4.5 %, and only masks
        # that gain more by short steps have them (NOTES.md).
        allowed = "(C7511)" if dict(constants).get("SHORTENS") else ""
        spills = case.block == 16 and name == "attention_wgmma_backward"
        clean = ONE_REGISTER if spills else CLEAN
        assert_compiles_cleanly(source, constants, tmp_path, allowed, clean)


@by_nvcc
@pytest.mark.parametrize("case", GATHERED[:3], ids=str)
def test_tiles_gathered_for_wgmma_compile_cleanly(case, loads, tmp_path, monkeypatch) -> None:
    gather_by_wgmma(monkeypatch)
    programs: list[Any] = []
    monkeypatch.setattr(Template, "__init__", lambda self, bound, *_: programs.extend(bound))
    w, call = ListedMask(case.mask()), case.call()
    attention_gathered.plan(w, call, attention_gathered.choices(w, call)[0])
    (cut,) = [each for each in programs if getattr(each, "kernel", None) is _gathered_wgmma._cut]
    attend = programs[programs.index(cut) + 1]  # a replay allocates what it writes before the cut
    assert {*map(id, attend.args[-4:])} <= {*map(id, cut.args)}
    assert complaint_about_launch(cut, 90) is None
    ((source, constants, _),) = loads
    assert_compiles_cleanly(source, constants, tmp_path)


COMPILES = [
    (capability, block, head_dim, dtype)
    for capability in SHARED_BYTES
    for block in (128, 64, 32, 16, (24, 40))
    for head_dim in (128, 64)
    for dtype in ("bf16", "fp32")
]


@pytest.mark.compiles
@pytest.mark.parametrize("name", TRITON)
@pytest.mark.parametrize(("capability", "block", "head_dim", "dtype"), sampled(COMPILES, 22))
def test_the_default_fits_the_shared_memory(
    capability: int, block: Any, head_dim: int, dtype: str, name: str, monkeypatch
) -> None:
    programs: list[BoundKernel] = []
    take_path("tma" if capability >= 90 else "pointers", monkeypatch)
    monkeypatch.setattr(Template, "__init__", lambda self, bound, *_: programs.extend(bound))
    queries, sizes = 1 if name == "attention_split" else 256, (8, 4)
    if name in OF_QUERIES:
        block = 1, block if isinstance(block, int) else block[1]
    case = Case(
        *((queries, 256), block, sizes), lists=4, causal=True, head_dim=head_dim, dtype=dtype
    )
    w, call = ListedMask(case.mask()), case.call(ENGINES[name].op)
    ENGINES[name].plan(w, call, ENGINES[name].choices(w, call)[0])
    for program in (programs[0].before, programs[0]):
        # Some spill a little with the arithmetic of a mask, and in fp32 with D = 128 much. A search
        # times the alternatives.
        complaint = program and complaint_about_launch(program, capability)
        assert complaint is None or "spill" in complaint, (program.kernel.__name__, complaint)


@pytest.mark.parametrize("block", [16, 32, 64, 128, (1, 64), (24, 40)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ENGINES)
def test_a_block_has_a_few_configurations_or_is_refused(name, block, dtype) -> None:
    for head_dim in (64, 128, 256):
        case = Case((512, 512), block, (8, 8), head_dim=head_dim, dtype=dtype)
        configs = choices(ENGINES[name], ListedMask(case.mask()), case.call(ENGINES[name].op))
        assert len(set(configs)) == len(configs) <= 6
        assert configs or name in (*CUDA, *OF_QUERIES)  # the others run any block
        assert configs or name in CUDA or block != (1, 64)


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*SMALL, *HOPPER, *LARGE], ids=str)
@pytest.mark.parametrize("name", ENGINES)
def test_results_are_right_on_a_gpu(name, case, poisoned) -> None:
    skip_unless_possible(name, case)
    assert run_engine(name, case) or name in CUDA


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "keep"), [*LARGE_CHOICE, *WITHOUT_CHOICE], ids=str)
def test_queries_without_a_choice_are_right_on_a_gpu(case, keep, poisoned) -> None:
    skip_unless_possible("attention_gathered", case)
    assert run_engine("attention_gathered", case, keep=keep)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*HOPPER[:2], *LARGE[:3], LARGE[11]], ids=str)
@pytest.mark.parametrize("name", ENGINES)
def test_scores_that_rise_along_a_list_are_right_on_a_gpu(name, case) -> None:
    skip_unless_possible(name, case)
    assert run_engine(name, case, rises=True) or name in CUDA
