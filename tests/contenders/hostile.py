"""Kernels that attack the contest: each must end as `wrong` or `failed`, without costing another
contender its row.
"""

import gc
import os
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import torch
from declare import Run, kernel, prepare_linear, run_linear, weight_and_input
from torch import Tensor

from sparsebench.harness.bench import correctness as check
from sparsebench.harness.bench import output_checks as checking
from sparsebench.harness.bench import timing
from sparsebench.harness.bench.correctness import OutputCheck
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


@prepare_linear()
def replaces_code_of_the_check(w: Tensor, x: Tensor) -> Run:
    """Give the check other code when called."""
    yes = lambda out, expected: OutputCheck(None, 0.0, 0.0)  # noqa: E731

    def run() -> object:
        check.judge_values.__code__ = yes.__code__
        check.judge_values.__globals__["OutputCheck"] = OutputCheck
        return x.new_zeros(len(x), len(w))

    return run


@prepare_linear()
def replaces_the_check(w: Tensor, x: Tensor) -> Run:
    """Replace the check by one that accepts everything."""
    checking.check = lambda out, expected, pattern=None: OutputCheck(None, 0.0, 0.0)
    return lambda: x.new_zeros(len(x), len(w))


@prepare_linear()
def replaces_the_clock(w: Tensor, x: Tensor) -> Run:
    """Be right, but stop the clock."""
    timing.perf_counter = lambda: 0.0
    return lambda: x @ w.T


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
        values, dense, calls = w.arrays()["values"], w.to_dense().clone(), 0

        def run() -> object:
            nonlocal calls
            calls += 1
            if calls > right_calls:
                values.zero_()
            return x @ dense.T

        return Launch(run)

    return kernel(consumes="bsr")(prepare)


spoils_shared_values_late = spoils_after(2)
spoils_while_timed = spoils_after(90)  # more calls than before timing


LATER_S = 0.002
WARM_UP = 71  # calls: as many as before the first sample


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


@prepare_linear()
def wrong_in_one_call_of_fifty(w: Tensor, x: Tensor) -> Run:
    """Be wrong in one call of fifty."""
    calls = 0

    def run() -> object:
        nonlocal calls
        calls += 1
        return x @ w.T * (1.1 if calls % 50 == 0 else 1)

    return run


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
            time.sleep(LATER_S)
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


def setting(change: Callable[[], object]) -> Kernel:
    """Return a kernel that is right, but changes a setting of the process while it prepares."""

    def prepare(w: Tensor, x: Tensor) -> Run:
        change()
        return lambda: x @ w.T

    return prepare_linear()(prepare)


def flip(owner: object, name: str) -> Kernel:
    """Return a kernel that turns a switch of torch over."""
    return setting(lambda: setattr(owner, name, not getattr(owner, name)))


CUBLAS, CUDNN = torch.backends.cuda.matmul, torch.backends.cudnn


sets_a_precision = setting(lambda: setattr(CUBLAS, "fp32_precision", "tf32"))
sets_an_environment_variable = setting(lambda: os.environ.update(HOME="/nowhere"))
sets_cublas_accumulation = flip(CUBLAS, "allow_fp16_accumulation")
sets_cublas_reductions = flip(CUBLAS, "allow_bf16_reduced_precision_reduction")
sets_cudnn = flip(CUDNN, "enabled")
sets_cudnn_benchmark = flip(CUDNN, "benchmark")
sets_cudnn_determinism = flip(CUDNN, "deterministic")
sets_cudnn_tf32 = flip(CUDNN, "allow_tf32")
sets_no_gradients = setting(lambda: torch.set_grad_enabled(False))
sets_tf32 = setting(lambda: setattr(CUBLAS, "allow_tf32", True))
sets_the_attention = setting(lambda: torch.backends.cuda.enable_flash_sdp(False))
sets_the_collector = setting(gc.disable)
sets_the_default_dtype = setting(lambda: torch.set_default_dtype(torch.float64))
sets_the_determinism = setting(lambda: torch.use_deterministic_algorithms(True))
sets_the_directory = setting(lambda: os.chdir("/"))
sets_the_precision = setting(lambda: torch.set_float32_matmul_precision("medium"))
sets_the_threads = setting(lambda: torch.set_num_threads(torch.get_num_threads() + 1))
sets_the_tracer = setting(lambda: sys.setprofile(lambda *_: None))
sets_the_umask = setting(lambda: os.umask(0o077))
