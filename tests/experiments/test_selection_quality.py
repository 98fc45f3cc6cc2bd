"""The script experiments/selection_quality.py on tiny models."""

from pathlib import Path

import pytest
import selection_quality
from selection_quality import keep_of, visible_share

from sparsebench.errors import SuiteError
from sparsebench.results.selection_files import read_selection
from tests.harness.tiny_models import tiny, tokenizer

OPTIONS = {"context": 256, "contexts": 2, "steps": 20, "block": 16, "device": "cpu"}


def test_shares_are_of_the_blocks_that_causal_rows_see() -> None:
    assert visible_share(4, 4) == 1
    assert visible_share(1, 4) == 0.4
    assert visible_share(2, 4) == 0.7
    assert [keep_of(share, 64) for share in (0.5, 0.25, 0.1, 0.01)] == [19, 9, 3, 2]


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_file_has_dense_and_selected_attention(kind: str, tmp_path: Path) -> None:
    types = {"layer_types": ["sliding_attention", "full_attention"]} if kind == "gemma3" else {}
    model = tiny(kind, initializer_range=0.3, **types)
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    out = tmp_path / "selection.json"
    selection_quality.main(tmp_path, out, keep="0.99,0.2", **OPTIONS)
    report = read_selection(out)
    dense, most, few = report.outcomes
    assert (report.prompts, report.steps, report.layers) == (2 * 108, 2 * 19, 2)
    assert report.selecting == (2 if kind == "llama" else 1)
    assert (dense.keep, dense.share, dense.prompts.agreement) == (None, 1, 1)
    assert most.share > few.share
    assert abs(few.prompts.loss - dense.prompts.loss) > 0.01
    assert abs(few.steps.loss - dense.steps.loss) > 0.01
    assert few.steps.time_us is None
    assert dense.prompts.loss == pytest.approx(most.prompts.loss, rel=0.2)


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / "short.txt").write_text("abc")
    with pytest.raises(SuiteError, match=r"short\.txt: expected at least 510 tokens"):
        selection_quality.main(
            tmp_path, tmp_path / "o.json", text=tmp_path / "short.txt", **OPTIONS
        )


@pytest.mark.parametrize(
    "wrong",
    [
        {"context": 64, "block": 64},  # one block: nothing to select
        {"context": 256, "steps": 128},  # no token of the second half is in the prompt
        {"context": 250},
    ],
)
def test_contexts_that_measure_nothing_are_refused_before_the_work(wrong, tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match="--context: expected"):
        selection_quality.main(tmp_path / "none", tmp_path / "o.json", **{**OPTIONS, **wrong})
    assert not [*tmp_path.iterdir()]
