"""Files about models that someone edited: each is refused in one line, or read as it is."""

import json
from pathlib import Path
from typing import Any

import pytest

from sparsebench.errors import ResultError
from sparsebench.results.model_files import read_pruning
from sparsebench.results.selection_files import read_selection
from tests.tools.paths import PUBLISHED

RECOVERED = sorted(PUBLISHED.glob("pruning/*-recovered*.json"))[0]
SELECTION = next(iter(sorted((PUBLISHED / "selection").glob("*.json"))))


def edited(file: Path, to: Path, keys: tuple[Any, ...], value: Any) -> Path:
    """Write a file with another value."""
    top = json.loads(file.read_text("utf-8"))
    part = top
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    to.write_text(json.dumps(top), "utf-8")
    return to


RECOVERY = "outcomes", 0, "recovery"


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("schema",), "sparsebench/pruning@9", "schema: expected 'sparsebench/pruning@1'"),
        (("loss",), None, "outcomes.0: expected a loss before and after pruning, or neither"),
        (("outcomes", 0, "loss"), None, "outcomes.0: expected a loss before and after"),
        ((*RECOVERY, "loss"), 9.0, "outcomes.0.recovery: expected a rise of the loss from"),
        ((*RECOVERY, "low"), 5.0, "outcomes.0.recovery: expected a rise of the loss from 5 to"),
        ((*RECOVERY, "tokens"), 0, "outcomes.0.recovery.tokens: expected greater than 0"),
        (("outcomes",), [], "outcomes: expected at least one value"),
    ],
)
def test_an_edited_recovery_is_refused(keys, value, message: str, tmp_path: Path) -> None:
    assert read_pruning(RECOVERED).outcomes[0].recovery
    with pytest.raises(ResultError, match=message) as error:
        read_pruning(edited(RECOVERED, tmp_path / "edited.json", keys, value))
    assert "\n" not in str(error.value)


OUTCOMES = json.loads(SELECTION.read_text("utf-8"))["outcomes"]


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("outcomes",), OUTCOMES[1:], "outcomes.0.keep: expected no keep in the first outcome"),
        (("outcomes",), OUTCOMES[::-1], "outcomes.0.keep: expected no keep"),
        (("outcomes", 1, "keep"), None, "outcomes.1.keep: expected .* found None"),
        (("selecting",), 99, "selecting: expected at most all layers, 18; found 99"),
    ],
)
def test_an_edited_selection_is_refused(keys, value, message: str, tmp_path: Path) -> None:
    assert read_selection(SELECTION).outcomes[0].keep is None
    with pytest.raises(ResultError, match=message):
        read_selection(edited(SELECTION, tmp_path / "edited.json", keys, value))


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", '{"schema": "spar', "[" * 100_000])
def test_a_file_that_holds_no_result_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "half.json"
    file.write_text(text, "utf-8")
    for read in (read_pruning, read_selection):
        with pytest.raises(ResultError) as error:
            read(file)
        assert str(error.value).startswith(f"{file}: ")
        assert "\n" not in str(error.value)
