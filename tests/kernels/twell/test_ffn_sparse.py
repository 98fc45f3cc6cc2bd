"""Test the feed-forward layers: thread by thread and interpreted on a CPU, and on a GPU.

The op mlp (no gate) tests mlp_sparse and mlp_few, which run the same kernels.
"""

import ctypes
import re
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.harness.bench.correctness import Expected, check
from sparsebench.harness.bench.operands import redraw
from sparsebench.harness.catalog import load_op
from sparsebench.kernels._common.cuda import Constants
from sparsebench.kernels._common.search import Search
from sparsebench.kernels._kernel import DTYPES, Launch, Operands
from sparsebench.kernels.dense import ffn_dense_triton, torch_compile
from sparsebench.kernels.twell import (
    _grouped,
    _remainder,
    ffn_few,
    ffn_sparse,
    ffn_twell,
    mlp_sparse,
)
from sparsebench.kernels.twell._twell_gate import Tiles
from sparsebench.results.record import Problem
from tests.compiling.nvcc import assert_compiles_cleanly, by_nvcc, hopper
from tests.compiling.triton_kernels import complaint_about_launch
from tests.emulation.cuda_on_cpu import library_of, ring
from tests.kernels.layers import assert_correct, operands_for, problem_of
from tests.tools.marks import needs_gxx, sampled
from tests.tools.paths import cuda_source

CPU = torch.device("cpu")
OP = load_op("ffn")
DENSE, MLP_DENSE = ffn_sparse.DENSE, [f"dense, {name}" for name in mlp_sparse.DENSE]
GROUPED = "library", "alone"


def problem(m: int, n: int, k: int, dtype: str = "bf16", op: str = "ffn", **more: Any) -> Problem:
    fields = {"activation": "relu", "pattern": "dense", "sparsity": 0.0} | more
    return problem_of(op, m=m, n=n, k=k, dtype=dtype, **fields)


# ---- sizes and limits of the sparse kernel ----


def test_clusters_use_all_multiprocessors() -> None:
    at_once = {8: 15, 7: 17, 6: 20, 5: 25, 4: 30, 3: 42, 2: 66}.__getitem__  # an H200
    splits = {m: _grouped.split_of(m, at_once) for m in (65, 120, 128, 256, 512, 528, 1024, 4096)}
    assert splits == {65: 8, 120: 8, 128: 7, 256: 3, 512: 2, 528: 2, 1024: 1, 4096: 1}


def test_the_limit_is_constant_for_many_tokens() -> None:
    assert _grouped.limit_of(8, 512) == 512
    assert _grouped.limit_of(8, 5632) == _grouped.MOST_ROWS
    assert _grouped.limit_of(256, 5632) == 4 * 5632 // 32
    assert _grouped.limit_of(4096, 5632) == _grouped.limit_of(131072, 5632) == 579


