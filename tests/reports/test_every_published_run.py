"""What holds in all published runs. They take 20 s to read, and gigabytes while they are kept."""

import pytest

from sparsebench.reports import published
from sparsebench.reports.headline import PublishedRun, read
from tests.results.test_few_tokens import KNOWN, slower
from tests.tools.paths import ROOT

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def runs() -> dict[str, PublishedRun]:
    return read(ROOT)


def test_no_page_differs_from_its_bundles(runs: dict[str, PublishedRun]) -> None:
    pages = [str(path.relative_to(ROOT)) for path in published.differing(ROOT, runs)]
    assert not pages, "run python -m sparsebench.reports.published"


def test_no_dense_product_of_few_tokens_is_slower_than_one_of_more(
    runs: dict[str, PublishedRun],
) -> None:
    of_runs = {"/".join(run.run.path.parts[-2:]): slower(run) for run in runs.values()}
    assert len(of_runs) == len(runs)
    assert {name: lines for name, lines in of_runs.items() if lines} == {
        name: lines for name, lines in KNOWN.items() if name in of_runs
    }
