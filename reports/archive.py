"""Pack published runs into one small file for a wheel, with the standard library alone.

    results/published/GPU/RUN ─> suite.yaml, environment.json, run.json, lock.txt
                              ─> rows.jsonl     the median of each round, without `candidates`
                              ─> origin.txt     the SHA-256 of the manifest of the whole bundle
    training/*.json, whole/*.json, commits.json   as they are: evidence of claims, and commits

23 MB of rows become 3 MB. A speedup is a median over rounds of ratios of these medians
(tables/frame.py), so it stays as it is; only times of single calls lose their quartiles. setup.py
runs this file, before anything is installed.
"""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

ARCHIVE = "published.tar.xz"
ORIGIN = "origin.txt"
MODEL_FILES = "training/*.json", "whole/*.json"
FILES = "suite.yaml", "environment.json", "run.json", "lock.txt"
DIGITS = {"prepare_s", "convert_us", "error", "error_of_bound", "usual_error", "usual_bias", "bias"}


def pack(published: Path) -> bytes:
    """Return the archive of the runs below a folder; those that were replaced are left out."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:xz", preset=6) as packed:
        for name, data in _contents(published):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            packed.addfile(entry, io.BytesIO(data))
    return archive.getvalue()


def _contents(published: Path) -> Iterator[tuple[str, bytes]]:
    for pattern in ("commits.json", *MODEL_FILES):
        for file in sorted(published.glob(pattern)):
            yield file.relative_to(published).as_posix(), file.read_bytes()
    for run in sorted(file.parent for file in published.glob("*/*/run.json")):
        home = run.relative_to(published).as_posix()
        for name in FILES:
            yield f"{home}/{name}", (run / name).read_bytes()
        manifest = (run / "manifest.json").read_bytes()
        yield f"{home}/{ORIGIN}", hashlib.sha256(manifest).hexdigest().encode()
        zipped = run / "rows.jsonl.gz"
        rows = gzip.decompress(zipped.read_bytes()) if zipped.exists() else b""
        first, *lines = (rows or (run / "rows.jsonl").read_bytes()).decode().splitlines()
        yield f"{home}/rows.jsonl", "\n".join([first, *map(_thin, lines), ""]).encode()


def _thin(line: str) -> str:
    """Return a row with the median of each round, and without what no comparison reads."""
    row: dict[str, Any] = json.loads(line)
    samples, each = row["samples_us"], row["samples_per_block"]
    rounds = [samples[i : i + each] for i in range(0, len(samples), each)]
    row |= {"samples_us": [round(median(r), 4) for r in rounds], "samples_per_block": 1}
    row |= {"candidates": [], "draws": row["draws"][:1]}
    row |= {n: float(f"{v:.3g}") for n in DIGITS if isinstance(v := row.get(n), float)}
    return json.dumps(row, separators=(",", ":"))
