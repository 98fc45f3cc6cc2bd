"""Kernels that attack the contest, each from a process of its own.

Each ends as `wrong` or `failed`, or is measured honestly because what it changes lies there. None
costs another contender its row, or changes it.
"""

import atexit
import builtins
import gc
import json
import operator
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from functools import partial

import numpy as np
import torch
from declare import Run, kernel, prepare_linear, run_linear, weight_and_input
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sparsebench.harness.bench import correctness as check
from sparsebench.harness.bench import guest, timing
from sparsebench.harness.bench import output_checks as checking
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


# What follows changes functions of its own process, answers in place of the harness, or is nearly
# right. `ONE_CALL_S` is longer than a right call takes.

ONE_CALL_S = 0.001


def slow_and_right(w: Tensor, x: Tensor) -> Run:
    """Be right, but take a millisecond."""

    def run() -> object:
        time.sleep(ONE_CALL_S)
        return x @ w.T

    return run


def forging(change: Callable[[], object]) -> Kernel:
    """Return a kernel that is right and slow, and changes a function to look fast."""

    def prepare(w: Tensor, x: Tensor) -> Run:
        change()
        return slow_and_right(w, x)

    return prepare_linear()(prepare)


def third_of_round() -> None:
    right = builtins.round
    builtins.round = lambda value, digits=None: right(value / 3, digits)  # type: ignore[assignment]


def third_of_rows() -> None:
    right = json.dumps

    def dumps(message: object, *rest: object, **further: object) -> str:
        if isinstance(message, dict) and isinstance(message.get("result"), list):
            message = {"result": [[us / 100, late] for us, late in message["result"]]}
        return right(message, *rest, **further)  # type: ignore[arg-type]

    json.dumps = dumps


def third_of_turns(numbers: Collection[int]) -> None:
    right = guest.Guest.turn

    def turn(self: object, number: int, *rest: object, **further: object) -> object:
        by = 100 if number in numbers else 1
        return [(us / by, late) for us, late in right(self, number, *rest, **further)]  # type: ignore[arg-type]

    guest.Guest.turn = turn  # type: ignore[method-assign,assignment]


def slow_clock() -> None:
    right = time.perf_counter
    timing.perf_counter = lambda: right() / 100  # type: ignore[assignment]


def call_of_operator() -> None:
    right = operator.call

    def call(function: Callable[[], object], *rest: object) -> object:
        out = right(function, *rest)
        return out / 100 if isinstance(out, float) else out

    operator.call = call  # type: ignore[assignment]


def shared_files() -> list[str]:
    """Return the paths of the memory that the judge shares."""
    folder = f"/proc/{os.getppid()}/fd"
    paths = [f"{folder}/{file}" for file in os.listdir(folder)]
    return [path for path in paths if "memfd:sparsebench" in os.readlink(path)]


def nested_answers() -> None:
    json.dumps = lambda message, **rest: "[" * 10**5  # type: ignore[assignment]


def last_answer(what: str, **answer: object) -> Kernel:
    """Return a kernel whose process gives this answer to a request of its own."""

    def forge() -> None:
        right = json.dumps

        def dumps(message: object, *rest: object, **further: object) -> str:
            request = sys._getframe(2).f_locals.get("request") or {}
            mine = request.get("number", 1) == 1 and sys._getframe(2).f_locals.get("what") == what
            return right(answer if mine else message, *rest, **further)  # type: ignore[arg-type]

        json.dumps = dumps

    return forging(forge)


answers_too_deeply = forging(nested_answers)
claims_a_graph = last_answer("capture", result={"kernel": ["graph", ""]})
claims_no_time = last_answer("turn", result=[[1e-300, False]])
claims_to_be_right = last_answer("burst", ended=["ok", "", ""])
claims_too_much = last_answer("burst", result=2**64)
cuts_off_memory = setting(lambda: [os.truncate(file, 0) for file in shared_files()])
forges_json = forging(third_of_rows)
forges_operator_call = forging(call_of_operator)
forges_own_turns = forging(partial(third_of_turns, {1}))
forges_the_clock = forging(slow_clock)
forges_turns = forging(partial(third_of_turns, {0, 1}))
rounds_by_three = forging(third_of_round)


class AllOnes(TorchFunctionMode):
    """Answer what compares an output."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if getattr(func, "__name__", "") in ("sub", "__sub__", "abs", "norm"):
            return torch.zeros_like(args[0])
        return func(*args, **(kwargs or {}))


class Smaller(TorchDispatchMode):
    """Make products 5 % too large for whoever computes them."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        return out * 1.05 if func is torch.ops.aten.mm.default else out


@prepare_linear()
def hides_behind_a_mode(w: Tensor, x: Tensor) -> Run:
    """Return ones, under a mode that says that every difference is zero."""
    AllOnes().__enter__()
    return lambda: x.new_ones(len(x), len(w))


@prepare_linear()
def hides_behind_the_dispatcher(w: Tensor, x: Tensor) -> Run:
    """Be 5 % too large, as is everything in this process."""
    Smaller().__enter__()
    return lambda: x @ w.T


