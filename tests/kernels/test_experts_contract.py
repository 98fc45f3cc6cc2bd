"""The contract of engines of op experts and its gradients: exact products, whatever the ends."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from triton import knobs

from sparsebench._discovery import modules
from sparsebench.errors import Unsupported
from sparsebench.formats._format import Format
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.dense import Dense
from sparsebench.formats.spense import Spense
from sparsebench.harness.catalog import load_kernel, load_op
from sparsebench.kernels._common.operator import Engine
from sparsebench.kernels._common.triton import BoundKernel
from sparsebench.kernels._kernel import NAMES, Operands, output_dtype, poison, unsupported
from sparsebench.kernels.bsr import experts_triton, experts_triton_wgrad
from sparsebench.kernels.spense import experts_wgmma
from sparsebench.kernels.spense.experts_wgmma import SHAPES, TOKENS, ExpertsConfig
from sparsebench.results.record import Problem
from tests.compiling.nvcc import assert_compiles_cleanly, by_nvcc
from tests.compiling.triton_kernels import (
    assert_all_compile,
)
from tests.tools.marks import exhaustive, sampled

ENGINES: dict[str, Engine] = {
    name: engine
    for name in modules("kernels")
    if isinstance(engine := load_kernel(name), Engine) and engine.op.startswith("experts")
}
OPS = {name: load_op(name) for name in ("experts", "experts_dgrad", "experts_wgrad")}
FLOATS = torch.float16, torch.bfloat16, torch.float8_e4m3fn


class Example(NamedTuple):
    """Experts of n x k weights, rows of X, and where the rows of each expert end."""

    n: int
    k: int
    rows: int
    ends: tuple[int, ...]
    block: int = 64

    def weight(self, engine: Engine, dtype: torch.dtype, device: Any) -> tuple[Format, Tensor]:
        """Return small integers as the engine stores them, and dense."""
        random = torch.Generator().manual_seed(self.rows)
        shape = len(self.ends) * self.n, self.k
        w = torch.randint(1, 3, shape, generator=random)
        w *= 1 - 2 * torch.randint(2, shape, generator=random)
        if engine.consumes == "spense":
            order = torch.rand(shape[0], self.k // 4, 4, generator=random).argsort(-1)
            w *= (order < 2).view(shape)
        if engine.consumes == "bsr":
            stored = torch.rand(shape[0] // self.block, -(-self.k // self.block), generator=random)
            stored = (stored < 0.4).repeat_interleave(self.block, 0)
            w *= stored.repeat_interleave(self.block, 1)[:, : self.k]
        dense = w.to(dtype).to(device)
        formats: dict[str, Any] = {
            "spense": Spense.from_dense,
            "bsr": lambda w: Bsr.from_dense(w, block=self.block),
            "dense": Dense.from_dense,
        }
        return formats[engine.consumes](dense), dense


# No row; one; tiles that end at, before and behind their expert's last row; one expert has all;
# rows without an expert; ends that fall, and that lie outside.
EXAMPLES = [
    Example(64, 64, 9, (0, 0, 0, 0)),
    Example(128, 256, 1, (0, 1)),
    Example(192, 320, 300, (10, 26, 26, 70, 71, 103, 231, 300)),
    Example(320, 192, 270, (0, 270, 270), 32),
    Example(128, 128, 70, (16, 17, 49), 16),
    Example(64, 96, 37, (3, 3, 20, 18, 30), 32),
    Example(64, 64, 20, (-5, 25, 3, 40)),
    Example(64, 128, 513, tuple(range(2, 514, 2))),
    Example(64, 128, 900, tuple(range(0, 900, 2))),  # more than 256 experts
]


def bound_to(engine: Engine, example: Example, dtype: torch.dtype, device: Any) -> Any:
    """Return the call of an example, and the function of the right result at its present ends."""
    packed, dense = example.weight(engine, dtype, device)
    random = torch.Generator().manual_seed(example.rows + 1)
    about, count = OPS[engine.op], len(example.ends)
    a = {"ends": torch.tensor([example.ends], dtype=torch.int32, device=device)}
    for name, columns in {"x": example.k, "dy": example.n}.items():
        if name in about.activations:
            drawn = torch.randint(-1, 2, (example.rows, columns), generator=random)
            a[name] = drawn.to(dtype).to(device)
    fields = {"dtype": NAMES[dtype], "m": example.rows, "n": example.n, "k": example.k}
    problem = Problem(engine.op, fields | {"experts": count, "top_k": 1})
    weights = {} if about.pattern else {"w": packed}
    pattern = packed if about.pattern else None
    operands = Operands(problem, weights, a, about.definition, pattern=pattern)

    def right() -> Tensor:
        every = {"w": dense, **a}
        exact = {n: every[n] if n == "ends" else every[n].double() for n in about.arguments}
        y = about.definition(**exact, experts=count)
        if about.pattern:
            assert isinstance(packed, Bsr)
            y = packed.sample(y.to(dtype)).values
        return y.to(output_dtype(dtype))

    return engine.bind(operands, (engine,)), right


def run_engine(
    engine: Engine, dtype: torch.dtype, device: Any, examples: Any = None, most: int | None = None
) -> int:
    """Check all configurations, or the first, on all examples or some; return their number."""
    count = 0
    for example in examples or EXAMPLES:
        bound, right = bound_to(engine, example, dtype, device)
        weight = bound.operator.weight(bound.call)
        try:
            configs = engine.choices(weight, bound.call)[:most]
        except Unsupported:
            continue
        out = right()
        for config in configs:
            poison(out)
            product = engine.plan(weight, bound.call, config)
            y = product.run(*bound.activations, *bound.weights(product), out=out)
            assert torch.equal(y, right()), (example, config)
        count += len(configs)
    return count


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=NAMES.get)
@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_is_exact_whatever_the_ends(name: str, dtype: torch.dtype) -> None:
    engine, device = ENGINES[name], torch.device("cuda", 0)
    problem = Problem("experts", {"dtype": NAMES[dtype], "m": 1, "n": 64, "k": 64})
    if reason := unsupported(engine, problem, device):
        pytest.skip(reason)
    assert run_engine(engine, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ENGINES)
def test_a_captured_call_takes_other_ends(name: str) -> None:
    engine, example = ENGINES[name], EXAMPLES[2]
    bound, right = bound_to(engine, example, torch.bfloat16, "cuda")
    run, graph = bound.run(bound.select(None).product), torch.cuda.CUDAGraph()
    run()
    with torch.cuda.graph(graph):
        out = run()
    y = out.values if isinstance(out, Bsr) else out
    for ends in (example.ends, (0, 0, 300, 300, 300, 300, 300, 300), (1, 2, 3, 4, 5, 6, 7, 8)):
        bound.activations[-1].copy_(torch.tensor([ends]))
        poison(y)
        graph.replay()
        assert torch.equal(y, right()), ends


@pytest.mark.interpreted
@pytest.mark.parametrize("name", [name for name in ENGINES if "triton" in name])
def test_triton_kernels_are_exact_in_the_interpreter(name: str) -> None:
    assert knobs.runtime.interpret
    examples = EXAMPLES[:2] + EXAMPLES[4:7]
    assert run_engine(ENGINES[name], torch.float16, "cpu", examples, most=1) == len(examples)


GATED = [Example(128, 128, 70, (16, 17, 49), 32), Example(256, 96, 90, (3, 3, 70, 18, 80), 64)]


def run_gated(device: str, dtype: torch.dtype) -> None:
    """Check H of experts with gate above up in all configurations; both are small integers."""
    for example in GATED:
        engine = experts_triton.KERNEL
        plain, _ = bound_to(engine, example, dtype, device)
        dense, (x, ends) = example.weight(engine, dtype, device)[1], plain.activations
        y = OPS["experts"].definition(dense.double(), x.double(), ends, experts=len(example.ends))
        gate, up = y.chunk(2, 1)
        right = (gate.relu() * up).to(dtype)
        weight = plain.operator.weight(plain.call)
        call = plain.call._replace(activation="relu")
        for config in engine.choices(weight, call)[: None if device == "cuda" else 1]:
            product, out = engine.plan(weight, call, config), right.clone()
            poison(out)
            h = product.run(*plain.activations, *plain.weights(product), out=out)
            assert torch.equal(h, right), (example, config)


@pytest.mark.interpreted
def test_blocks_of_gate_above_up_give_hidden_units_in_the_interpreter() -> None:
    run_gated("cpu", torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS[:2], ids=NAMES.get)
def test_blocks_of_gate_above_up_give_hidden_units(dtype: torch.dtype) -> None:
    run_gated("cuda", dtype)


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_says_which_experts_it_cannot_multiply(name: str) -> None:
    engine = ENGINES[name]
    example = Example(72, 72, 9, (4, 9), 8)
    bound, _ = bound_to(engine, example, torch.bfloat16, "cpu")
    with pytest.raises(Unsupported, match=r"expected .*, found .*72"):
        engine.choices(bound.operator.weight(bound.call), bound.call)


@pytest.mark.compiles
@pytest.mark.parametrize("capability", [90, *map(exhaustive, [80, 100])])
def test_every_generation_compiles_the_triton_kernels(capability, monkeypatch) -> None:
    programs: list[BoundKernel] = []

    def product_of(bound: Any, operands: Any, *_: Any) -> None:
        programs.append(bound(*operands))

    for module in (experts_triton, experts_triton_wgrad):
        monkeypatch.setattr(module, "product_of", product_of)
    for path, block in (("tma", 64), ("tma", 128), ("pointers", 32))[2 * (capability < 90) :]:
        monkeypatch.setattr(experts_triton, "choose_path", lambda *_, path=path: path)
        for engine in [engine for name, engine in ENGINES.items() if "triton" in name]:
            example = Example(2 * block, 256, 100, (50, 100), block)
            bound, _ = bound_to(engine, example, torch.bfloat16, "cpu")
            weight = bound.operator.weight(bound.call)
            gated = {"activation": "silu"} if engine is experts_triton.KERNEL else {}
            for call in (bound.call, bound.call._replace(**gated)):
                for config in engine.choices(weight, call):
                    engine.plan(weight, call, config)
    assert_all_compile(programs, capability)


CONFIGS = [  # of experts_wgmma: each number of tokens, and of warpgroups
    *(ExpertsConfig(tokens, *shape) for shape in SHAPES for tokens in TOKENS),
]


@by_nvcc
@pytest.mark.parametrize(
    ("config", "dtype", "activation"),
    sampled(
        [
            (config, dtype, activation)
            for config in CONFIGS
            for dtype in FLOATS
            for activation in (None, "silu")
        ]
    ),
    ids=str,
)
def test_experts_wgmma_compiles_without_a_spill(config, dtype, activation, tmp_path) -> None:
    macros = experts_wgmma.macros_of(config, dtype, activation)
    assert_compiles_cleanly("experts_wgmma", macros, tmp_path)


@by_nvcc
@pytest.mark.parametrize("experts", [257, 1024])
def test_lists_of_more_experts_leave_less_memory_to_the_tiles(experts: int, tmp_path) -> None:
    macros = experts_wgmma.macros_of(CONFIGS[0], torch.bfloat16, None, experts)
    about = dict(macros)
    listed = about["MOST_EXPERTS"]
    assert listed == {257: 512, 1024: 1024}[experts]
    assert about["SHARED_BYTES"] + 8 * (listed + 1) <= 227 * 1024
    assert_compiles_cleanly("experts_wgmma", macros, tmp_path)
