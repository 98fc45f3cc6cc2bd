"""Tables of authors: their rows beside ours, and files that have changed."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from sparsebench.errors import ResultError
from sparsebench.results.claims.author_tables import read_tables
from sparsebench.results.claims.schema import Table

TABLE = Table(
    of="H100, bf16",
    file="results/a.csv",
    columns=["M", "batch", "speedup"],
    show={"tokens": "M", "6:8": "speedup"},
    only={"batch": "1"},
)
ROWS = "M,batch,speedup\n64,1,0.80\n64,2,0.90\n128,1,\n"


def written(folder: Path, text: str) -> Path:
    file = folder / "checkout" / TABLE.file
    file.parent.mkdir(parents=True)
    file.write_text(text)
    return folder


def test_rows_are_those_of_the_file_in_the_order_that_the_claim_shows(tmp_path: Path) -> None:
    (table,) = read_tables([TABLE], written(tmp_path, ROWS))
    assert table.rows == [["64", "0.80"], ["128", "–"]]
    assert read_tables([TABLE], tmp_path / "checkout" / "results") == []


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("M,speedup\n64,0.8\n", "expected the columns M, batch, speedup; found M, speedup"),
        ("", "found"),
        ("M,batch,speedup\n64,1\n", ":2: expected 3 values, found 2"),
        ("M,batch,speedup\n64,2,0.9\n", "found 0"),
    ],
)
def test_a_file_with_other_columns_or_rows_is_refused(text: str, part: str, tmp_path: Path) -> None:
    with pytest.raises(ResultError) as error:
        read_tables([TABLE], written(tmp_path, text))
    assert part in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "wrong", [{"show": {"tokens": "m"}}, {"only": {"n": "1"}}, {"file": "../a.csv"}]
)
def test_a_claim_names_columns_of_the_file_and_a_file_below_the_folder(wrong) -> None:
    with pytest.raises(ValidationError):
        Table(**{**TABLE.model_dump(), **wrong})
