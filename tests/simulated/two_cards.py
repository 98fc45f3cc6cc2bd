"""How often a second card agrees with the first, on simulated cards.

    d_p = card + regret + process                    of one case in process p of a run

A campaign is PAIRS pairs of runs, each of CASES cases of two kernels on two cards; half of the
variation between cards is common to the cases of a run. Each pair of runs is tested with the
variation that the other pairs show, as for the published runs (results/comparison/repeats.py).

`python tests/simulated/two_cards.py` prints the table of harness/NOTES.md, in three minutes.
"""

from dataclasses import dataclass

import numpy as np

from sparsebench.results.comparison.repeats import TESTS, Verdicts, repeats, with_tests
from tests.simulated.gpu_model import Array, Spec, card_effects
from tests.simulated.runs import regrets

PAIRS, CASES, PROCESSES = 8, 8, 8
KERNELS = "bsr_triton", "bsr_wgrad"  # of the cases in turn


@dataclass(frozen=True)
class World:
    """What differs between runs, as standard deviations of log ratios.

    limited  the share of the pairs with a run whose board is at the power limit
    wider    how much more cards differ for the second kernel, as a factor
    """

    name: str
    card: float = 0.0
    process: float = 0.01
    regret: float = 0.0
    limited: float = 0.0
    wider: float = 1.0


WORLDS = (
    World("equal cards"),
    World("cards differ by 0.3 %", card=0.003),
    World("cards differ by 0.5 %", card=0.005),
    World("cards differ by 1 %", card=0.01),
    World("cards differ by 0.5 %, processes by 0.3 %", card=0.005, process=0.003),
    World("0.4 %, half of the pairs at the power limit", card=0.004, limited=0.5),
    World("0.4 %, searches with a regret of 1 %", card=0.004, regret=0.01),
    World("0.5 %, and 2 % for every second case", card=0.005, wider=4.0),
)


def campaign(world: World, draw: np.random.Generator) -> list[Verdicts]:
    runs = []
    for pair in range(PAIRS):
        for second in (False, True):
            limited = 0.5 if draw.random() < world.limited / 2 else 0.0
            name = f"{pair}{'ab'[second]}"
            logs = _logs(world, limited, draw)
            cases = [_case(number, each, name) for number, each in enumerate(logs)]
            runs.append(Verdicts(name, name, [str(pair)], "", cases))
    return runs


def agreement(world: World, campaigns: int, draw: np.random.Generator) -> dict[str, float]:
    """Return the shares of repeats that pass each of TESTS, over some campaigns."""
    shares = [
        with_tests(repeats(campaign(world, draw)), published=True)[TESTS].mean()
        for _ in range(campaigns)
    ]
    return dict(zip(TESTS, np.mean(shares, axis=0).tolist(), strict=True))


def _logs(world: World, limited: float, draw: np.random.Generator) -> Array:
    """Return the log speedups [cases, processes] of a run."""
    spec = Spec(card=world.card, limited=limited, regret=world.regret)
    common, single = (card_effects(spec, draw, shape) for shape in ((2, 1, 1), (2, CASES, 1)))
    base, kernel = (common + single) / np.sqrt(2) * np.resize([1, world.wider], (CASES, 1))
    regret = np.diff(regrets(spec, draw, (2, CASES, PROCESSES)), axis=0)[0]
    process: Array = draw.normal(0, world.process, (CASES, PROCESSES))
    return np.asarray(base - kernel - regret + process)


def _case(number: int, logs: Array, card: str) -> dict[str, object]:
    names = {"case_id": str(number), "scope": "kernel", "cache": "cold"}
    names |= {"op": "linear", "kernel": KERNELS[number % len(KERNELS)]}
    labels = {"label": "bsr/bsr_triton", "baseline_label": "dense/cublas"}
    measured = {"cards": [f"GPU-{card}"], "compiled": [], "speedups": np.exp(logs).tolist()}
    return {**names, **labels, **measured, "us": 100.0}


def main(campaigns: int = 25) -> None:
    draw = np.random.default_rng(23)
    print("| world | inside | covers 0, processes alone | with cards |")
    print("|---|---|---|---|")
    for world in WORLDS:
        shares = agreement(world, campaigns, draw).values()
        print(f"| {world.name} | {' | '.join(f'{100 * share:.0f} %' for share in shares)} |")


if __name__ == "__main__":
    main()
