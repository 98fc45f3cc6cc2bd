"""The folder of the published runs: that of a clone, or what comes with a wheel.

    results/published                  in the working directory, or in the clone of the package
    published.tar.xz in the package    unpacked once into $XDG_CACHE_HOME/sparsebench/published-…

setup.py packs the second from the first (archive.py). Its runs have the median of each round in
place of every sample, so ratios and intervals are the same.
"""

import gzip
import hashlib
import tarfile
from importlib.resources import as_file, files
from pathlib import Path

from sparsebench._writing import cache_folder, write_file
from sparsebench.reports.archive import ARCHIVE, MODEL_FILES
from sparsebench.results.run import bundle, store

HOME = Path("results/published")


def published_runs() -> Path:
    """Return the folder of the published runs. It is empty or missing if none came along.

    Raises ResultError if the cache cannot be written.
    """
    package = files("sparsebench.reports")
    for home in (HOME, Path(str(package)).resolve().with_name("results") / "published"):
        if next(home.glob("*/*/run.json"), None):
            return home
    archive = package / ARCHIVE
    if not archive.is_file():
        return HOME
    with as_file(archive) as file:
        unpacked = cache_folder(f"published-{hashlib.sha256(file.read_bytes()).hexdigest()[:10]}")
        if not unpacked.exists():
            _unpack(file, unpacked)
    return unpacked


def published_evidence() -> list[Path]:
    """Return the published runs and files that claims are judged by, for a site or a report."""
    home = published_runs()
    runs = sorted(file.parent for file in home.glob("*/*/run.json"))
    return [*runs, *(file for pattern in MODEL_FILES for file in sorted(home.glob(pattern)))]


def _unpack(archive: Path, to: Path) -> None:
    with store.new_directory(to) as fresh, tarfile.open(archive) as packed:
        packed.extractall(fresh, filter="data")
        for rows in fresh.rglob(bundle.ROWS):
            zipped = gzip.compress(rows.read_bytes(), 1, mtime=0)
            write_file(rows.with_name(f"{bundle.ROWS}.gz"), zipped)
            rows.unlink()
            names = {file.name.removesuffix(".gz") for file in rows.parent.iterdir()}
            bundle.seal_files(rows.parent, sorted(names & bundle.REQUIRED))
