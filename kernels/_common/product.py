"""Plan the candidates for one call, and time those that can run.

A candidate is an engine with one configuration. `plan_first` takes the first that can run, and
`search_product` the fastest.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, islice, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._common.search import REASON, search

BUILDERS = 8  # threads that make plans, and compile
TRIED = 16  # candidates that a search times
MOST_CONFIGS = 6  # configurations of an engine with many


@dataclass(frozen=True, eq=False)
class Product:
    """A planned call.

    run    (*operands, out=None) -> the result, a new tensor or `out`, on torch's current stream
    code   digest of the machine code, or None
    pack   makes what `run` reads of the weight's values; None if it reads them as stored
    order  identifies what `pack` makes, so that products which read the same can share it
    """

    run: Callable[..., Any]
    code: str | None = None
    pack: Callable[[Tensor], Tensor] | None = None
    order: Hashable | None = None

    def packed(self, values: Tensor) -> Tensor:
        """Return what `run` reads of these values."""
        return values if self.pack is None else self.pack(values)


Workload = Callable[[Product], Callable[[], object]]
"""(product) -> the call that a search times, on operands of the caller."""


class Candidate(NamedTuple):
    """An engine, its configuration, and a function that plans it. Raises Unsupported."""

    kernel: str
    config: Any
    plan: Callable[[], Product]

    @property
    def choice(self) -> dict[str, Any]:
        """Return the kernel and the fields of the configuration, as rows have them."""
        return {"kernel": self.kernel, **asdict(self.config)}


@dataclass(frozen=True)
class Selected:
    """A planned product, why it was chosen (`by`), its problem, and what was timed for it."""

    product: Product
    choice: Mapping[str, Any]
    by: str
    problem: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]] = ()

    @property
    def row(self) -> dict[str, Any]:
        """Return the choice as a row has it, from which tests/tools/choices.py makes a list."""
        code = {"code": self.product.code} if self.product.code else {}
        return {**self.choice, "by": self.by, "problem": dict(self.problem), **code}


def plan_first(
    engines: Iterable[Iterable[Candidate]], by: str, problem: Mapping[str, Any]
) -> Selected:
    """Plan the first candidate that can run. Raises Unsupported with all reasons."""
    reasons: list[str] = []
    for candidate in chain.from_iterable(_offers(engine, reasons) for engine in engines):
        try:
            return Selected(candidate.plan(), candidate.choice, by, problem)
        except Unsupported as error:
            reasons.append(str(error))
    raise Unsupported(
        "; ".join(dict.fromkeys(reasons)) or "expected a configuration that can run it, found none"
    )


def _offers(engine: Iterable[Candidate], reasons: list[str]) -> Iterator[Candidate]:
    """Yield what an engine offers until it raises Unsupported, and list why."""
    try:
        yield from engine
    except Unsupported as error:
        reasons.append(str(error))


def _distinct(candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    seen = set()
    for candidate in candidates:
        if (key := (candidate.kernel, candidate.config)) not in seen:
            seen.add(key)
            yield candidate


def search_product(
    engines: Sequence[Iterable[Candidate]],
    workload: Workload,
    device: torch.device,
    problem: Mapping[str, Any],
) -> Selected:
    """Plan candidates in threads, time those that can run, and return the fastest.

    They are the best of each engine, then the second best of each, and so on.
    """
    reasons: list[str] = []
    ranked = chain.from_iterable(zip_longest(*[_offers(engine, reasons) for engine in engines]))
    candidates = list(islice(_distinct(filter(None, ranked)), TRIED))
    start = partial(torch.cuda.synchronize, device)  # makes the device's context current
    with ThreadPoolExecutor(BUILDERS, "", start) as pool:
        products = list(pool.map(partial(_attempt, device=device), candidates))
    runnable = [(c, p) for c, p in zip(candidates, products, strict=True) if not isinstance(p, str)]
    failures = [
        {"choice": candidate.choice, "failed": reason}
        for candidate, reason in zip(candidates, products, strict=True)
        if isinstance(reason, str)
    ]
    if not runnable:
        return plan_first([candidates], "search", problem)  # raises with the reasons
    if len(runnable) == 1:
        return Selected(runnable[0][1], runnable[0][0].choice, "search", problem, failures)
    with torch.no_grad():
        result = search([workload(product) for _, product in runnable], device)
    lines = result.lines([candidate.choice for candidate, _ in runnable], whole=True)
    best, product = runnable[result.best]
    return Selected(product, best.choice, "search", problem, [*lines, *failures])


def _attempt(candidate: Candidate, device: torch.device) -> Product | str:
    """Return the planned product, or why it cannot be planned."""
    try:
        with torch.cuda.device(device):
            return candidate.plan()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:REASON]
