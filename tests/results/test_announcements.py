"""Each sentence of the announcements has claims that exist, or a reason why it has none."""

import re
from itertools import chain

import pytest

from sparsebench._discovery import documents
from sparsebench.reports.claims.announcements import for_site, markdown
from sparsebench.results.claims.announcements import ANNOUNCEMENTS, CLAIMS
from sparsebench.results.claims.decision import Word
from sparsebench.results.claims.verdict import Basis, Verdict
from tests.tools.command_line import sparsebench
from tests.tools.paths import PUBLISHED, ROOT

SENTENCES = [*chain.from_iterable(each.sentences for each in ANNOUNCEMENTS)]
FROM = "nvidia-h200", "training", "whole"


def tables() -> str:
    page = (ROOT / "suites" / "claims" / "README.md").read_text("utf-8")
    return page.partition("<!-- sentences -->")[2].partition("<!-- end -->")[0].strip()


def test_every_claim_of_the_announcements_belongs_to_a_sentence() -> None:
    names = documents("suites.claims").keys()
    ours = {name for name in names if re.match("(openai-2017|twell-2026|spense-2026)-", name)}
    assert ours <= CLAIMS.keys() <= names
    assert all(bool(each.claims) != bool(each.untested) for each in SENTENCES)


def test_the_readme_has_every_sentence_with_its_claims() -> None:
    rows = [line.split(" | ") for line in tables().splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row[0].startswith(("| ---", "| the announcement says"))]
    names = [tuple(re.findall(r"\[([^]]+)\]\([^)]+\.yaml\): \w", row[1])) for row in rows]
    assert [row[0].removeprefix("| ") for row in rows] == [each.says for each in SENTENCES]
    assert names == [each.claims for each in SENTENCES]


@pytest.mark.exhaustive
def test_the_readme_has_the_verdicts_of_the_published_runs() -> None:
    runs = chain.from_iterable(("--from", PUBLISHED / name) for name in FROM)
    done = sparsebench("claims", "sentences", *runs)
    assert done.stdout.strip() == tables(), done.stderr


def test_site_shows_verdicts_if_it_has_all_claims() -> None:
    verdicts = {
        name: [Verdict(name, "NVIDIA H200", Word.PARTLY, Basis.PROXY, "two cells")]
        for name in CLAIMS
    }
    assert len(for_site(verdicts)) == len(ANNOUNCEMENTS)
    assert "openai-2017-cublas.yaml): partly on H200" in markdown(verdicts)
    assert for_site({"openai-2017-cublas": verdicts["openai-2017-cublas"]}) == []
