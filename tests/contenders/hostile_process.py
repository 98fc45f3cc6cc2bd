"""Kernels that change their own process: its functions, settings, answers, memory or end.

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
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import torch
from declare import Run, kernel, prepare_linear, run_linear, weight_and_input
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sparsebench.harness.bench import correctness as check
from sparsebench.harness.bench import guest, timing
from sparsebench.harness.bench import output_checks as checking
from sparsebench.harness.bench.correctness import OutputCheck
from sparsebench.kernels._kernel import Kernel, Launch, Operands


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


holds_the_judge_to_a_core = setting(lambda: os.sched_setaffinity(os.getppid(), {0}))


def stating(**facts: Any) -> Kernel:
    """Return a kernel that is right, but states these facts."""

    def prepare(operands: Operands) -> Launch:
        w, x = weight_and_input(operands)
        return Launch(lambda: x @ w.T, **facts)

    return kernel()(prepare)


def nested(depth: int) -> dict[str, Any]:
    return {"tiles": nested(depth - 1)} if depth else {}


states_a_long_digest = stating(code="0" * 10**6)
states_many_candidates = stating(candidates=[{"median_us": float(i)} for i in range(10**5)])
states_nested_choices = stating(choice=nested(400))
states_odd_candidates = stating(candidates=[1, None])
states_unpaired_surrogates = stating(choice={"tile": "\ud800"})


ONE_CALL_S = 0.001  # longer than a right call takes


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


def times(of_turn: Callable[[int], float]) -> None:
    """Claim one time for all calls of a turn, by the number of the turn."""
    right, turns = json.dumps, count()

    def dumps(message: object, *rest: object, **further: object) -> str:
        request = sys._getframe(2).f_locals.get("request") or {}
        if request.get("number") == 1 and "cache" in request:
            message = {"result": [[of_turn(next(turns)), False]] * request["count"]}
        return right(message, *rest, **further)  # type: ignore[arg-type]

    json.dumps = dumps


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


FACTS = {"choice": {}, "code": None, "candidates": [], "form": [[64, 64], "torch.float32", [64, 1]]}
answers_too_deeply = forging(nested_answers)
answers_in_lines = last_answer("burst", ended=["wrong", "\x1b[2J\n" * 10**4, ""])
claims_a_graph = last_answer("capture", result={"kernel": ["graph", ""]})
claims_equal_times = forging(lambda: times(lambda turn: 5e3))
claims_no_time = last_answer("turn", result=[[1e-300, False]])
claims_slow_starts = setting(lambda: times(lambda turn: 1e9 if turn % 7 < 2 else 200.0 + turn))
claims_to_be_right = last_answer("burst", ended=["ok", "", ""])
claims_too_much = last_answer("burst", result=2**64)
claims_bytes_beyond_64_bits = last_answer("prepare", result={**FACTS, "held_bytes": 1e300})
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
    """Make all products of the process 5 % too large."""

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
    """Make torch's product slow, but not its own."""
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


def ending(end: Callable[[], object]) -> Kernel:
    """Return a kernel whose call ends its process in some way."""
    return run_linear(lambda w, x: end())


def closes_everything() -> None:
    os.closerange(0, 256)


def raises(error: BaseException) -> None:
    raise error


def answers_without_end() -> None:
    pieces = b"[" * 2**20
    for file in range(3, 10):
        with suppress(OSError):
            while True:
                os.write(file, pieces)


answers_for_the_harness = ending(lambda: [os.write(n, b'{"result": 1}\n') for n in (3, 4, 5, 6)])
answers_endlessly = ending(answers_without_end)
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