# ---- the choice of a layer ----


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare layers without a GPU: each launch returns the length of its module's name."""

    def named(name: str, **choice: Any) -> Any:
        return lambda *_, **__: Launch(lambda: torch.tensor(len(name)), choice)

    for module, name in (
        (ffn_few, "launch_of"),
        (_grouped, "prepare"),
        *((kernel, "prepare") for kernel in (*DENSE.values(), *mlp_sparse.DENSE.values())),
    ):
        monkeypatch.setattr(module, name, named(module.__name__, tile=1))


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(
    ("m", "op", "way", "chosen"),
    [
        (32, "ffn", "best", ["cvse, ffn_few", *(f"dense, {k}" for k in DENSE)]),
        (64, "ffn", "library", ["cvse, ffn_sparse way=library"]),
        (65, "ffn", "sparse", [f"cvse, ffn_sparse way={w}" for w in GROUPED]),
        (512, "ffn", "sparse", [f"cvse, ffn_sparse way={w}" for w in GROUPED]),
        (513, "ffn", "sparse", [f"cvse, ffn_sparse way={w}" for w in GROUPED[:1]]),
        (33, "ffn", "sparse", [f"cvse, ffn_{w}" for w in ("few", "sparse way=alone")]),
        (32, "ffn", "sparse", ["cvse, ffn_few"]),
        (64, "mlp", "few", ["cvse, mlp_few"]),
        (513, "mlp", "sparse", ["cvse, mlp_sparse way=library"]),
        (513, "mlp", "best", ["cvse, mlp_sparse way=library", *MLP_DENSE]),
    ],
)
def test_a_portfolio_names_its_choice(m, op, way, chosen, monkeypatch) -> None:
    kernel = ffn_sparse if op == "ffn" else mlp_sparse
    case = operands_for(problem(m, 64, 32, op=op))
    for i, expected in enumerate(chosen):
        monkeypatch.setattr(ffn_sparse, "search", lambda *_, i=i: Search(i))
        launch = kernel.prepare(case, way=way)
        assert launch.choice["chosen"] == expected
        monkeypatch.setattr(ffn_sparse, "search", lambda calls, _: Search(len(calls) - 1))
        again = kernel.prepare(replace(case, pinned=launch.choice))
        assert again.choice == launch.choice


# ---- its code ----


@by_nvcc
@pytest.mark.parametrize("k", sampled([2048, 200, 2040]))
@pytest.mark.parametrize("split", sampled([1, 8]))
@pytest.mark.parametrize(
    ("gated", "tiles"),
    sampled([(True, None), (False, None), (True, Tiles()), (True, Tiles(64, 7))]),
    ids=str,
)
def test_the_kernel_compiles_without_spills(k, split, gated, tiles, tmp_path) -> None:
    for squared, dtype in ((False, torch.bfloat16), (True, torch.float16)):
        constants = _grouped.constants_of(k, split, squared, gated, dtype, tiles)
        assert_compiles_cleanly("ffn_sparse", constants, tmp_path)


@by_nvcc
@pytest.mark.parametrize("k", sampled([2560, 2048, 200, 1032]))
@pytest.mark.parametrize("split", sampled([8, 7, 3, 2]))
def test_without_a_fallback_the_kernel_compiles_without_spills(k, split, tmp_path) -> None:
    for squared, gated, dtype in ((False, True, torch.bfloat16), (True, False, torch.float16)):
        constants = _grouped.constants_of(k, split, squared, gated, dtype, alone=True)
        assert_compiles_cleanly("ffn_sparse", constants, tmp_path)


def on_cpu(constants: Constants, late: bool) -> Any:
    """Build the kernel's source for this machine; grid_on_cpu.h replaces PTX."""
    headers = '#include "grid_on_cpu.h"\n' + ring()
    source = cuda_source("ffn_sparse.cu").replace('#include "ffn_ptx.cuh"', headers)
    source = re.sub("extern __shared__.*", "#define shared dynamic_shared()", source)
    source = source.replace("__shared__ Shared s;", "Shared& s = *(Shared*)fixed_shared();")
    source += """
      static struct { const u16* x; u16* g; const char *wu, *wd; u16* y; int *left, *heavy;
                      const void* words; u16* gates; } p;
      static struct { int m, n, limit; } q;
      static void run() {
        up_and_down(p.x, p.g, p.wu, p.wd, p.y, p.left, p.heavy, q.m, q.n, q.limit, p.words,
                    p.gates);
      }
      extern "C" void call(void** pointers, int* sizes, int grid, size_t bytes) {
        memcpy(&p, pointers, sizeof p), memcpy(&q, sizes, sizeof q);
        launch(grid, THREADS, SPLIT, bytes, run);
      }
    """
    return library_of(source, (*constants, ("LATE", int(late))))