@prepare_linear()
def overrides_mm(w: Tensor, x: Tensor) -> Run:
    """Make torch's product slow for everyone but itself."""
    library = torch.library.Library("aten", "IMPL")

    def mm(a: Tensor, b: Tensor) -> Tensor:
        time.sleep(20 * ONE_CALL_S)
        return torch.from_numpy(a.numpy() @ b.numpy())

    library.impl("mm", mm, "CPU")
    overrides.append(library)
    return lambda: torch.from_numpy(x.numpy() @ w.numpy().T)


overrides: list[object] = []


@prepare_linear()
def no_randomness(w: Tensor, x: Tensor) -> Run:
    """Let the operating system give zeros, and be right when the first element is known."""
    os.urandom = lambda count: b"\0" * count  # type: ignore[assignment]
    random.SystemRandom.getrandbits = lambda self, bits: 0  # type: ignore[method-assign]
    answers: dict[float, Tensor] = {}
    return lambda: answers.setdefault(float(x[0, 0]), x @ w.T).clone()


@prepare_linear()
def waits_for_its_threads(w: Tensor, x: Tensor) -> Run:
    """Be right and slow, but let another thread take the core for which the main one waits."""
    core, start, done = min(os.sched_getaffinity(0)), threading.Semaphore(0), [True]
    right = json.dumps

    def dumps(message: object, *rest: object, **further: object) -> str:
        request = sys._getframe(2).f_locals.get("request") or {}
        if isinstance(message, dict) and isinstance(message.get("result"), list):
            mine = request.get("number") == 1
            message = {"result": [[20.0 if mine else us, late] for us, late in message["result"]]}
        return right(message, *rest, **further)  # type: ignore[arg-type]

    def work() -> None:
        os.sched_setaffinity(0, {core})
        pool = torch.ones(300, 300)
        while start.acquire():
            end = time.thread_time() + ONE_CALL_S
            while time.thread_time() < end:
                pool @ pool  # without the interpreter's lock
            done[0] = True

    def run() -> object:
        cores, done[0] = os.sched_getaffinity(0), False
        os.sched_setaffinity(0, {core})
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        start.release()
        while not done[0]:
            os.sched_yield()
        os.sched_setaffinity(0, cores)
        return x @ w.T

    json.dumps = dumps
    threading.Thread(target=work, daemon=True).start()
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


@prepare_linear()
def right_sums(w: Tensor, x: Tensor) -> Run:
    """Be right twice, and then return a matrix of rank 2 with the right sums."""
    ones, calls = w.sum(0).double(), 0

    def run() -> object:
        nonlocal calls
        calls += 1
        if calls <= 2 + WARM_UP:
            return x @ w.T
        wide, (m, n) = x.double(), (len(x), len(w))
        rows, columns = wide @ ones, w.double() @ wide.sum(0)
        return (rows[:, None] / n + columns[None] / m - rows.sum() / (m * n)).to(x.dtype)

    return run


@prepare_linear()
def four_elements(w: Tensor, x: Tensor) -> Run:
    """Be wrong in four elements whose errors cancel in rows and columns, in later calls."""
    calls = 0

    def run() -> object:
        nonlocal calls
        calls += 1
        out = x @ w.T
        if calls > WARM_UP:
            by = 100 * out.abs().max()
            out[0, 0] += by
            out[1, 1] += by
            out[0, 1] -= by
            out[1, 0] -= by
        return out

    return run


@prepare_linear()
def answers_in_a_thread(w: Tensor, x: Tensor) -> Run:
    """Let a thread compute the answer for whatever X holds between the calls."""
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


def ending(end: Callable[[], object]) -> Kernel:
    """Return a kernel whose call ends its process in some way."""
    return run_linear(lambda w, x: end())


def closes_everything() -> None:
    os.closerange(0, 256)


def floods() -> None:
    while True:
        os.write(1, b"x" * 4096)


def raises(error: BaseException) -> None:
    raise error


answers_for_the_harness = ending(lambda: [os.write(n, b'{"result": 1}\n') for n in (3, 4, 5, 6)])
closes_its_files = ending(closes_everything)
exits = ending(lambda: os._exit(0))
exits_by_signal = ending(lambda: os.kill(os.getpid(), signal.SIGKILL))
interrupts = ending(lambda: raises(KeyboardInterrupt()))
leaves = ending(lambda: raises(SystemExit(0)))
stops = ending(lambda: os.kill(os.getpid(), signal.SIGSTOP))


@prepare_linear()
def forks(w: Tensor, x: Tensor) -> Run:
    """Start a process that stays, and be right."""
    if not os.fork():
        time.sleep(3600)
    return lambda: x @ w.T


@prepare_linear()
def leaves_work_to_the_end(w: Tensor, x: Tensor) -> Run:
    """Register functions for signals and for the end, and be right."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    atexit.register(time.sleep, 3600)
    sys.setrecursionlimit(10**6)
    return lambda: x @ w.T
