"""How sharing a plan grows: many cases over many GPUs, on simulated ones; no worker is started.

    time      an event loop over parts that claim contests (run/plan_part.py) in a real folder.
              What a contest takes is drawn from growth_costs.json: runs of an NVIDIA H200, frozen,
              so that a new publication does not change the table
    merging   rows of the simulated GPU in a run directory a part, merged for real

`python tests/simulated/growth.py` prints the tables of harness/CLUSTER.md, in two minutes.
"""

import heapq
import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from sparsebench.harness.bench.contest_state import ContestOptions
from sparsebench.harness.plan.selection import planned
from sparsebench.harness.plan.suite import Contest, Suite, expand
from sparsebench.harness.run.plan_part import Part
from sparsebench.harness.run.run_json import Counts, Flags, Record, now
from sparsebench.harness.run.validation import validate
from sparsebench.harness.shared_runs import shared_folder as folders
from sparsebench.harness.shared_runs.merging import merge
from sparsebench.harness.shared_runs.shared_folder import Plan
from sparsebench.harness.sim import simulated_contest as sim_contest
from sparsebench.harness.sim import simulated_worker as sim_worker
from sparsebench.harness.sim.gpu_model import Spec
from sparsebench.results import bundle, store

COSTS = Path(__file__).parent / "growth_costs.json"
PLANS = (1, 0.0), (2, 0.0), (8, 0.0), (64, 0.0), (64, 600.0)  # GPUs, seconds between their starts
REPLICATES = 3
START_S = 5.0  # a process: imports, CUDA; measured on an H200, as are the others
CEILINGS_S = 3.0  # of a part
FLOOR_S = 1.0  # a noise-floor contest
LATER = 0.4  # of what a contest takes in the first process: later ones do not search
SUITE = """
schema: sparsebench/suite@1
title: Many cases
problems:
  - {op: linear, n: 4096, k: 4096, m: MS, dtype: bf16, pattern: blocks, block: [32, 64, 128],
     sparsity: [0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99], seed: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]}
contenders:
  - {format: bsr, kernel: bsr_triton, params: {block: $block}}
  - {format: bsr, kernel: bsr_wgmma, params: {block: $block}}
  - {format: csr, kernel: cusparse_csr}
baselines:
  - {format: dense, kernel: cublas}
"""


@dataclass(frozen=True)
class Grown:
    """What a plan took on so many GPUs: hours by the clock, of all GPUs, contests of a part."""

    gpus: int
    wall_s: float
    gpu_s: float
    least: int
    most: int


def suite(sizes: int = 10) -> Suite:
    """Return a suite of 240 problems for each of some numbers of tokens, four cases each."""
    return expand("many.yaml", SUITE.replace("MS", str([2**n for n in range(sizes)])))


def contest_seconds() -> list[float]:
    """Return what contests took in first processes, in seconds."""
    took: list[float] = json.loads(COSTS.read_text("utf-8"))["contest_s"]
    return took


def grown(asked: Suite, gpus: int, folder: Path, took: list[float], late_s: float = 0.0) -> Grown:
    """Share the plan out and return what it took; parts begin within `late_s` of the first."""
    contests = planned(asked, "sim")
    plan = Plan(asked.name, Flags("sim", replicates=REPLICATES), ("sim",) * gpus)
    folders.create(folder, plan, asked.text)
    draw = random.Random("costs")
    cost_s = {c.problem.id: FLOOR_S if c.reference else draw.choice(took) for c in contests}
    waiting: list[tuple[float, int, Iterator[tuple[int, Contest | None]]]] = []
    began: dict[int, float] = {}
    for number in range(1, gpus + 1):
        began[number] = draw.uniform(0, late_s)
        heapq.heappush(waiting, (began[number], number, _turns(Part(folder, number, ""), contests)))
    done, ended = dict.fromkeys(began, 0), dict(began)
    while waiting:
        now_s, number, turns = heapq.heappop(waiting)
        ended[number] = now_s
        if turn := next(turns, None):
            replicate, contest = turn
            if contest is None:
                spent_s = START_S + (CEILINGS_S if replicate == 0 else 0.0)
            else:
                spent_s = cost_s[contest.problem.id] * (1.0 if replicate == 0 else LATER)
                done[number] += 1
            heapq.heappush(waiting, (now_s + spent_s, number, turns))
    spent = sum(ended[number] - began[number] for number in began)
    return Grown(gpus, max(ended.values()), spent, min(done.values()), max(done.values()))