def gate_in_tiles(g: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Return gates as _twell_gate.py does: dense tiles, with 7 elsewhere, and words."""
    m, n = g.shape
    words = torch.full((m, -(-n // tiles.tile), tiles.words), -1, dtype=torch.int32)
    dense = torch.full_like(g, 7.0)
    for token in range(m):
        for tile in range(words.shape[1]):
            gates = g[token, tile * tiles.tile : (tile + 1) * tiles.tile]
            active = (~(gates <= 0)).nonzero()[:, 0]
            words[token, tile, 0] = len(active)
            if len(active) > tiles.capacity:
                dense[token, tile * tiles.tile :][: len(gates)] = gates.where(~(gates <= 0), 0)
                continue
            active = active[torch.randperm(len(active))]
            values = gates[active].view(torch.int16).int() << 16
            words[token, tile, 1 : len(active) + 1] = values | (active + tile * tiles.tile).int()
    return dense, words


# m, n, k, fraction of active units, split, limit. The cases cover a last group with few tokens,
# fewer units than threads, full and partial steps, groups of one step, k up to 1024, 2048 and more.
CASES = [
    (11, 48, 72, 0.2, 1, 48),
    (5, 200, 264, 0.3, 2, 200),
    (17, 1088, 136, 0.05, 4, 1088),
    (3, 72, 520, 0.5, 8, 72),
    (20, 400, 512, 0.1, 2, 220),
    (8, 64, 1032, 1.0, 1, 64),
    (61, 160, 200, 0.03, 1, 30),
    (9, 56, 2056, 0.3, 1, 56),
    (40, 96, 4096, 0.04, 1, 24),
    (100, 96, 72, 0.01, 1, 96),
]
# The same with `alone`: units for only one CTA of a cluster, several lists per group, no active
# units, 320 columns per warp, and two halves of 192.
ALONE = [
    (11, 48, 72, 0.2, 2, None),
    (5, 3600, 72, 1.0, 2, None),
    (9, 1096, 264, 0.0, 3, None),
    (8, 200, 2560, 0.1, 2, None),
    (20, 1088, 1032, 0.05, 7, None),
    (3, 72, 3064, 0.5, 2, None),
    (33, 2056, 72, 0.03, 8, None),
    (17, 1800, 72, 0.9, 3, None),
]
# dtype, squared, gated, the tiles that store G
WHOLE = [
    ("bf16", False, True, None),
    ("fp16", True, False, None),
    ("fp16", True, True, None),
    ("bf16", False, False, None),
]
IN_TILES = [
    ("bf16", False, True, Tiles(256, 31)),
    ("fp16", True, False, Tiles(64, 7)),
    ("bf16", True, True, Tiles(128, 3)),
]
PAIRS = [(case, WHOLE[i % 4]) for i, case in enumerate(CASES)]
PAIRS += [(case, IN_TILES[i % 3]) for i, case in enumerate(CASES)]
PAIRS += [(case, WHOLE[i % 4]) for i, case in enumerate(ALONE)]


@needs_gxx
@pytest.mark.parametrize(("case", "kind"), sampled(PAIRS, 0, 1, 2, 10, 12, 20, 21, 23), ids=str)
def test_threads_on_a_cpu_compute_the_layer(case, kind) -> None:
    (m, n, k, fraction, split, limit), (dtype, squared, gated, tiles) = case, kind
    torch.manual_seed(0)
    stored_dtype = DTYPES[dtype]
    x, wu, wd_t = (torch.randn(*size).to(stored_dtype) for size in ((m, k), (n, k), (n, k)))
    g = torch.where(torch.rand(m, n) < fraction, torch.rand(m, n), -torch.rand(m, n)).to(
        stored_dtype
    )
    g[1] = 0  # a token without a unit
    g[2, 3] = float("nan")
    y, rest = torch.full_like(x, 7.0), _remainder.rest_of(m, 1, CPU)
    stored, words = gate_in_tiles(g, tiles) if tiles else (g, g)
    gates = torch.full((16, _grouped.LISTS * _grouped.MOST_ROWS * 8), 7.0, dtype=stored_dtype)
    tensors = x, stored, wu, wd_t, y, rest.left, rest.heavy, words, gates
    pointers = (ctypes.c_void_p * 9)(*(t.data_ptr() for t in tensors))
    alone = limit is None
    bytes_ = ctypes.c_size_t(_grouped.shared_bytes(k, alone))
    sizes = (ctypes.c_int * 3)(m, n, 0 if alone else limit)
    constants = _grouped.constants_of(k, split, squared, gated, stored_dtype, tiles, alone)
    groups = len(rest.heavy)
    grid = groups * split if split > 1 else min(2, groups)
    on_cpu(constants, late=squared).call(pointers, sizes, grid, bytes_)

    gate, up = g.double().relu(), x.double() @ wu.double().T if gated else 1
    h = (gate.square() if squared else gate) * up
    reference, spread = h @ wd_t.double(), (h.square() @ wd_t.double().square()).sqrt()
    group = torch.arange(m) // _remainder.GROUP
    rows = torch.stack([(~(g <= 0))[group == i].any(0).sum() for i in range(groups)])
    heavy = [] if alone else (rows > limit).nonzero()[:, 0].tolist()
    assert sorted(rest.heavy[: rest.left[0]].tolist()) == heavy
    left = torch.isin(group, torch.tensor(heavy))
    assert (y[left] == 7).all()
    if tiles:  # G of the groups that are left, for the dense products
        assert torch.equal(stored[left].nan_to_num(9999), g.clamp(min=0)[left].nan_to_num(9999))
    done = ~left & (torch.arange(m) != 2)
    assert y[2].isnan().all() or left[2]
    expected = Expected(reference[done], 2 * spread[done] + 1e-30, stored_dtype, n)
    assert (reason := check(y[done], expected).reason) is None, reason


# ---- Triton ----


@pytest.mark.interpreted
@pytest.mark.parametrize(("dtype", "squared"), [("fp16", False), ("fp32", True)])
@pytest.mark.parametrize(("m", "heavy"), [(21, [2, 0]), (150, [*range(19)]), (9, [])])
@pytest.mark.parametrize("gated", [True, False])
def test_interpreted_dense_products_write_the_groups_left(m, heavy, gated, dtype, squared):
    n, k, kind = 72, 40, DTYPES[dtype]
    torch.manual_seed(0)
    x, wu, wd, g = (torch.randn(*s).to(kind) for s in ((m, k), (n, k), (k, n), (m, n)))
    g[0, 0] = float("nan")
    rest, gates, y = _remainder.rest_of(m, 3, CPU), g.clone(), torch.full_like(x, 7.0)
    rest.left[2] = 5
    rest.left[0], rest.heavy[: len(heavy)] = len(heavy), torch.tensor(heavy, dtype=torch.int32)
    up = wu if gated else None
    for program in _remainder.products(x, g, up, wd.T.contiguous(), y, rest, squared=squared):
        program()

    gate, up = gates.double().relu(), x.double() @ wu.double().T if gated else 1
    h = (gate.square() if squared else gate) * up
    reference, spread = h @ wd.double().T, (h.square() @ wd.double().square().T).sqrt()
    written = torch.isin(torch.arange(m) // _remainder.GROUP, torch.tensor(heavy))
    assert (y[~written] == 7).all()
    assert not written[0] or y[0].isnan().all()
    written[0] = False
    expected = Expected(reference[written], 2 * spread[written] + 1e-30, kind, n)
    assert (reason := check(y[written], expected).reason) is None, reason
    assert rest.left.tolist() == [0, 0, 0]


@pytest.mark.interpreted
@pytest.mark.parametrize("path", ["tma", "pointers"])
@pytest.mark.parametrize("activation", ["silu", "relu", "relu2"])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_interpreted_fused_gate_and_up_are_correct(dtype, activation, path):
    case = operands_for(problem(19, 72, 40, dtype, activation=activation))
    x = case.activations["x"]
    wg, wu, wd = (case.weights[name].to_dense() for name in ("wg", "wu", "wd"))
    configs = ffn_dense_triton.configurations(len(x), x.element_size(), path)
    for config in configs:
        h = ffn_dense_triton.launch(x, wg, wu, config, activation)()
        assert_correct(torch.mm(h, wd.t()), case)


def empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


@pytest.mark.compiles
@pytest.mark.parametrize("m", [1, 16, 64, 300, 4096])
def test_the_dense_products_compile_for_any_number_of_tokens(m: int) -> None:
    n, k = 5632, 2048
    rest = _remainder.rest_of(m, 132, torch.device("meta"))
    for wu in (empty(n, k), None):
        x, g, wd_t, y = empty(m, k), empty(m, n), empty(n, k), empty(m, k)
        for program in _remainder.products(x, g, wu, wd_t, y, rest, squared=m == 300):
            assert complaint_about_launch(program, 90) is None


@pytest.mark.compiles
@pytest.mark.parametrize("m", [1, 64, 300, 4096])
def test_fused_gate_and_up_compile_in_every_configuration(m: int) -> None:
    x, w = empty(m, 2048), empty(5632, 2048)
    for path in ("tma", "pointers"):
        for config in ffn_dense_triton.configurations(m, 2, path):
            program = ffn_dense_triton.launch(x, w, w, config, "relu2")
            assert complaint_about_launch(program, 90) is None


# ---- torch.compile ----


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(Unsupported, match="option mode: expected one of default, max-autotune"):
        torch_compile.prepare(operands_for(problem(2, 8, 8, "fp32")), mode="fast")


@needs_gxx
def test_a_compiled_definition_follows_its_activations() -> None:
    case = operands_for(problem(3, 24, 16, "fp32"))
    launch = torch_compile.prepare(case)
    redraw(case.problem, OP, case.activations, 1)
    assert_correct(launch(), case)
    assert launch.choice == {"mode": "default"}


# ---- on a GPU ----

GPU = torch.device("cuda", 0)
SHAPES = [(1, 512, 256), (3, 1000, 200), (16, 5632, 2048), (33, 520, 1032), (77, 1408, 512)]
SHAPES += [(300, 2056, 2048), (1500, 1024, 2048), (2500, 520, 4096), (130, 14336, 4096)]
GATES = "library", Tiles(), Tiles(64, 7)


def layer(case: Operands, way: ffn_sparse.Way | Tiles) -> Launch:
    """Prepare a layer in groups of tokens, with its gate stored in tiles or by a library."""
    if isinstance(way, Tiles):
        return ffn_twell.prepare(case, tile=way.tile, capacity=way.capacity)
    kernel = ffn_sparse if case.problem.op == "ffn" else mlp_sparse
    return kernel.prepare(case, way=way)


@hopper
@pytest.mark.parametrize(
    ("dtype", "activation", "skew"), [("bf16", "relu", "iid"), ("fp16", "relu2", "correlated")]
)
@pytest.mark.parametrize(
    ("op", "way", "shape"),
    [(op, "library", shape) for op in ("ffn", "mlp") for shape in SHAPES]
    + [("ffn", tiles, shape) for tiles in GATES[1:] for shape in SHAPES if shape[0] > 64],
    ids=str,
)
def test_any_number_of_active_units_is_correct_on_a_gpu(op, way, shape, dtype, activation, skew):
    for active in (1, shape[1] / 64, shape[1] / 2):
        task = problem(*shape, dtype, op, activation=activation, active=active, skew=skew)
        case = operands_for(task, GPU)
        launch = layer(case, way)
        for draw in (1, 2):
            redraw(task, load_op(op), case.activations, draw)
            assert_correct(launch(), case)
            assert torch.equal(launch().clone(), launch())


@hopper
def test_a_pinned_choice_is_repeated_on_a_gpu() -> None:
    for active in (8, 600):
        case = gpu_case(active=active)
        for way in get_args(ffn_sparse.Way):
            if way == "few":
                continue
            launch = ffn_sparse.prepare(case, way=way)
            again = ffn_sparse.prepare(replace(case, pinned=launch.choice))
            assert again.choice == launch.choice
            assert way in ("best", "sparse", launch.choice["way"])
            redraw(case.problem, OP, case.activations, 1)
            assert_correct(again(), case)
    case = gpu_case(64)
    launch = ffn_sparse.prepare(case, way="few")
    few = {"chosen": "cvse, ffn_few", "way": "few"}
    assert few.items() <= launch.choice.items()
    assert torch.equal(ffn_few.prepare(case)(), launch())
    assert_correct(ffn_sparse.prepare(replace(case, pinned=launch.choice))(), case)
    assert ffn_sparse.prepare(case, way="sparse").choice["way"] in ("few", "alone")
    task = problem(300, 1024, 512, op="mlp", active=8)
    launch = mlp_sparse.prepare(operands_for(task, GPU))
    again = mlp_sparse.prepare(replace(operands_for(task, GPU), pinned=launch.choice))
    assert again.choice == launch.choice


def test_unknown_ways_are_refused() -> None:
    case = operands_for(problem(4, 64, 32))
    with pytest.raises(Unsupported, match=r"expected one of best, sparse"):
        ffn_sparse.prepare(case, way="dense")
    with pytest.raises(Unsupported, match="use library"):
        ffn_sparse.prepare(case, way="packed")
    with pytest.raises(Unsupported, match="use library"):
        ffn_sparse.prepare(replace(case, pinned={"way": "packed"}))


def gpu_case(m: int = 300, active: float = 8) -> Operands:
    return operands_for(problem(m, 1024, 512, active=active), GPU)


@hopper
@pytest.mark.parametrize("way", GATES, ids=str)
def test_full_empty_and_heavy_tokens_are_correct_on_a_gpu(way: ffn_sparse.Way | Tiles) -> None:
    case = gpu_case()
    wg, x = case.weights["wg"].values, case.activations["x"]
    wg[:, 1] = 1.0  # column 1 of X shifts every gate of a token
    x[:, 1] = 0
    x[5, 1], x[6, 1], x[40:48, 1] = 100, -100, 100  # all units active, none, a group of eight
    y = layer(case, way)()
    assert_correct(y, case)
    assert (y[6] == 0).all()
    wg[256:, 0] = -100  # all active units are in one tile of 256
    wg[:256, 0] = 100
    assert_correct(layer(case, way)(), case)


@hopper
@pytest.mark.parametrize("way", GATES, ids=str)
def test_nan_stays_in_its_token_on_a_gpu(way: ffn_sparse.Way | Tiles) -> None:
    case = gpu_case()
    launch = layer(case, way)
    right = launch().clone()
    case.activations["x"][7, 3] = float("nan")
    y = launch()
    others = torch.arange(len(y), device=GPU) // 8 != 0
    assert y[7].isnan().all()
    assert torch.equal(y[others], right[others])
    assert y[:7].isfinite().all()


@hopper
@pytest.mark.parametrize("way", GATES, ids=str)
@pytest.mark.parametrize("active", [8, 600])
def test_a_graph_replays_a_layer_on_a_gpu(active: float, way: ffn_sparse.Way | Tiles) -> None:
    case = gpu_case(active=active)
    launch = layer(case, way)
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = launch()
    for draw in (1, 2):
        redraw(case.problem, OP, case.activations, draw)
        graph.replay()
        assert_correct(y, case)


@hopper
@pytest.mark.parametrize("kernel", [ffn_dense_triton, torch_compile])
@pytest.mark.parametrize("m", [1, 33, 300, 2000])
@pytest.mark.parametrize("activation", ["silu", "relu", "relu2"])
def test_dense_kernels_are_correct_on_a_gpu(kernel: Any, m: int, activation: str) -> None:
    case = operands_for(problem(m, 1024, 512, activation=activation), GPU)
    launch = kernel.prepare(case)
    redraw(case.problem, OP, case.activations, 1)
    assert_correct(launch(), case)
    assert_correct(kernel.prepare(replace(case, pinned=launch.choice))(), case)
