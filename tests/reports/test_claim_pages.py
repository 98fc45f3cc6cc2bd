"""Pages of claims: their text, their figures and their table on a site."""

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import yaml

from sparsebench.harness.claims.checking import evidence
from sparsebench.harness.claims.claim_plan import read_claims
from sparsebench.reports.claims.pages import (
    ClaimEntry,
    alone,
    conditions,
    entries,
    lines,
    pages,
)
from sparsebench.reports.claims.sheets import plain_words
from sparsebench.reports.site import run_folder
from sparsebench.reports.site.pages import Site
from sparsebench.reports.site.publish import publish
from sparsebench.results.claims.cells import ClaimCell
from sparsebench.results.claims.decision import Word
from sparsebench.results.claims.planned import PlannedClaim
from sparsebench.results.claims.schema import ClaimFile, parse
from sparsebench.results.claims.verdict import Basis
from tests.results.claim_examples import CLAIM, cell, claimed, spread
from tests.tools.paths import PUBLISHED

STEP = PUBLISHED / "nvidia-h200" / "ffn-step"
PRUNED = PUBLISHED / "pruning" / "gemma-3-270m-q4_k_m.json"


def written(**changed: object) -> ClaimFile:
    """Return a claim as if it had been read from mine.yaml."""
    read = parse("mine.yaml", CLAIM)
    return ClaimFile("mine", "mine.yaml", claimed(**changed), read.root)


def entry(*cells: ClaimCell, **changed: object) -> ClaimEntry:
    claim = written(**changed)
    problems = {"over dense": {each.problem for each in cells}}
    (result,) = entries([PlannedClaim(claim, problems)], {"mine": cells})
    return result


def page(of: ClaimEntry) -> str:
    texts = dict(alone([of], "1.0"))
    assert set(texts) == {"style.css", "report.js", "claims/index.html", "claims/mine.html"}
    return texts["claims/mine.html"]


def test_a_page_has_quote_and_command() -> None:
    claim = claimed()
    text = page(entry(*(cell(claim, spread(v), p) for v, p in ((2.5, "a"), (1.5, "b")))))
    assert "“It is twice as fast as dense”" in text
    assert "sparsebench claims check mine --replicates 8" in text
    assert '<a href="../index.html">' not in text  # the claims are in a separate folder


def test_the_value_beside_a_claim_is_of_the_test_closest_to_it_and_names_its_scope() -> None:
    test = yaml.safe_load(CLAIM)["tests"][0] | {"quantifier": "typical"}
    model = test | {"name": "a model", "whole": "forward", "proxy": "random weights"}
    layer = test | {"name": "a layer", "proxy": "one layer"}
    claim = {"tests": [layer, model], "missing": "a trained model"}
    read = claimed(**claim)
    cells = [
        replace(cell(read, spread(1.6)), test="a layer"),
        replace(cell(read, [1.23]), test="a model"),
    ]
    (line,) = lines([entry(*cells, **claim)])
    assert line["measured"] == "1.23×, one process"
    assert line["scope"] == "a model; a proxy: random weights"
    (line,) = lines([entry(cells[0], **claim)])
    assert (line["measured"][:5], line["scope"]) == ("1.60×", "a layer; a proxy: one layer")
    (line,) = lines([entry(cell(claimed(), spread(2.5)))])
    assert (line["measured"][:4], line["scope"]) == ("2.50", "")


def test_runs_on_a_site_are_links_and_files_of_models_are_not() -> None:
    claim = claimed(quantifier="for_all")
    run = cell(claim, spread(2.5), "a", run="h200/ffn over h200/core")
    file = cell(claim, spread(2.4), "b", run="a-model", case_ids=())
    site = dict(pages([entry(run, file, quantifier="for_all")], Site()))["claims/mine.html"]
    for name in ("h200/ffn", "h200/core"):
        assert site.count(f'<a href="../{name}/index.html">{name}</a>') == 2
    assert "a-model/index.html" not in site


def test_what_is_not_known_of_a_run_is_left_out() -> None:
    claim = claimed(quantifier="for_all")
    run = cell(claim, spread(2.5), "a", run="h200/ffn", commit="1234567")
    file = cell(claim, (), "b", run="a-model", case_ids=(), reason="not measured")
    text = page(entry(run, file, quantifier="for_all"))
    assert "Measured in a-model; h200/ffn (commit 1234567, 8 processes)." in text


def test_backticks_of_a_claim_are_code_on_every_page() -> None:
    untested = entry(tests=[], measure=None, missing="a file of `whole` <of a model>")
    texts = dict(alone([untested], "1.0"))
    for name in ("claims/mine.html", "claims/index.html"):
        assert "<code>whole</code> &lt;of a model&gt;" in texts[name]
        assert "`" not in texts[name]


def test_conditions_have_the_published_value_and_ours() -> None:
    published = {
        "dtype": {"published": "bf16", "ours": "fp8"},
        "GPU": {"published": "B200"},
        "tokens": {"published": None, "ours": 4},
        "server": {"published": "vLLM"},
    }
    claim = claimed(conditions=published)
    texts = conditions(entry(cell(claim, spread(2.5)), conditions=published))
    assert texts == [
        ("dtype", "bf16", "fp8"),
        ("GPU", "B200", "NVIDIA H200"),
        ("tokens", "unknown", "4"),
        ("server", "vLLM", "not measured"),
    ]


