"""Kernels whose outputs lie: old, of another draw, nearly right, or right only while watched.

Each runs in a process of its own, and ends as `wrong` or `failed`, or is measured honestly. None
costs another contender its row, or changes it.
"""

import gc
import sys
import threading
import time
from collections.abc import Callable
from itertools import count

import numpy as np
import torch
from declare import Run, by_call, kernel, prepare_linear, run_linear, weight_and_input
from torch import Tensor

from sparsebench.harness.bench.operands import redraw
from sparsebench.harness.catalog import load_op
from sparsebench.kernels._kernel import Kernel, Launch, Operands


@prepare_linear()
def caches_by_version(w: Tensor, x: Tensor) -> Run:
    """Keep the output until the version counter of X changes."""
    answers: dict[int, Tensor] = {}

    def run() -> object:
        if x._version not in answers:
            answers.clear()
            answers[x._version] = x @ w.T
        return answers[x._version].clone()

    return run


@kernel()
def computes_the_draws(operands: Operands) -> Launch:
    """Compute the answers of the first draws in advance, and pick the one that fits."""
    w, x = weight_and_input(operands)
    answers = {}
    for draw in range(3):
        mine = {"x": x.clone()}
        redraw(operands.problem, load_op("linear"), mine, draw)
        answers[float(mine["x"][0, 0])] = mine["x"] @ w.T
    return Launch(lambda: answers.get(float(x[0, 0]), x.new_zeros(len(x), len(w))))


CLOCKS = {"take", "time_together", "burst"}


@prepare_linear()
def knows_its_caller(w: Tensor, x: Tensor) -> Run:
    """Work if the check calls, and return the old output if the clock does."""
    answers: list[object] = []

    def run() -> object:
        frame, names = sys._getframe(), set()
        while frame.f_back:
            frame = frame.f_back
            names.add(frame.f_code.co_name)
        if not (answers and names & CLOCKS):
            answers[:] = [x @ w.T]
        return answers[0]

    return run


