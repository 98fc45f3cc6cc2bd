"""A search: time several candidates for the same product, and keep the fastest.

    warm-up          call every candidate once, which compiles it; drop those that raise
    capture          capture each in a CUDA graph if possible, as the harness does
    rounds 1 to 3    take a sample of each candidate in turn, with a cold L2 cache
    further rounds   drop candidates whose least sample exceeds 1.25 times the best; sample the rest
    result           the lowest median

The row lists every candidate (Launch.candidates), the default first: its median, its least sample
if it was dropped, or why it does not run. So readers see the alternatives and how close they were.
A later process of a verdict receives these lines (Operands.timed). Its search times only their
`finalists`, and chooses among them.

The stream is held while the host enqueues a round (gpu_clock.py), so that the events enclose the
work but not the launch. A call of cuSPARSELt takes the host 300 µs: without capture or a hold, 17
configurations of it seemed equally fast, and the one chosen took up to 1.7 times the best time.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from math import inf
from statistics import median
from typing import Any

import torch

from sparsebench.errors import Unsupported
from sparsebench.kernels._common.capture import capturing
from sparsebench.kernels._common.gpu_clock import Call, EventPair, GpuClock, flusher
from sparsebench.kernels._kernel import Launch, Operands, Output

ROUNDS = 7
SHORT_US, SHORT_ROUNDS = 100.0, 25  # short samples scatter by 2 to 6 % and are cheap
# From round TRIALS on, candidates are dropped whose least sample exceeds DROP times the best.
# Dropping after one sample made torch's BSR a third slower in a published run (block 32, 95 %).
DROP, TRIALS = 1.25, 3
NEAR, FINALISTS = 1.1, 24  # finalists: largest ratio to the fastest, and largest number
REASON = 160  # characters that a row has for why a candidate does not run
MOST_LINES = 40  # candidates per search in a row: 4 kB of JSON, less than its samples


@dataclass(frozen=True)
class Trial:
    """The result of one candidate; times in µs.

    median_us  median of a candidate that was timed to the end
    least_us   least sample of a candidate that was dropped after a few rounds
    failed     why the candidate does not run
    late       share of its samples for which the host was late (gpu_clock.py), if any
    """

    median_us: float | None = None
    least_us: float | None = None
    failed: str | None = None
    late: float | None = None

    @property
    def time_us(self) -> float:
        """Return the time of the candidate; infinite if it does not run."""
        return self.median_us or self.least_us or inf


@dataclass(frozen=True)
class Search:
    """The index of the fastest candidate, and the results of all, if any was timed."""

    best: int
    trials: tuple[Trial, ...] = ()

    def lines(
        self, choices: Sequence[Mapping[str, Any]], *, whole: bool = False, **stage: Any
    ) -> list[dict[str, Any]]:
        """Return a line for each candidate, for Launch.candidates.

        choices  the choice of each candidate
        whole    include values that all choices share, so that a line can be run again
        stage    fields of every line if `prepare` makes several searches, such as of="down"

        If there are more than MOST_LINES, the lines are of the default and the fastest, and a last
        line has the number of the others.
        """
        ranked = sorted(range(len(self.trials)), key=lambda i: self.trials[i].time_us)
        first = dict.fromkeys([0, self.best, *ranked] if ranked else ())
        listed = sorted(list(first)[:MOST_LINES])
        choices = choices if whole else differing(choices)
        lines = []
        for i in listed:
            result = {name: v for name, v in asdict(self.trials[i]).items() if v is not None}
            kept = {"kept": True} if i == self.best else {}
            lines.append({**stage, "choice": choices[i], **result, **kept})
        left_out = len(self.trials) - len(listed)
        return [*lines, {**stage, "left_out": left_out}] if left_out else lines


def lines_of(part: str, launch: Launch) -> list[dict[str, Any]]:
    """Return the candidates of a part of a larger launch; `of` in each line names the part.

    Lines of a part within the part have both names: of="dense, cublas, down".
    """
    return [
        {**line, "of": f"{part}, {line['of']}" if "of" in line else part}
        for line in launch.candidates
    ]


def part_of(part: str, lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of a part without its name: the inverse of `lines_of`."""
    lines_of_part = []
    for line in lines:
        rest, of = {name: line[name] for name in line if name != "of"}, str(line.get("of", ""))
        if of == part:
            lines_of_part.append(rest)
        elif of.startswith(f"{part}, "):
            lines_of_part.append({**rest, "of": of.removeprefix(f"{part}, ")})
    return lines_of_part


def near(times_us: Sequence[float]) -> list[int]:
    """Return the indices of the default and of the candidates within NEAR times the fastest.

    At most FINALISTS of them, in order; empty if nothing was timed.
    """
    if not times_us:
        return []
    close = [i for i, time_us in enumerate(times_us) if time_us <= NEAR * min(times_us)]
    return sorted({0, *sorted(close, key=lambda i: times_us[i])[:FINALISTS]})


