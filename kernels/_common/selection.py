"""Choose how to run a product: kernels ("engines") offer candidates, and the fastest is kept.

    pinned            in a run: the choice of an earlier process, taken again
    user's cache      what a search found on this GPU with this code, for these sizes; in a run
                      only what this process itself found, so that each process searches anew
    package's list    the same, from published runs (kernels/tuned/*.choices), while the machine
                      code is the one that was measured
    search            times the candidates once, on the operands of the call; in a later process
                      of a run only those that were near the fastest in the first (`finalists`)
    nearest           if no search is allowed: the entry of a list nearest in size, up to twice
    model             else the first candidate: engines order theirs by the bytes they load

A search also times the choices for more tokens of the same weight (choice_lists.py), so that fewer
tokens do not take longer. No choice affects a result: plans are always made for the weight at hand.
If a listed choice cannot run that weight, what a search finds for it is a line with "fits": false,
so that weights of the same sizes which the choice fits keep theirs.

A search is never made while a CUDA graph is captured. SPARSEBENCH_SEARCH=0 switches it off.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, islice, zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._common import choice_lists
from sparsebench.kernels._common.capture import make_lasting
from sparsebench.kernels._common.search import REASON, finalists, part_of, search

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PLANS = 64  # that a weight keeps: the ones made last
BUILDERS = 8  # threads that make plans, and compile
TRIED = 16  # candidates that a search times
BESIDE = "by", "kernel", "problem", "code"  # fields of a choice beside the configuration's


class Product(Protocol):
    """A planned product: `run` returns a new tensor, on torch's current stream.

    code   digest of the machine code, or None
    pack   makes what `run` reads of the weight's values; None if it reads them as stored
    order  identifies what `pack` makes; None without `pack`
    """

    @property
    def code(self) -> str | None: ...
    @property
    def pack(self) -> Callable[[Tensor], Tensor] | None: ...
    @property
    def order(self) -> Hashable | None: ...
    @property
    def run(self) -> Callable[..., Tensor]: ...


class Earlier(NamedTuple):
    """What earlier processes of a run chose and timed; (None, ()) in the first process.

    choice  is taken again without a search
    lines   Selected.lines of the first process
    """

    choice: Mapping[str, Any] | None
    lines: Sequence[Mapping[str, Any]]

    def part(self, name: str) -> "Earlier":
        """Return the same for one product of a layer."""
        return Earlier((self.choice or {}).get(name), part_of(name, self.lines))


Timed = Callable[[Product], Callable[[], object]]
"""Returns the call of a product that a search times, on operands of the caller."""


class Candidate(NamedTuple):
    """A kernel, its configuration, and a function that plans it. Raises Unsupported."""

    kernel: str
    config: "DataclassInstance"
    plan: Callable[[], Product]

    @property
    def choice(self) -> dict[str, Any]:
        """Return the kernel and the fields of the configuration, as rows have them."""
        return {"kernel": self.kernel, **asdict(self.config)}


@dataclass(frozen=True)
class NoConfig:
    """The configuration of a candidate that has none, such as a dense product in torch."""


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


@dataclass(eq=False)
class Operator:
    """The plans of a weight, made once for each call.

    engines  names of all kernels that `offer` may name; their code decides which file is read
    offer    (call, choice or None) -> for each engine its candidates, the likeliest engines and
             candidates first; only the one that a choice names, if any. Raises Unsupported
    problem  (call) -> sizes and layout, as a line of the cache has them
    device   of the weight
    plans    by call, the one made last at the end
    """

    engines: tuple[str, ...]
    offer: Callable[[Any, Mapping[str, Any] | None], Sequence[Iterable[Candidate]]]
    problem: Callable[[Any], dict[str, Any]]
    device: torch.device
    plans: OrderedDict[Hashable, Selected] = field(default_factory=OrderedDict)

    def select(
        self, call: Hashable, timed: Timed | None = None, earlier: Earlier | None = None
    ) -> Selected:
        """Return the plan of a call, which the first call makes. Raises Unsupported, RuntimeError.

        timed    what a search times; None forbids it
        earlier  in a run of a suite; None in a call of a user, which takes the user's cache
        """
        if (selected := self.plans.get(call)) is not None:
            return selected
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self.problem(call)} is not planned: call it once before capturing a CUDA graph"
            )
        choose = partial(self._choose, call, timed, earlier)
        selected = self.plans[call] = make_lasting(choose, self.device)
        while len(self.plans) > PLANS:
            self.plans.popitem(last=False)
        return selected

    def _choose(self, call: Hashable, timed: Timed | None, earlier: Earlier | None) -> Selected:
        if self.device.type != "cuda":
            return _plan_first(self.offer(call, None), "model", {})
        problem = self.problem(call)
        if earlier and (pinned := earlier.choice):
            by = str(pinned.get("by", "pinned"))
            return _plan_first([self._matching(call, pinned)], by, problem)
        file = choice_lists.user_file(self.device, self.engines)
        cached = choice_lists.read(file) if earlier is None else choice_lists.process_choices(file)
        lists = {"cache": cached, "package": choice_lists.package(self.device)}
        selected, fits = self._from_lists(call, problem, lists)
        line = problem if fits else {**problem, "fits": False}
        if selected is None and not fits:
            selected, _ = self._from_lists(call, line, lists)
        if selected is not None:
            return selected
        if timed and may_search():
            larger = choice_lists.larger(
                problem, chain.from_iterable(each.items() for each in lists.values())
            )
            more = [c for choice in larger for c in self._matching(call, choice)]
            near = finalists(earlier.lines) if earlier else []
            again = [c for choice in near for c in self._matching(call, choice)]
            offered = [more, again] if again else [more, *self.offer(call, None)]
            selected = _search(offered, timed, self.device, line)
            choice_lists.append(file, line, selected.choice)
            return selected
        nearest = choice_lists.nearest(
            problem, chain.from_iterable(each.items() for each in lists.values())
        )
        if close := self._matching(call, nearest):
            with suppress(Unsupported):
                return _plan_first([close], "nearest", problem)
        return _plan_first(self.offer(call, None), "model", problem)

    def _from_lists(
        self, call: Hashable, problem: Mapping[str, Any], lists: Mapping[str, choice_lists.Choices]
    ) -> tuple[Selected | None, bool]:
        """Return the plan of the first listed choice that runs, and whether those before it do.

        One that was chosen for another weight of these sizes may not: a bitmap's records take more
        shared memory if a tile is dense.
        """
        fits = True
        for by, choices in lists.items():
            choice = choices.get(choice_lists.key(problem), {})
            if same := self._matching(call, choice):
                try:
                    selected = _plan_first([same], by, problem)
                except Unsupported:
                    fits = False
                    continue
                if choice.get("code") in (None, selected.product.code):
                    return selected, fits
        return None, fits

    def _matching(self, call: Hashable, choice: Mapping[str, Any] | None) -> list[Candidate]:
        """Return the candidate that a choice names, if there still is such a configuration."""
        if not choice or choice.get("kernel") not in self.engines:
            return []
        try:
            return [*chain.from_iterable(self.offer(call, choice))]
        except (TypeError, Unsupported):
            return []


def config_of(kernel: Any, choice: Mapping[str, Any]) -> Any:
    """Return the configuration of a choice, by the class Config of a kernel's module.

    Raises TypeError if the class has other fields.
    """
    return kernel.Config(**{k: v for k, v in choice.items() if k not in BESIDE})


def may_search() -> bool:
    """Return whether a first call may time candidates (SPARSEBENCH_SEARCH)."""
    return os.environ.get("SPARSEBENCH_SEARCH", "1") != "0"


def bucket(tokens: int) -> int:
    """Return the number of tokens that a plan is made for: the least of these that holds them.

    1, 8, 16, in steps of 16 to 256, and then eight numbers for each power of two. A plan for M
    tokens also multiplies fewer, so a new number of tokens costs nothing if its bucket is planned.
    """
    if tokens <= 8:
        return 1 if tokens <= 1 else 8
    step = 16 if tokens <= 256 else 1 << ((tokens - 1).bit_length() - 4)
    return -(-tokens // step) * step


# ---- making and timing candidates ----


def _plan_first(
    engines: Iterable[Iterable[Candidate]], by: str, problem: Mapping[str, Any]
) -> Selected:
    """Plan the first candidate that can run. Raises Unsupported with all reasons."""
    reasons: list[str] = []
    for candidate in chain.from_iterable(_offers(engine, reasons) for engine in engines):
        try:
            return Selected(candidate.plan(), candidate.choice, by, problem)
        except Unsupported as error:
            reasons.append(str(error))
    raise Unsupported("; ".join(dict.fromkeys(reasons)) or "no kernel can run it")


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


def _search(
    engines: Sequence[Iterable[Candidate]],
    timed: Timed,
    device: torch.device,
    problem: Mapping[str, Any],
) -> Selected:
    """Plan candidates in threads, time those that can run, and return the fastest.

    They are the best of each engine, then the second best of each, and so on.
    """
    reasons: list[str] = []
    ranked = chain.from_iterable(zip_longest(*[_offers(engine, reasons) for engine in engines]))
    offered = list(islice(_distinct(filter(None, ranked)), TRIED))
    start = partial(torch.cuda.synchronize, device)  # makes the device's context current
    with ThreadPoolExecutor(BUILDERS, "", start) as pool:
        products = list(pool.map(partial(_attempt, device=device), offered))
    running = [(c, p) for c, p in zip(offered, products, strict=True) if not isinstance(p, str)]
    failed = [
        {"choice": candidate.choice, "failed": reason}
        for candidate, reason in zip(offered, products, strict=True)
        if isinstance(reason, str)
    ]
    if not running:
        return _plan_first([offered], "search", problem)  # raises with the reasons
    if len(running) == 1:
        return Selected(running[0][1], running[0][0].choice, "search", problem, failed)
    with torch.no_grad():
        result = search([timed(product) for _, product in running], device)
    lines = result.lines([candidate.choice for candidate, _ in running], whole=True)
    best, product = running[result.best]
    return Selected(product, best.choice, "search", problem, [*lines, *failed])


def _attempt(candidate: Candidate, device: torch.device) -> Product | str:
    """Return the planned product, or why it cannot be planned."""
    try:
        with torch.cuda.device(device):
            return candidate.plan()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:REASON]
