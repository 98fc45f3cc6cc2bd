"""Run our kernels: one object for suites, layers, `matmul` and the contender `default`.

    Engine    a kernel: which calls it can run, its configurations, and how it plans a call
    call      one product of a weight: how many tokens, which dtype, in which direction
    Product   a planned call, which is run with operands
    Operator  a weight and its engines: it plans each call once, with the fastest of them

An operator with all engines of an op is what layers, `matmul` and `default` run. An operator with
one engine is what a suite and `matmul(kernel=NAME)` run. The first of these plans a call:

    pinned            in a run: the choice of an earlier process, taken again
    checkpoint        what `sparsebench tune MODEL` wrote beside the weights (choices.py)
    user's cache      what a search found on this GPU with this code, for these sizes; in a run
                      only what this process itself found, so that each process searches anew
    package's list    the same, from published runs (kernels/tuned/*.choices), while the machine
                      code is the one that was measured
    search            in a run, and in `ahead(search=True)`: times the candidates once, on the
                      operands of the call; in a later process of a run only those that were near
                      the fastest in the first (`finalists`)
    nearest           without a search: the entry of a list nearest in size, up to twice
    model             else the first candidate: engines order theirs by the bytes they load
    larger            else, if no kernel for it is compiled: the product of the cover

A call of a user never waits for a search. If there is a plan for up to twice as many tokens, its
cover, it waits for nothing: the first time, the cover computes it, and the second time it gets a
plan of its own, of kernels that are compiled, in about a millisecond. It waits for a compiler only
without a cover, or `ahead`. A captured call is planned outside of the graph (capture.py).

A search also times the choices for more tokens of the same weight (choices.py), so that fewer
tokens do not take longer. No choice affects a result: plans are always made for the weight at hand.
A listed choice that cannot run that weight is passed over.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._common import choices as lists
from sparsebench.kernels._common.capture import make_lasting
from sparsebench.kernels._common.cuda import without_compiler
from sparsebench.kernels._common.product import (
    Candidate,
    Product,
    Selected,
    Workload,
    plan_first,
    search_product,
)
from sparsebench.kernels._common.search import finalists, part_of
from sparsebench.kernels._kernel import Kernel, Launch, Operands, Output

PLANS = 64  # that a weight keeps: the ones made last
LARGER = "larger"  # reason for the product of a cover, which is no cover of others
UNSEARCHED = "nearest", "model", LARGER  # for choices that were not measured for these sizes


class Ahead(NamedTuple):
    """How plans are made before calls need them: with a search or without; and the plans taken."""

    search: bool
    selected: list[Selected]


_ahead: ContextVar[Ahead | None] = ContextVar("ahead", default=None)


@contextmanager
def ahead(*, search: bool) -> Iterator[list[Selected]]:
    """Let calls of this thread compile, and search or not; list the plans that they take."""
    outer = _ahead.get()
    selected = outer.selected if outer else []
    token = _ahead.set(Ahead(search, selected))
    try:
        yield selected
    finally:
        _ahead.reset(token)


@dataclass(frozen=True)
class NoConfig:
    """The configuration of an engine that has only one."""


@dataclass(frozen=True, kw_only=True)
class Engine(Kernel):
    """A kernel of ours. The types of its weight `w` and of its calls belong to its family.

    name     in choices; the input gradient of bsr_small is bsr_small, too
    config   class of its configurations
    choices  (w, call) -> configurations worth timing, the likeliest first. Raises Unsupported
    closed   the same without a search: of few kernels for all numbers of tokens. None: `choices`
    plan     (w, call, configuration) -> Product. Raises Unsupported
    bind     (operands, engines) -> the call of a suite's operands
    """

    prepare: Callable[..., Launch] = field(init=False)
    name: str
    config: type = NoConfig
    choices: Callable[[Any, Any], Iterable[Any]]
    plan: Callable[[Any, Any, Any], Product]
    bind: "Callable[[Operands, tuple[Engine, ...]], OperatorCall]"
    closed: Callable[[Any, Any], Sequence[Any]] | None = None

    def __post_init__(self) -> None:
        """Offer the contract of a suite (kernels/_kernel.py)."""
        object.__setattr__(self, "prepare", partial(_prepare, self))

    def candidates(
        self, w: Any, call: Any, choice: Mapping[str, Any] | None = None, *, closed: bool = False
    ) -> "Iterator[Candidate]":
        """Yield the configurations, or only the one of a choice. Raises Unsupported, TypeError."""
        if choice is None:
            configs = (self.closed if closed and self.closed else self.choices)(w, call)
        else:
            names = {each.name for each in fields(self.config)}  # older choices may have more
            configs = [self.config(**{k: v for k, v in choice.items() if k in names})]
        for config in configs:
            yield Candidate(self.name, config, partial(self.plan, w, call, config))


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


@dataclass(eq=False)
class Operator:
    """The plans of a weight, made once for each call.

    engines   all that may run a call; their code decides which file of the cache is read
    weight    (call) -> the weight as `choices` and `plan` of the engines read it
    problem   (call) -> sizes and layout, as a line of the store has them
    device    of the weight
    likeliest (call) -> the engines that may run it, the likeliest first. Raises Unsupported
    plans     by call, the one made last at the end
    covered   calls that the plan for more tokens has computed once
    """

    engines: tuple[Engine, ...]
    weight: Callable[[Any], Any]
    problem: Callable[[Any], dict[str, Any]]
    device: torch.device
    likeliest: Callable[[Any], Sequence[Engine]] | None = None
    plans: OrderedDict[Hashable, Selected] = field(default_factory=OrderedDict)
    covered: set[Hashable] = field(default_factory=set)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the engines, in order."""
        return tuple(dict.fromkeys(engine.name for engine in self.engines))

    def select(
        self, call: Hashable, workload: Workload | None = None, earlier: Earlier | None = None
    ) -> Selected:
        """Return the plan of a call, which the first call makes. Raises Unsupported.

        workload  what a search times; None forbids it
        earlier   in a run of a suite; None in a call of a user, which takes the user's cache
        """
        now = _ahead.get()
        search = workload if earlier is not None or (now and now.search) else None
        selected = self.plans.get(call)
        waits = earlier is not None or now is not None
        if selected is None or (waits and self._is_provisional(selected, search)):
            cover = None if waits else self._cover(call)
            if cover is not None and self._is_first(call):
                return cover
            choose = partial(self._choose, call, search, earlier, cover, closed=now is not None)
            selected = self.plans[call] = make_lasting(choose, self.device)
            while len(self.plans) > PLANS:
                self.plans.popitem(last=False)
        if now is not None:
            now.selected.append(selected)
        return selected

    def _is_provisional(self, selected: Selected, search: Workload | None) -> bool:
        """Return whether a search, or a compiler, may give a better plan than a user's call has."""
        return self.device.type == "cuda" and selected.by in (UNSEARCHED if search else [LARGER])

    def _is_first(self, call: Hashable) -> bool:
        """Return whether a call comes for the first time; one that is captured will be repeated."""
        first = call not in self.covered and not torch.cuda.is_current_stream_capturing()
        self.covered.add(call)
        return first

    def _cover(self, call: Any) -> Selected | None:
        """Return the plan for the fewest tokens that computes a call: at most twice as many."""
        m = getattr(call, "m", 0) if self.device.type == "cuda" else 0
        plans = [*self.plans.items()] if m else []  # other threads add and drop plans
        alike = [(c, plan) for c, plan in plans if isinstance(c, type(call)) and plan.by != LARGER]
        covers = {c.m: plan for c, plan in alike if m < c.m <= 2 * m and c == call._replace(m=c.m)}
        return covers[min(covers)] if covers else None

    def first(self, call: Hashable) -> Selected:
        """Plan a call in the likeliest configuration that can run it, whatever the lists say."""
        return plan_first(self._candidates(call), "default", self._problem(call))

    def _choose(
        self,
        call: Hashable,
        workload: Workload | None,
        earlier: Earlier | None,
        cover: Selected | None,
        *,
        closed: bool,
    ) -> Selected:
        """Make the plan of a call; with a cover, of compiled kernels alone."""
        if self.device.type != "cuda":
            return plan_first(self._candidates(call), "model", {})
        problem = self._problem(call)
        if earlier and (pinned := earlier.choice):
            if not (candidates := self._candidates_of(call, pinned)):
                names = ", ".join(self.names)
                expected = f"expected a configuration of {names}, found {dict(pinned)}"
                raise Unsupported(f"pinned choice: {expected}")
            return plan_first([candidates], str(pinned.get("by", "pinned")), problem)
        file = lists.user_file(self.device, self.names)
        stores = {"cache": lists.process_choices(file), "package": lists.package(self.device)}
        if earlier is None:
            stores = {"checkpoint": lists.of_checkpoints(), **stores, "cache": lists.read(file)}
        if cover is not None:
            with suppress(Unsupported), without_compiler():
                return self._unsearched(call, problem, stores, engines=1)
            return replace(cover, by=LARGER, problem=problem, lines=())
        if workload is None:
            if closed and earlier is None:
                self._compile_closed(call)
            return self._unsearched(call, problem, stores)
        if (selected := self._from_lists(call, problem, stores)) is not None:
            return selected
        entries = [*chain.from_iterable(choices.items() for choices in stores.values())]
        best = finalists(earlier.lines) if earlier else []
        larger, repeats = (
            [c for choice in some for c in self._candidates_of(call, choice)]
            for some in (lists.larger(problem, entries), best)
        )
        engines = [larger, repeats] if repeats else [larger, *self._candidates(call)]
        selected = search_product(engines, workload, self.device, problem)
        lists.append(file, problem, selected.choice)
        return selected

    def _unsearched(
        self,
        call: Hashable,
        problem: Mapping[str, Any],
        stores: Mapping[str, lists.Choices],
        engines: int | None = None,
    ) -> Selected:
        """Return a plan by a list, the nearest choice of one, or the order of the engines.

        engines  that may be taken without a list: the likeliest ones, by default all
        """
        if (selected := self._from_lists(call, problem, stores)) is not None:
            return selected
        # At once, because other threads add choices.
        entries = [*chain.from_iterable(choices.items() for choices in stores.values())]
        if neighbour := self._candidates_of(call, lists.nearest(problem, entries)):
            with suppress(Unsupported):
                return plan_first([neighbour], "nearest", problem)
        return plan_first(self._candidates(call, closed=True)[:engines], "model", problem)

    def _compile_closed(self, call: Hashable) -> None:
        """Compile what calls of other numbers of tokens will take, whatever the lists say."""
        engine, *_ = self.likeliest(call) if self.likeliest else self.engines
        if engine.closed is not None:
            for candidate in engine.candidates(self.weight(call), call, closed=True):
                with suppress(Unsupported):  # others may run
                    candidate.plan()

    def _problem(self, call: Hashable) -> dict[str, Any]:
        """Return the problem of a call; one of a single engine is a separate line of a list."""
        return self.problem(call) | ({} if self.likeliest else {"kernel": self.names[0]})

    def _candidates(self, call: Hashable, *, closed: bool = False) -> list[Iterator[Candidate]]:
        """Return the candidates of each engine, the likeliest engines and candidates first."""
        engines = self.likeliest(call) if self.likeliest else self.engines
        w = self.weight(call)
        return [engine.candidates(w, call, closed=closed) for engine in engines]

    def _from_lists(
        self, call: Hashable, problem: Mapping[str, Any], stores: Mapping[str, lists.Choices]
    ) -> Selected | None:
        """Return the plan of the first listed choice that runs, or None.

        One that was chosen for another weight of these sizes may not: a bitmap's records take more
        shared memory if a tile is dense.
        """
        for by, choices in stores.items():
            choice = choices.get(lists.key(problem), {})
            if same := self._candidates_of(call, choice):
                try:
                    selected = plan_first([same], by, problem)
                except Unsupported:
                    continue
                if choice.get("code") in (None, selected.product.code):
                    return selected
        return None

    def _candidates_of(self, call: Hashable, choice: Mapping[str, Any] | None) -> list[Candidate]:
        """Return the candidate that a choice names, if there still is such a configuration."""
        for engine in self.engines:
            if choice and engine.name == choice.get("kernel"):
                with suppress(TypeError, Unsupported):
                    return [*engine.candidates(self.weight(call), call, choice)]
        return []