def finalists(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the choices of one search that are `near` the fastest, from its whole lines."""
    timed = [line for line in lines if "median_us" in line or "least_us" in line]
    times_us = [float(line.get("median_us", line.get("least_us"))) for line in timed]
    return [dict(timed[i]["choice"]) for i in near(times_us)]


def differing(choices: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each choice without the values that all choices share."""
    first = choices[0] if choices else {}
    same = {name for name in first if all(c.get(name, ...) == first[name] for c in choices)}
    return [{name: value for name, value in c.items() if name not in same} for c in choices]


def fastest_call(
    calls: Sequence[Callable[[], Output]],
    choices: Sequence[Mapping[str, Any]],
    device: torch.device,
    **facts: Any,
) -> Launch:
    """Return the launch of the fastest call; `choices` are in the same order.

    facts  fields of Launch.choice beside those of the fastest choice
    """
    result = search(calls, device)
    choice = {**choices[result.best], **facts}
    return Launch(calls[result.best], choice, candidates=result.lines(choices))


def fastest_choice(
    run: Callable[..., Output],
    choices: Sequence[Mapping[str, Any]],
    operands: Operands,
    **facts: Any,
) -> Launch:
    """Return the launch of the fastest `run(**choice)`, or of the pinned choice (fastest_call)."""
    choices = pinned_or(choices, operands)
    calls = [partial(run, **choice) for choice in choices]
    return fastest_call(calls, choices, operands.device, **facts)


def pinned_or(
    choices: Sequence[Mapping[str, Any]], operands: Operands
) -> Sequence[Mapping[str, Any]]:
    """Return the choice that an earlier process made (Operands.pinned), or all to time."""
    if not (pinned := operands.pinned):
        return choices
    names = {name for choice in choices for name in choice}
    return [{name: value for name, value in pinned.items() if name in names}]


def lines_of_parts(
    parts: Mapping[str, Callable[[], object]], device: torch.device
) -> list[dict[str, Any]]:
    """Return a line for each part of a launch, timed alone; `of` is its name, such as "plan".

    So a row of attention whose mask changes has the times of its parts beside that of the whole.
    """
    trials = search([*parts.values()], device, drop=inf).trials
    lines = [{k: v for k, v in asdict(trial).items() if v is not None} for trial in trials]
    return [{"of": of, "choice": {}, **line} for of, line in zip(parts, lines, strict=bool(lines))]


def search(
    candidates: Sequence[Callable[[], object]],
    device: torch.device,
    threads: int = 1,
    drop: float = DROP,
) -> Search:
    """Time the candidates. On a CPU, or if there is only one, take the first without timing.

    With `threads` > 1 the first calls, which compile, run in parallel. With `drop` infinite, every
    candidate is timed to the end, and a single one, too. Raises Unsupported with all reasons if
    every candidate raises.
    """
    if (len(candidates) == 1 and drop < inf) or device.type != "cuda":
        return Search(0)
    with warnings.catch_warnings():
        # torch warns once per process that the choice of a BLAS library is experimental.
        warnings.filterwarnings("ignore", message=".*preferred_blas_library is an experimental")
        reasons = warm_up(candidates, device, threads)
    running = [i for i, reason in enumerate(reasons) if reason is None]
    pool = torch.cuda.graph_pool_handle()
    calls = {i: _capture(candidates[i], device, pool) for i in running}
    flush, clock = flusher(device), GpuClock(device)
    samples: dict[int, list[EventPair]] = {i: [] for i in running}
    least = dict.fromkeys(running, inf)
    best = SHORT_US
    for number in range(SHORT_ROUNDS):
        if number >= ROUNDS and best >= SHORT_US:
            break
        with torch.cuda.device(device):
            taken = clock.cold([calls[i] for i in running], flush)
        for i, sample in zip(running, taken, strict=True):
            samples[i].append(sample)
            least[i] = min(least[i], sample.time_us)
        best = min(least.values())
        if number + 1 >= TRIALS:
            running = [i for i in running if least[i] <= drop * best]
    trials = [Trial(failed=reason) for reason in reasons]
    for i in samples:
        trials[i] = _trial(samples[i], dropped=i not in running)
    return Search(min(running, key=lambda i: trials[i].time_us), tuple(trials))


def _trial(samples: Sequence[EventPair], dropped: bool) -> Trial:
    late = sum(sample.late for sample in samples) / len(samples) or None
    times = [sample.time_us for sample in samples]
    if dropped:
        return Trial(least_us=_short(min(times)), late=late)
    return Trial(_short(median(times)), late=late)


def _short(time_us: float) -> float:
    return round(time_us, 2)  # an event's clock ticks every 32 ns


def warm_up(
    candidates: Sequence[Callable[[], object]], device: torch.device, threads: int
) -> list[str | None]:
    """Call every candidate once, in threads; return why each cannot run, or None if it can.

    Raises Unsupported with all reasons if none can.
    """
    attempt = partial(_reason, device=device)
    if threads == 1:
        reasons = [attempt(candidate) for candidate in candidates]
    else:
        # In a new thread, only a call of the CUDA runtime makes the device's context current.
        with ThreadPoolExecutor(threads, "", partial(torch.cuda.synchronize, device)) as pool:
            reasons = list(pool.map(attempt, candidates))
        # Call candidates that raised once more, alone: Triton calls CPython's parser, which can
        # fail if several threads use it at a time (CPython 3.11, issue 106905).
        pairs = zip(reasons, candidates, strict=True)
        reasons = [reason and attempt(candidate) for reason, candidate in pairs]
    torch.cuda.synchronize(device)  # raises here for an illegal access, which is fatal
    if None not in reasons:
        raise Unsupported("no candidate runs: " + "; ".join(sorted({str(r) for r in reasons})))
    return reasons


def _reason(candidate: Callable[[], object], device: torch.device) -> str | None:
    """Call the candidate; return why it cannot run, or None."""
    try:
        with torch.cuda.device(device):  # the current device is a property of the thread
            candidate()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()[:1]
        return ": ".join([type(error).__name__, *lines])[:REASON]
    return None


def _capture(candidate: Callable[[], object], device: torch.device, pool: Any) -> Call:
    """Return the replay of a graph of the candidate, or the candidate if it cannot be captured.

    All graphs share memory, because no product is used.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
    try:
        with torch.cuda.device(device), capturing(graph, pool):
            candidate()
    except RuntimeError:
        torch.cuda.set_stream(stream)  # torch leaves the stream of a capture that fails
        torch.cuda.synchronize(device)
        return candidate, False
    return graph.replay, True