def test_a_table_counts_a_problem_once() -> None:
    claim = claimed(quantifier="for_all")
    cells = [cell(claim, spread(2.1 + i / 10), f"p{i}", run="good") for i in range(3)]
    looks = [cell(claim, spread(2.5, processes=2), f"p{i}", run="look") for i in range(3)]
    text = page(entry(*cells, *looks, quantifier="for_all"))
    assert "3 of 3 cells" in text
    assert text.count("not counted") == 3


WORDS: list[tuple[dict[str, Any], list[float], str]] = [
    ({}, [2.5], "holds"),
    ({"claimed": "twice"}, [1.64], "falls short: 1.64× (claimed: twice)"),
    ({}, [1.64, 1.2], "falls short: best 1.64× (claimed: 2×)"),
    ({"quantifier": "typical"}, [1.64, 1.64], "falls short: mean 1.64× (claimed: 2×)"),
    ({"quantifier": "for_all"}, [2.5, 1.2, 2.6], "holds in 2 of 3 cells"),
    ({"proxy": "a kernel", "missing": "it"}, [2.5], "measured under other conditions: 2.50×"),
    ({"hardware": {"scope": "named", "gpus": ["B200"]}}, [1.5], "measured under other conditions"),
]


@pytest.mark.parametrize(("changed", "values", "words"), WORDS)
def test_a_verdict_is_written_in_plain_words_with_its_numbers(changed, values, words) -> None:
    claim = claimed(**changed)
    cells = [cell(claim, spread(value), f"p{i}") for i, value in enumerate(values)]
    (verdict,) = entry(*cells, **changed).verdicts
    assert plain_words(verdict).startswith(words)


def test_a_claim_of_two_tests_holds_in_tests_or_else_in_cells() -> None:
    first = yaml.safe_load(CLAIM)["tests"][0] | {"quantifier": "for_all"}
    tests = [first | {"name": name} for name in ("one", "two")]

    def words(*values: tuple[str, float]) -> str:
        of = claimed(tests=tests)
        cells = [
            replace(cell(of, spread(value), f"p{i}"), test=name)
            for i, (name, value) in enumerate(values)
        ]
        problems = {n: {c.problem for c in cells if c.test == n} for n in ("one", "two")}
        planned = PlannedClaim(written(tests=tests), problems)
        return plain_words(ClaimEntry(planned, cells).verdicts[0])

    assert words(("one", 2.5), ("two", 1.5)) == "holds in 1 of 2 tests"
    assert words(("one", 2.5), ("one", 1.5), ("two", 1.5)) == "holds in 1 of 3 cells"


@pytest.mark.parametrize("quantifier", ["exists", "typical", "for_all"])
def test_a_claim_that_every_cell_misses_never_holds_in_part(quantifier: str) -> None:
    for values in product((0.5, 1.0, 1.5, 1.9), repeat=2):
        claim = claimed(quantifier=quantifier)
        cells = [cell(claim, spread(value), f"p{i}") for i, value in enumerate(values)]
        (verdict,) = entry(*cells, quantifier=quantifier).verdicts
        assert "holds" not in plain_words(verdict)


def test_the_table_can_be_narrowed_by_what_its_rows_say() -> None:
    claim = claimed()
    texts = dict(alone([entry(cell(claim, spread(2.5)))], "1.0"))
    table = texts["claims/index.html"]
    for name, value in re.findall(r'data-(verdict|gpu|conditions)="([^"]+)"', table):
        label = {"gpu": "GPU"}.get(name, name)
        assert f"<option>{value}</option>" in table.partition(f'<select name="{label}"')[2]
    assert "tested: " not in table
    stated = dict(alone([entry(cell(claim, spread(1.5)), claimed="twice")], "1.0"))
    assert "tested: speedup ≥ 2× in a cell" in stated["claims/index.html"]


def test_a_verdict_comes_before_a_device_that_ran_nothing() -> None:
    claim = claimed()
    real = cell(claim, spread(2.5), device="NVIDIA H200")
    none = cell(claim, [1.0], device="A CPU", reason="it needs a GPU")
    text = page(entry(none, real))
    assert ": holds · sparsebench</title>" in text


def test_a_site_judges_claims_by_its_runs_and_links_to_them(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(run_folder, "build", lambda *arguments, **more: None)  # a slow report
    plan = evidence(read_claims(["twell-2026-training", "macko-2025"])).planned()
    publish([STEP], tmp_path / "site", Site(claims=plan), lambda run: None)
    assert 'href="claims/index.html"' in (tmp_path / "site" / "index.html").read_text()
    table = (tmp_path / "site" / "claims" / "index.html").read_text()
    rows = re.findall(r'<td class="wrap"><a href="([\w-]+)\.html">', table)
    assert rows == ["twell-2026-training", "macko-2025"]
    assert re.findall(r'<span class="badge \w+">(\d) ', table)
    text = (tmp_path / "site" / "claims" / "twell-2026-training.html").read_text()
    (verdict,) = evidence(read_claims(["twell-2026-training"]), [STEP]).verdicts().popitem()[1]
    assert (verdict.word, verdict.basis) == (Word.OTHER_CONDITIONS, Basis.PROXY)
    assert f": {plain_words(verdict)} · sparsebench</title>" in text
    assert '<a href="../h200/ffn-step/index.html">h200/ffn-step</a>' in text
    again = publish([STEP], tmp_path / "site", Site(claims=plan), lambda run: None)
    assert again.written == []
    fewer = publish([STEP], tmp_path / "site", Site(claims=plan[:1]), lambda run: None)
    assert len(fewer.written) == 1
    assert not (tmp_path / "site" / "claims" / "macko-2025.html").exists()