def _turns(part: Part, contests: list[Contest]) -> Iterator[tuple[int, Contest | None]]:
    """Yield what a part does, one after the other; None is the start of a process."""
    for replicate in range(REPLICATES):
        order = random.Random(f"{replicate} {part.number}").sample(contests, len(contests))
        if replicate == 0 and not part.reserve(order):
            return
        yield replicate, None
        yield from ((replicate, contest) for contest in part.take(order, replicate))


def written(asked: Suite, gpus: int, folder: Path) -> list[Path]:
    """Write the run of each part of one process, as simulated GPUs would."""
    contests, flags = planned(asked, "sim"), Flags("sim", replicates=1)
    folders.create(folder, Plan(asked.name, flags, ("sim",) * gpus), asked.text)
    parts = {n: Part(folder, n, str(n % 8)) for n in range(1, gpus + 1)}
    turns = {n: part.take(contests, 0) for n, part in parts.items()}
    mine: dict[int, list[Contest]] = {n: [] for n in parts}
    while turns:
        for number in [*turns]:
            if contest := next(turns[number], None):
                mine[number].append(contest)
            else:
                del turns[number]
    about = sim_worker._environment("sim", Spec())
    for number, own in mine.items():
        spec = Spec(seed=number)
        environment = about | {"gpu": about["gpu"] | {"uuid": spec.identity}}
        ceilings = {"ceilings": asdict(sim_worker._ceilings(spec))}
        part = {"part": {"number": number, "host": str(number % 8)}, "choices": "first process"}
        record = Record(asked.name, flags, len(own), part, now())
        rows = [
            row
            for contest in own
            for row in sim_contest.run(
                spec, contest.problem, contest.contenders, options(contest), lambda case, at: None
            )
        ]
        run = folder / str(number) / "1"
        store.create(run, asked.text, environment | ceilings, record.at("running", Counts(), {}))
        store.append(run, rows)
        store.set_state(run, record.at("finished", Counts(rows), {}))
        bundle.seal(run)
    return [folder / str(number) / "1" for number in mine]


def options(contest: Contest) -> ContestOptions:
    return ContestOptions(measures=(("kernel", "cold"),), reference=contest.reference)


def grown_here(asked: Suite, gpus: int, took: list[float], late_s: float = 0.0) -> Grown:
    """Share the plan out in a folder that is there no longer."""
    with TemporaryDirectory() as folder:
        return grown(asked, gpus, Path(folder) / "run.shards", took, late_s)


def line(found: Grown, alone_s: float, late_s: float) -> str:
    """Write a line of the table."""
    cells = (
        f"{found.gpus}{', begun within 10 min' if late_s else ''}",
        f"{found.wall_s / 60:.1f}",
        f"{found.wall_s * found.gpus / alone_s:.2f}",
        f"{found.gpu_s / 3600:.2f}",
        f"{found.least} to {found.most}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the tables."""
    took, whole = contest_seconds(), suite()
    cases = sum(len(contest.contenders) for contest in whole.contests)
    print(f"{cases} cases, {len(whole.contests)} problems, {REPLICATES} processes of each\n")
    print("| GPUs | minutes | × GPUs / minutes of one | GPU hours | contests of a part |")
    print("|---|---|---|---|---|")
    alone_s = grown_here(whole, 1, took).wall_s
    for gpus, late_s in PLANS:
        print(line(grown_here(whole, gpus, took, late_s), alone_s, late_s))
    with TemporaryDirectory() as folder:
        runs = written(whole, 64, Path(folder) / "run.shards")
        began = time.monotonic()
        out = merge(runs, Path(folder) / "run")
        merged_s = time.monotonic() - began
        megabytes = (out / "rows.jsonl").stat().st_size / 1e6
        began = time.monotonic()
        list(validate(out))
        validated_s = time.monotonic() - began
        count = len(store.rows(out))
    print(f"\n64 shards, {count} rows, {megabytes:.0f} MB: merged in {merged_s:.0f} s,")
    print(f"validated in {validated_s:.0f} s.")


if __name__ == "__main__":
    main()
