"""Gated feed-forward layer with few active units, relu or relu2, on Hopper: a portfolio.

The option `way` says which kernels are timed, on the activations that `prepare` receives:

    way       kernels
    library   _grouped.py: groups of eight tokens, after a gate by torch
    sparse    the same, and ffn_few.py up to 64 tokens
    best      `sparse`, and the dense kernels cublas and ffn_dense_triton

`Launch.choice` has the name of the fastest, as `chosen`.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Literal

from sparsebench.errors import Unsupported
from sparsebench.kernels._common.operator import Earlier, launch_of
from sparsebench.kernels._common.search import lines_of, part_of, search
from sparsebench.kernels._kernel import Launch, Operands, Portfolio
from sparsebench.kernels.dense import cublas, ffn_dense_triton
from sparsebench.kernels.twell import _grouped, ffn_few
from sparsebench.kernels.twell._call import bind, unsupported

Way = Literal["best", "sparse", "library"]
ENGINES = {"best": (ffn_few.KERNEL, _grouped.WHOLE), "library": (_grouped.WHOLE,)}
GONE = {"few": "ffn_few", "alone": "way=library", "packed": "way=library"}
DENSE = {"cublas": cublas, "ffn_dense_triton": ffn_dense_triton}


def prepare(operands: Operands, *, way: Way = "best") -> Launch:
    """Prepare the kernels of a way, and keep the fastest. Raises Unsupported."""
    return fastest_of(operands, way, DENSE)


def fastest_of(operands: Operands, way: Way, dense: Mapping[str, ModuleType]) -> Launch:
    """Return the fastest launch of a way, or the pinned one; `dense` are the dense kernels."""
    if way not in ("best", "sparse", "library"):
        advice = f"; use {GONE[way]}" if way in GONE else ""
        raise Unsupported(f"option way: expected best, sparse or library, found {way!r}{advice}")
    pinned = (operands.pinned or {}).get("chosen")
    launches = []
    if not pinned or pinned.startswith("cvse"):
        launches.append(_sparse(operands, way))
    for name, module in dense.items() if way == "best" else ():
        if pinned in (None, f"dense, {name}"):
            launches.append(_dense(operands, f"dense, {name}", module))
    result = search(launches, operands.device)
    choices = [{"chosen": launch.choice["chosen"]} for launch in launches]
    parts = [line for launch in launches for line in launch.candidates]
    return replace(launches[result.best], candidates=[*result.lines(choices, of="layers"), *parts])


def _sparse(operands: Operands, way: Way) -> Launch:
    """Return the launch of the engine that is the fastest."""
    op, engines = operands.problem.op, ENGINES.get(way, ENGINES["best"])
    part = f"cvse, {op}_sparse"
    pinned = {name: value for name, value in (operands.pinned or {}).items() if name != "chosen"}
    bound = bind(operands, engines, lambda call: engines)
    selected = bound.select(Earlier(pinned or None, part_of(part, operands.timed)))
    launch = launch_of(selected, bound.run(selected.product))
    few = selected.choice["kernel"] == "ffn_few"
    chosen = f"cvse, {op}_few" if few else f"{part} way=library"
    choice = {"chosen": chosen, **launch.choice}
    return replace(launch, choice=choice, candidates=lines_of(part, launch))


def _dense(operands: Operands, name: str, module: ModuleType) -> Launch:
    pinned, timed = (operands.pinned or {}).get("dense"), part_of(name, operands.timed)
    launch: Launch = module.prepare(replace(operands, pinned=pinned, timed=timed))
    choice = {"chosen": name, "dense": launch.choice}
    return replace(launch, choice=choice, candidates=lines_of(name, launch))


KERNEL = Portfolio("ffn", "cvse", "cuda", prepare, unsupported)
