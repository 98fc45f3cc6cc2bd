from dataclasses import replace
from pathlib import Path

import pytest

from sparsebench.kernels._common import tuned_table
from tests.tools.stamp import stamp


def test_a_stamp_changes_the_digests_of_a_table_alone(tmp_path: Path) -> None:
    (package,) = tuned_table.folders()["package"].glob("*.json")
    table = tuned_table.read(package)
    stale = [replace(entry, source="of before") for entry in table.entries]
    file = tmp_path / package.name
    tuned_table.write(file, replace(table, entries=stale))
    assert stamp(file) == len(stale)
    now = tuned_table.read(file).entries
    assert all(entry.current for entry in now)
    assert [replace(entry, source="of before") for entry in now] == stale
    assert stamp(file) == 0


def test_an_entry_of_a_removed_kernel_stops_the_stamp(tmp_path: Path) -> None:
    (package,) = tuned_table.folders()["package"].glob("*.json")
    table = tuned_table.read(package)
    file = tmp_path / package.name
    entries = [replace(table.entries[0], kernel="removed_since")]
    tuned_table.write(file, replace(table, entries=entries))
    with pytest.raises(SystemExit, match="removed_since"):
        stamp(file)
