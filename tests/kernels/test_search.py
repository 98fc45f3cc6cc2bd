"""The lines of a search: the choice of each candidate, with its time or the reason for none."""

import pytest
import torch

from sparsebench.errors import Unsupported
from sparsebench.kernels._common import search as module
from sparsebench.kernels._common.search import (
    FINALISTS,
    MOST_LINES,
    Search,
    Trial,
    finalists,
    lines_of,
    near,
    part_of,
    search,
)
from sparsebench.kernels._kernel import Launch

CHOICES = [{"tile": tile, "warps": 4} for tile in (16, 32, 64)]


def test_lines_have_what_differs_with_the_default_first_and_the_choice_marked() -> None:
    trials = Trial(median_us=12.0), Trial(median_us=9.5), Trial(failed="OutOfResources: shared")
    assert Search(1, trials).lines(CHOICES, of="down") == [
        {"of": "down", "choice": {"tile": 16}, "median_us": 12.0},
        {"of": "down", "choice": {"tile": 32}, "median_us": 9.5, "kept": True},
        {"of": "down", "choice": {"tile": 64}, "failed": "OutOfResources: shared"},
    ]
    assert Search(0).lines(CHOICES[:1]) == []  # nothing was timed


def test_of_many_candidates_the_default_and_the_fastest_are_listed() -> None:
    count = 3 * MOST_LINES
    trials = tuple(Trial(least_us=1000.0 - i) for i in range(count))
    lines = Search(count - 1, trials).lines([{"tile": i} for i in range(count)])
    assert len(lines) == MOST_LINES + 1
    assert lines[0]["choice"] == {"tile": 0}
    assert lines[1]["choice"] == {"tile": count - MOST_LINES + 1}
    assert lines[-2]["kept"]
    assert lines[-1] == {"left_out": count - MOST_LINES}


def test_candidates_of_a_part_name_the_part() -> None:
    launch = Launch(lambda: torch.zeros(1), candidates=[{"choice": {}, "median_us": 1.0}])
    assert lines_of("down", launch) == [{"choice": {}, "median_us": 1.0, "of": "down"}]


def test_a_part_of_a_part_keeps_its_name() -> None:
    entries = [{"choice": {"tile": 1}, "median_us": 1.0}]
    down = lines_of("down", Launch(lambda: torch.zeros(1), candidates=entries))
    whole = lines_of("dense, layer", Launch(lambda: torch.zeros(1), candidates=down))
    assert whole[0]["of"] == "dense, layer, down"
    assert part_of("dense, layer", whole) == down
    assert part_of("down", down) == entries
    assert part_of("dense", [{"of": "dense part"}]) == []


def test_finalists_are_the_default_and_candidates_near_the_fastest() -> None:
    assert near([]) == []
    assert near([9.0, 5.0, 5.4, 5.6, 5.2]) == [0, 1, 2, 4]
    assert len(near([9.0, *[5.0] * 40])) == 1 + FINALISTS
    trials = Trial(median_us=9.0), Trial(failed="no"), Trial(median_us=5.0), Trial(least_us=7.0)
    lines = Search(2, trials).lines([{"of_all": 1, "tile": i} for i in range(4)], whole=True)
    assert finalists(lines) == [{"of_all": 1, "tile": 0}, {"of_all": 1, "tile": 2}]
    assert finalists([*lines, {"left_out": 3}]) == finalists(lines)
    assert finalists([]) == []


def test_a_candidate_that_raises_has_its_reason_in_one_short_line() -> None:
    def fails() -> None:
        raise RuntimeError("no room" + 1000 * "!" + "\nfor the rest")

    def fails_without_a_message() -> None:
        raise NotImplementedError

    def works() -> None:
        return None

    device = torch.device("cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device", lambda device: pytest.MonkeyPatch.context())
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        right, wrong, silent = module.warm_up([works, fails, fails_without_a_message], device, 1)
        assert (right, silent) == (None, "NotImplementedError")
        assert str(wrong).startswith("RuntimeError: no room!!!")
        assert len(str(wrong)) == module.REASON
        with pytest.raises(Unsupported, match=r"no candidate runs: RuntimeError: no room!+$"):
            module.warm_up([fails], device, 1)


def test_on_a_cpu_the_first_candidate_is_taken_without_lines() -> None:
    winner = search([lambda: 1, lambda: 2], torch.device("cpu"))
    assert (winner.best, winner.trials) == (0, ())