def bucket(tokens: int) -> int:
    """Return the number of tokens that a plan is made for: the least of these that holds them.

    1, 8, 16, in steps of 16 to 256, and then eight numbers for each power of two. A plan for M
    tokens also multiplies fewer, so a new number of tokens costs nothing if its bucket is planned.
    """
    if tokens <= 8:
        return 1 if tokens <= 1 else 8
    step = 16 if tokens <= 256 else 1 << ((tokens - 1).bit_length() - 4)
    return -(-tokens // step) * step


def fewest(tokens: int) -> int:
    """Return the fewest tokens that have the same bucket."""
    return next(m for m in range(tokens, 0, -1) if m == 1 or bucket(m - 1) != bucket(tokens))


# ---- the contract of a suite ----


@dataclass(frozen=True)
class OperatorCall:
    """Operands as a call of an operator.

    activations  operands of `Product.run`, and after these
    weights      (product) -> the operands that it reads of the weight
    result       (what `run` returns) -> the launch's output
    out          is written by every call, if `run` returns several tensors that share memory
    """

    operator: Operator
    call: Any
    activations: tuple[Tensor, ...]
    weights: Callable[[Product], tuple[Tensor | None, ...]] = lambda product: ()
    result: Callable[[Any], Output] = lambda output: output
    out: Tensor | None = None

    def select(self, earlier: Earlier | None) -> Selected:
        """Plan the call; a search times it on these operands. Raises Unsupported."""
        return self.operator.select(self.call, self.run, earlier)

    def run(self, product: Product) -> Callable[[], Output]:
        """Return the call of a product on these operands, which packs the weight now."""
        operands = *self.activations, *self.weights(product)
        return lambda: self.result(product.run(*operands, out=self.out))


def _prepare(
    engine: Engine, operands: Operands, *, tuned: bool = True, cache: bool = False
) -> Launch:
    """Return the launch of an engine for a suite's operands. Raises Unsupported.

    tuned  search, or take a listed choice; otherwise take the likeliest configuration
    cache  take what the user's cache has, and add to it (`sparsebench tune`)
    """
    if not isinstance(tuned, bool):
        advice = "; wide was removed in 0.4: `sparsebench tune` keeps what it finds"
        note = advice if tuned == "wide" else ""
        raise Unsupported(f"option tuned: expected true or false, found {tuned!r}{note}")
    pinned = operands.pinned and {"kernel": engine.name, **operands.pinned}  # 0.3 has no kernel
    earlier = None if cache else Earlier(pinned, operands.timed)
    bound = engine.bind(operands, (engine,))
    with ahead(search=True) if cache else nullcontext():
        selected = bound.select(earlier) if tuned or pinned else bound.operator.first(bound.call)
    return launch_of(selected, bound.run(selected.product))


def launch_of(selected: Selected, run: Callable[[], Output]) -> Launch:
    """Return the launch of a plan, whose row has the choice and what was timed for it."""
    return Launch(run, selected.row, selected.product.code, selected.lines)
