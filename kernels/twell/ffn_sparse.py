"""Gated feed-forward layer with few active units, relu or relu2, on Hopper: a portfolio.

`prepare` times complete implementations of the layer on the activations that it receives, and keeps
the fastest. The option `way` selects which implementations are timed:

    way       implementations
    few       ffn_few.py        one launch, up to 64 tokens
    library   _grouped.py       groups of eight tokens, after a gate GEMM from a library
    alone     _grouped.py       like `library`, but without a dense fallback: up to 512 tokens
    sparse    `few` if it supports the sizes, otherwise `library`; plus `alone` for 33 to 512 tokens
    best      everything in `sparse`, plus the dense kernels cublas and ffn_dense_triton

`Launch.choice` names the fastest implementation, as `chosen` and `way`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Literal, get_args

from sparsebench.errors import Unsupported
from sparsebench.kernels._common.search import lines_of, part_of, search
from sparsebench.kernels._kernel import Launch, Operands, Portfolio
from sparsebench.kernels.dense import cublas, ffn_dense_triton
from sparsebench.kernels.twell import _grouped, ffn_few
from sparsebench.kernels.twell._layer import Layer, layer_of, unsupported

Way = Literal["best", "sparse", "library", "alone", "few"]
Name = Literal["few", "library", "alone", "dense"]

ALONE_FROM = 33  # tokens; up to 32, ffn_few.py reads less: there is no G

DENSE = {"cublas": cublas, "ffn_dense_triton": ffn_dense_triton}
OLDER = {"cublas_ffn": "cublas"}  # names of dense kernels in older rows


def prepare(operands: Operands, *, way: Way = "best") -> Launch:
    """Prepare every layer of a way, and keep the fastest. Raises Unsupported."""
    return fastest_of(operands, way, DENSE)


def fastest_of(operands: Operands, way: Way, dense: Mapping[str, ModuleType]) -> Launch:
    """Return the fastest of a way's layers, or the pinned one. Raises Unsupported.

    `dense` are the dense kernels of the op, by name.
    """
    pinned = operands.pinned["way"] if operands.pinned else None
    if "packed" in (way, pinned):
        raise Unsupported("option way: packed was removed, use library")
    if way not in get_args(Way):
        raise Unsupported(f"option way: expected one of {', '.join(get_args(Way))}, found {way!r}")
    layer = layer_of(operands)
    names = [pinned] if pinned else _names(way, layer)
    launches = [launch for name in names for launch in _launches(name, operands, layer, dense)]
    result = search(launches, operands.device)
    best = launches[result.best]
    layers = [{"chosen": launch.choice["chosen"]} for launch in launches]
    parts = [line for launch in launches for line in lines_of(launch.choice["chosen"], launch)]
    return replace(best, candidates=[*result.lines(layers, of="layers"), *parts])


def _names(way: Way, layer: Layer) -> list[Name]:
    """Return the names of the layers that a way includes."""
    if way != "best" and way != "sparse":  # as mypy narrows it
        return [way]
    sparse: list[Name] = ["library" if ffn_few.unsupported_sizes(*layer.sizes) else "few"]
    if ALONE_FROM <= len(layer.x) <= _grouped.MOST_ALONE:
        sparse.append("alone")
    return [*sparse, "dense"] if way == "best" else sparse


def _launches(
    name: Name, operands: Operands, layer: Layer, dense: Mapping[str, ModuleType]
) -> Iterator[Launch]:
    """Yield the launches of a named layer; the choice of each holds the name."""
    op, pinned = operands.problem.op, operands.pinned or {}
    if name == "few":
        launch = ffn_few.launch_of(layer, operands.pinned)
        yield _named(launch, f"cvse, {op}_few", way=name)
    elif name == "dense":
        for kernel, module in dense.items():
            if OLDER.get(by := pinned.get("by", kernel), by) == kernel:
                timed = part_of(f"dense, {kernel}", operands.timed)
                launch = module.prepare(replace(operands, pinned=pinned.get("dense"), timed=timed))
                choice = {"by": kernel, "dense": launch.choice}
                yield _named(replace(launch, choice=choice), f"dense, {kernel}", way=name)
    else:
        launch = _grouped.prepare(operands, layer, alone=name == "alone")
        yield _named(launch, f"cvse, {op}_sparse way={name}", way=name)


def _named(launch: Launch, chosen: str, way: str) -> Launch:
    return replace(launch, choice={"chosen": chosen, "way": way, **launch.choice})


KERNEL = Portfolio("ffn", "cvse", "cuda", prepare, unsupported)