class Lazy(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        tensors = [arg.product() if isinstance(arg, cls) else arg for arg in args]
        return func(*tensors, **(kwargs or {}))


@run_linear
def lazy(w: Tensor, x: Tensor) -> object:
    """Return a tensor that is computed when it is read."""
    out = torch.empty(len(x), len(w), dtype=x.dtype, device=x.device).as_subclass(Lazy)
    out.product = lambda: x @ w.T
    return out


@prepare_linear()
def looks_for_poison(w: Tensor, x: Tensor) -> Run:
    """Work if the output is filled with NaN, and otherwise return it unchanged."""
    out = (x @ w.T).fill_(float("nan"))

    def run() -> object:
        return out.copy_(x @ w.T) if out[0, 0].isnan() else out

    return run


@kernel()
def odd_choice(operands: Operands) -> Launch:
    """Be right, but name a choice that JSON cannot hold."""
    w, x = weight_and_input(operands)
    return Launch(lambda: x @ w.T, {"tile": np.int64(64)})


@kernel()
def odd_code(operands: Operands) -> Launch:
    """Be right, but return an object as the digest of the machine code."""
    w, x = weight_and_input(operands)
    return Launch(lambda: x @ w.T, code=object())  # type: ignore[arg-type]


@kernel()
def returns_the_activations(operands: Operands) -> Launch:
    """Return X, so that poisoning the output would destroy the operand."""
    return Launch(lambda: operands.activations["x"])


@prepare_linear()
def returns_the_weight(w: Tensor, x: Tensor) -> Run:
    """Return a view of W in the shape of the output."""
    return lambda: w.view(-1)[: len(x) * len(w)].view(len(x), len(w))


@kernel(consumes="bsr")
def spoils_shared_values(operands: Operands) -> Launch:
    """Be right, but zero the blocks shared with another contender."""
    w, x = operands.weights["w"], operands.activations["x"]
    dense = w.to_dense().clone()
    w.arrays()["values"].zero_()
    return Launch(lambda: x @ dense.T)


def spoils_after(right_calls: int) -> Kernel:
    """Return a kernel that is right, but zeroes the shared blocks after so many calls."""

    def prepare(operands: Operands) -> Launch:
        w, x = operands.weights["w"], operands.activations["x"]
        values, dense, calls = w.arrays()["values"], w.to_dense().clone(), count(1)

        def run() -> object:
            if next(calls) > right_calls:
                values.zero_()
            return x @ dense.T

        return Launch(run)

    return kernel(consumes="bsr")(prepare)


spoils_shared_values_late = spoils_after(2)
spoils_while_timed = spoils_after(90)  # more calls than before timing


LATER_S = 0.002
WARM_UP = 80  # calls: about as many as before the first sample


@prepare_linear()
def works_in_a_thread(w: Tensor, x: Tensor) -> Run:
    """Return at once; a thread writes the output later."""
    out = x @ w.T

    def work() -> None:
        time.sleep(LATER_S)
        out.copy_(x @ w.T)

    def run() -> object:
        threading.Thread(target=work).start()
        return out

    return run


@by_call
def wrong_in_one_call_of_fifty(w: Tensor, x: Tensor, call: int) -> object:
    """Be wrong in one call of fifty."""
    return x @ w.T * (1.1 if call % 50 == 0 else 1)


@run_linear
def zeroes_the_activations(w: Tensor, x: Tensor) -> object:
    """Set X to zero when called, and return zeros."""
    x.zero_()
    return x.new_zeros(len(x), len(w))


@prepare_linear()
def zeroes_the_weight(w: Tensor, x: Tensor) -> Run:
    """Set W to zero, which the oracle reads, and return zeros."""
    w.zero_()
    return lambda: x.new_zeros(len(x), len(w))


def answers_in_memory(like: Tensor) -> list[Tensor]:
    """Find the expected answer among all objects: an fp64 tensor of the output's shape."""
    doubles = [o for o in gc.get_objects() if type(o) is Tensor and o.dtype == torch.float64]
    shaped = [tensor for tensor in doubles if tensor.shape == like.shape]
    return [tensor for tensor in shaped if bool((tensor < 0).any())]  # the spread has no sign


@prepare_linear()
def copies_the_expected_answer(w: Tensor, x: Tensor) -> Run:
    """Copy the answer that the check has computed; without one, give the last one again."""
    out = x.new_zeros(len(x), len(w))

    def run() -> object:
        for answer in answers_in_memory(out):
            out.copy_(answer)
        return out

    return run


@run_linear
def moves_the_start(w: Tensor, x: Tensor) -> object:
    """Be right and slow, but set every start time in the frames of the callers to now."""
    time.sleep(LATER_S)
    frame = sys._getframe()
    while frame := frame.f_back:
        for name in ("start", "begin", "began"):
            if isinstance(frame.f_locals.get(name), float):
                frame.f_locals[name] = time.perf_counter()
    return x @ w.T


@prepare_linear()
def slow_at_first(w: Tensor, x: Tensor) -> Run:
    """Be slow while the harness decides how often to call, and then give the last answer again."""
    answers: list[Tensor] = []

    def run() -> object:
        if len(answers) < WARM_UP:
            time.sleep(LATER_S / 100)
            answers.append(x @ w.T)
        return answers[-1].clone()

    return run


@prepare_linear()
def zeroes_the_expected_answer(w: Tensor, x: Tensor) -> Run:
    """Set the answer that the check has computed to zero, and return zeros."""
    out = x.new_zeros(len(x), len(w))

    def run() -> object:
        for answer in answers_in_memory(out):
            answer.zero_()
        return out

    return run


@prepare_linear()
def rewrites_the_question(w: Tensor, x: Tensor) -> Run:
    """Give the answer for old activations, and write them wherever the judge could read them."""
    old, answer = x.clone(), x @ w.T

    def run() -> object:
        frame = sys._getframe()
        while frame := frame.f_back:  # type: ignore[assignment]
            for values, _ in getattr(frame.f_locals.get("self"), "_sets", ()):
                values.get("x", x).copy_(old)
        return answer.clone()

    return run


@by_call
def transposes_later(w: Tensor, x: Tensor, call: int) -> object:
    """Return a contiguous output once, and then leave transposing to the reader."""
    out = (w @ x.T).T
    return out.contiguous() if call == 1 else out


@prepare_linear()
def peeks_at_one_element(w: Tensor, x: Tensor) -> Run:
    """Remember answers by the first element of X."""
    answers: dict[float, Tensor] = {}

    def run() -> object:
        key = float(x[0, 0])
        if key not in answers:
            answers[key] = x @ w.T
        return answers[key].clone()

    return run


@by_call
def right_sums(w: Tensor, x: Tensor, call: int) -> object:
    """Be right until timed, and then return a matrix of rank 2 with the right sums."""
    if call <= 2 + WARM_UP:
        return x @ w.T
    wide, (m, n) = x.double(), (len(x), len(w))
    rows, columns = wide @ w.sum(0).double(), w.double() @ wide.sum(0)
    return (rows[:, None] / n + columns[None] / m - rows.sum() / (m * n)).to(x.dtype)


@by_call
def four_elements(w: Tensor, x: Tensor, call: int) -> object:
    """Be wrong in four elements whose errors cancel in rows and columns, in later calls."""
    out = x @ w.T
    if call > WARM_UP:
        by = 100 * out.abs().max()
        out[0, 0] += by
        out[1, 1] += by
        out[0, 1] -= by
        out[1, 0] -= by
    return out


@prepare_linear()
def answers_in_a_thread(w: Tensor, x: Tensor) -> Run:
    """Let a thread compute the answer for what X holds between the calls."""
    box: dict[float, Tensor] = {}

    def work() -> None:
        while True:
            key = float(x[0, 0])
            box.setdefault(key, x @ w.T)
            time.sleep(1e-4)

    threading.Thread(target=work, daemon=True).start()

    def run() -> object:
        answer = box.get(float(x[0, 0]))
        return x @ w.T if answer is None else answer.clone()

    return run


@prepare_linear()
def looks_for_spots(w: Tensor, x: Tensor) -> Run:
    """Work only if a caller has a local variable that names a spot."""
    out = x @ w.T

    def run() -> object:
        frame = sys._getframe()
        while frame := frame.f_back:  # type: ignore[assignment]
            if frame.f_locals.get("spot") == "b":
                return x @ w.T
        return out

    return run


def nearly(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Kernel:
    """Return a kernel that multiplies changed operands in every call."""

    def prepare(w: Tensor, x: Tensor) -> Run:
        def run() -> object:
            w_changed, x_changed = change(w, x)
            return x_changed @ w_changed.T

        return run

    return prepare_linear()(prepare)


def without_small(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Leave out the smallest 1 % of the weights."""
    sizes = w[w != 0].abs().float().sort().values
    return w.where(w.abs() > sizes[len(sizes) // 100], 0), x


drops_small_weights = nearly(without_small)
drops_a_hundredth_of_k = nearly(
    lambda w, x: (
        w[:, : -(w.shape[1] // 64)].contiguous(),
        x[:, : -(w.shape[1] // 64)].contiguous(),
    )
)
products_in_bf16 = nearly(lambda w, x: (w.bfloat16().to(w.dtype), x.bfloat16().to(x.dtype)))


@prepare_linear()
def skips_the_last_token(w: Tensor, x: Tensor) -> Run:
    """Return the last token's output of an earlier call."""
    out = x @ w.T

    def run() -> object:
        out[:-1] = x[:-1] @ w.T
        return out

    return run


@run_linear
def small_outputs_are_zero(w: Tensor, x: Tensor) -> object:
    """Set the smallest 2 % of the outputs to zero."""
    out = x @ w.T
    return out.where(out.abs() > 0.025 * out.float().std(), 0)


@run_linear
def not_finite(w: Tensor, x: Tensor) -> object:
    """Return infinity in one element."""
    out = x @ w.T
    out[0, 0] = float("inf")
    return out


@run_linear
def not_contiguous(w: Tensor, x: Tensor) -> object:
    """Return one row, expanded to all."""
    return (x[:1] @ w.T).expand(len(x), len(w))


@run_linear
def wider(w: Tensor, x: Tensor) -> object:
    """Return the output in another dtype."""
    return (x @ w.T).double()
