"""The published runs of a wheel: one file, unpacked once, with the ratios of the whole rows."""

import shutil
from pathlib import Path

import pandas as pd
import pytest

from sparsebench.reports import published_runs as published
from sparsebench.reports.archive import ARCHIVE, pack
from sparsebench.results.run import bundle, store
from sparsebench.results.tables.analysis import analyse
from tests.tools.paths import PUBLISHED

NAME = "nvidia-h200/decode-confirmed"
SAME = ["case_id", "scope", "cache", "status", "speedup", "speedup_low", "speedup_high", "outcome"]


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in for the package of a wheel with one published run; return the cache's folder."""
    clone, package = tmp_path / "clone", tmp_path / "package"
    shutil.copytree(PUBLISHED / NAME, clone / NAME)
    (clone / "whole").mkdir()
    (clone / "whole" / "a.json").write_text("{}")
    package.mkdir()
    (package / ARCHIVE).write_bytes(pack(clone))
    monkeypatch.setattr(published, "files", lambda name: package)
    monkeypatch.setattr(published, "HOME", tmp_path / "nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_clone_needs_no_archive() -> None:
    assert published.published_runs().resolve() == PUBLISHED.resolve()


def test_a_wheel_unpacks_its_runs_once(wheel: Path) -> None:
    home = published.published_runs()
    assert home.is_relative_to(wheel)
    rows = home / NAME / "rows.jsonl.gz"
    before = rows.stat().st_mtime_ns
    assert published.published_runs() == home
    assert rows.stat().st_mtime_ns == before
    assert bundle.verify(home / NAME) == sorted(bundle.REQUIRED)
    assert (home / NAME / "origin.txt").read_text() == bundle.identity(PUBLISHED / NAME)
    assert [path.name for path in published.published_evidence()] == ["decode-confirmed", "a.json"]


def test_the_ratios_of_a_wheel_are_those_of_the_whole_rows(wheel: Path) -> None:
    small = analyse(store.read(published.published_runs() / NAME)).cases
    whole = analyse(store.read(PUBLISHED / NAME)).cases
    pd.testing.assert_frame_equal(small[SAME], whole[SAME], rtol=1e-3)
    assert (small.median_us / whole.median_us - 1).abs().max() < 0.02


def test_an_installation_without_published_runs_says_where_they_would_be(wheel: Path) -> None:
    shutil.rmtree(wheel.parent / "package")
    assert published.published_runs() == published.HOME
    assert published.published_evidence() == []


def test_an_archive_is_smaller_than_the_compressed_rows(tmp_path: Path) -> None:
    shutil.copytree(PUBLISHED / NAME, tmp_path / NAME)
    assert 2 * len(pack(tmp_path)) < (PUBLISHED / NAME / "rows.jsonl.gz").stat().st_size
