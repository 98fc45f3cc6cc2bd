"""A server answers with the logits of `generate`, and refuses in one line."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", reason="needs the extra `models`")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from sparsebench.errors import Unsupported  # noqa: E402
from sparsebench.harness.bench import correctness  # noqa: E402
from sparsebench.harness.bench.correctness import Expected  # noqa: E402
from sparsebench.harness.bench.operands import ChainLayer, operands  # noqa: E402
from sparsebench.harness.bench.output_checks import right_answer  # noqa: E402
from sparsebench.harness.bench.prepare import operands_of, weights_in_format  # noqa: E402
from sparsebench.harness.catalog import load_op  # noqa: E402
from sparsebench.kernels._kernel import Launch, poison  # noqa: E402
from sparsebench.kernels.nn import serving_transformers as serving  # noqa: E402
from sparsebench.results.record import Contender, Problem  # noqa: E402

OP = load_op("serving")
SIZES = {
    "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate": 256, "vocab": 96,
    "layers": 2, "of_layers": 2, "dtype": "bf16", "pattern": "two_four_blocks", "block": 16,
    "sparsity": 0.875,
}  # fmt: skip
HALF = {"dense_fraction": 0.5, "split": "rows", "wd.split": "columns"}
CONTENDERS = {
    "dense": Contender("dense", "serving_transformers"),
    "2:4": Contender("spense", "serving_transformers"),
    "half 2:4": Contender("spense", "serving_transformers", HALF),
    "blocks": Contender("bsr", "serving_transformers", {"block": 16}),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def problem_of(**fields: Any) -> Problem:
    return Problem("serving", {**OP.defaults, **SIZES, **fields}, defaults=OP.defaults)


@contextmanager
def served(kind: str, device: str, **fields: Any) -> Iterator[tuple[Launch, ChainLayer]]:
    """Yield a server of a tiny model, and its operands; end its thread."""
    problem = problem_of(**fields)
    layer = ChainLayer(problem, operands(problem, OP, torch.device(device), None))
    weights = dict(weights_in_format(layer, CONTENDERS[kind]))
    launch = serving.prepare(operands_of(layer, weights, None), chunk=64)
    try:
        yield launch, layer
    finally:
        launch.run.__self__.close()  # type: ignore[attr-defined]


def generated(launch: Launch, layer: ChainLayer, number: int) -> Tensor:
    """Return the last logits of `generate` for one request, whose new tokens are forced."""
    server = launch.run.__self__  # type: ignore[attr-defined]
    model, (prompt, new) = server.manager.model, server.load.lengths[number]
    tokens = layer.dense.activations["tokens"][number, : prompt + new - 1].long()

    def force(ids: Tensor, logits: Tensor) -> Tensor:
        length = ids.shape[1]
        forced = logits.new_full(logits.shape, -torch.inf)
        forced[:, tokens[length] if length < len(tokens) else 0] = 0
        return forced

    model.set_attn_implementation("sdpa")
    hook = model._forward_hooks.popitem()
    try:
        out = model.generate(
            tokens[None, :prompt],
            attention_mask=torch.ones_like(tokens[None, :prompt]),
            logits_processor=transformers.LogitsProcessorList([force]),
            max_new_tokens=new,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    finally:
        model._forward_hooks[hook[0]] = hook[1]
    last: Tensor = out.logits[-1][0]
    return last


def element_bound(right: Expected) -> Tensor:
    """Return the largest error of each element that the contest accepts."""
    element = right.products + right.intermediates + right.accumulated
    unrounded = right.spread * (correctness.ELEMENT * element)
    return correctness.half_ulp(right.reference.abs() + unrounded, right.dtype) + unrounded


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", CONTENDERS)
def test_served_logits_are_those_of_generate(kind: str, device: str) -> None:
    with served(kind, device, concurrency=2, requests=3) as (launch, layer):
        poison(launch())
        y = launch()
        right = right_answer(OP, layer, CONTENDERS[kind], None)
        of_generate = torch.stack([generated(launch, layer, number) for number in range(3)])
    bound = element_bound(right)
    for out in (y, of_generate):
        assert bool(((out.double() - right.reference).abs() <= bound).all())
    assert bool(((y.double() - of_generate.double()).abs() <= 2 * bound).all())


@pytest.mark.parametrize("device", DEVICES)
def test_a_server_reads_prompts_in_every_call(device: str) -> None:
    with served("2:4", device, concurrency=2, requests=2) as (launch, layer):
        before = launch().clone()
        fresh = operands(replace(layer.problem, seed=1), OP, torch.device(device), None)
        layer.dense.activations["tokens"].copy_(fresh.activations["tokens"])
        after = launch().clone()
        assert not torch.equal(before, after)
        assert launch.readings is not None
        readings = launch.readings()
    assert readings.keys() == set(OP.readings)
    assert all(us > 0 for us in readings.values())


@pytest.mark.parametrize("device", DEVICES)
def test_a_server_that_has_ended_keeps_no_graph(device: str) -> None:
    with served("dense", device, concurrency=1, requests=1) as (launch, _):
        launch()
        server = launch.run.__self__  # type: ignore[attr-defined]
        runner = weakref.ref(server.manager.batch_processor.model_runner)
    assert runner() is None


def test_a_pool_of_memory_is_kept_while_a_graph_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "POOLS", [])
    users = {"first": 2, "second": 1}

    def manager_of(name: str) -> Any:
        pool = SimpleNamespace(use_count=lambda: users[name])
        processor = SimpleNamespace(model_runner=SimpleNamespace(mem_pool=pool))
        nothing = lambda **_: None  # noqa: E731
        return SimpleNamespace(batch_processor=processor, stop=nothing, destroy=nothing)

    serving.stop(manager_of("first"))
    assert len(serving.POOLS) == 1
    users["first"] = 1
    serving.stop(manager_of("second"))
    assert not serving.POOLS


def test_another_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, cpu = problem_of(concurrency=1, requests=1), torch.device("cpu")
    assert serving.unsupported(problem, cpu) is None
    monkeypatch.setattr(serving, "version", lambda name: "6.0.1")
    reason = serving.unsupported(problem, cpu)
    assert reason is not None
    assert "5.17 to 5.23" in reason
    assert "6.0.1" in reason


@pytest.mark.gpu
def test_a_cache_that_does_not_fit_is_refused() -> None:
    many = {"concurrency": 2048, "requests": 2048, "vocab": 8192}
    sizes = {"head_dim": 128, "heads": 32, "kv_heads": 32, "layers": 64, "of_layers": 64}
    with pytest.raises(Unsupported, match="pages"), served("dense", "cuda", **many, **sizes):
        pass
