"""Write kernels/tuned/*.choices: what layers and `matmul` chose in published runs.

    python -P tests/tools/choices.py results/published/nvidia-h200/core [RUN ...]

A row of what users get (`kernel: default`) has problem, choice and digest of the machine
code of each product. A list has one line for each problem: the choice that took the least time, or
for a product inside a larger row, such as a model's step, the choice of most processes.

A problem is left out if more tokens of the same weight take less time (by CLIFF), or if another of
our kernels or configurations did in the same contest, so that a layer searches there. Lines of
other kinds of GPU, and of problems that the runs lack, stay as they are.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from sparsebench._writing import write_file
from sparsebench.kernels._common.choices import file_name, package_folder
from sparsebench.results.record import Row, Status
from sparsebench.results.run import store
from sparsebench.results.tables.families import DEFAULT, is_ours

NOT_CONFIGURATION = "by", "kernel", "problem", "code"  # fields of a choice
SEARCHED = "search", "cache"  # a choice that a search made, in this process or an earlier one
CLIFF = 1.05  # of the least time of more tokens (suite `tokens`), or of another kernel


def products(choice: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the choice of each product of a row; a layer has several.

    Those of attention are left out, because masks differ by call.
    """
    for part in (choice, *choice.values()):
        is_product = isinstance(part, Mapping) and "problem" in part
        if is_product and part["problem"]["op"] != "attention":
            yield part


def line(choice: Mapping[str, Any]) -> tuple[str, str]:
    """Return the problem of a choice, and its line in a list."""
    config = {name: value for name, value in choice.items() if name not in NOT_CONFIGURATION}
    code = {"code": choice["code"]} if choice.get("code") else {}
    written = {"problem": choice["problem"], "kernel": choice["kernel"], "config": config, **code}
    text = json.dumps(written, separators=(",", ":"))
    return json.dumps(choice["problem"], sort_keys=True), text


def write(run: Path, folder: Path) -> tuple[Path, int]:
    """Merge the choices of a run into the list of its GPU; return the list and their number."""
    gpu, rows = store.read(run).environment["gpu"], [*store.rows(run)]
    major, minor = map(int, gpu["compute_capability"].split("."))
    file = folder / file_name((major, minor), gpu["multiprocessors"])
    times = defaultdict[str, dict[str, list[float]]](dict)
    for row in rows:
        if row.status is Status.OK and row.case.contender.kernel == DEFAULT:
            for choice in products(row.choice):
                if choice["by"] in SEARCHED:
                    problem, text = line(choice)
                    time = median(row.samples_us) if choice is row.choice else 0.0
                    times[problem].setdefault(text, []).append(time)
    fastest = {
        problem: min((median(each), -len(each), text) for text, each in by_choice.items())
        for problem, by_choice in times.items()
    }
    old = file.read_text().splitlines() if file.exists() else []
    lines = {json.dumps(json.loads(each)["problem"], sort_keys=True): each for each in old}
    lines |= {problem: text for problem, (_, _, text) in fastest.items()}
    slower = cliffs({problem: time for problem, (time, *_) in fastest.items() if time})
    for problem in {*slower, *beaten(rows)}:
        lines.pop(problem, None)
        fastest.pop(problem, None)
    write_file(file, "".join(f"{lines[problem]}\n" for problem in sorted(lines)))
    return file, len(fastest)


def cliffs(times: Mapping[str, float]) -> list[str]:
    """Return the problems that take over CLIFF times as long as one that differs by more tokens."""
    by_weight = defaultdict[str, list[tuple[int, str]]](list)
    for problem in times:
        fields = json.loads(problem)
        by_weight[json.dumps({**fields, "m": 0})].append((fields["m"], problem))
    return [
        problem
        for same in by_weight.values()
        for m, problem in same
        if any(times[problem] > CLIFF * times[other] for more, other in same if more > m)
    ]


def beaten(rows: Iterable[Row]) -> set[str]:
    """Return the problems whose choice took over CLIFF times as long as another one of ours.

    A gradient's kernel is timed without the packing that a layer repeats in every step, so the same
    kernel in the same configuration is no other choice.
    """
    chosen: dict[Any, list[tuple[str, str, float]]] = defaultdict(list)
    others: dict[Any, list[tuple[str, float]]] = defaultdict(list)
    for row in rows:
        case, options = (
            row.case,
            {n: v for n, v in row.choice.items() if n not in NOT_CONFIGURATION},
        )
        if row.status is not Status.OK or not row.samples_us or case.contender.twin:
            continue
        weight = case.contender.format, json.dumps(case.contender.params, sort_keys=True)
        contest = case.problem.id, *weight, row.scope, row.cache, row.replicate
        config, time = json.dumps(options, sort_keys=True), median(row.samples_us)
        if case.contender.kernel != DEFAULT:
            if is_ours(case.contender.kernel):
                kernel = case.contender.kernel.removesuffix("_dgrad")
                others[contest].append((f"{kernel} {config}", time))
        elif "problem" in row.choice:
            problem = json.dumps(row.choice["problem"], sort_keys=True)
            chosen[contest].append((problem, f"{row.choice['kernel']} {config}", time))
    ratios = defaultdict[str, list[float]](list)
    for contest, choices in chosen.items():
        for problem, choice, time in choices:
            rivals = [each for other, each in others[contest] if other != choice]
            ratios[problem].append(time / min(rivals, default=time))
    return {problem for problem, each in ratios.items() if median(each) > CLIFF}


def main() -> None:
    """Write the package's lists from the runs of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path)
    for run in parser.parse_args().runs:
        file, count = write(run, package_folder())
        print(f"{run}: {count} choices into {file.name}")


if __name__ == "__main__":
    main()
