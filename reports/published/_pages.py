"""Pages with generated parts: where they are, what they should say, and what they say.

    results/published/README.md    all of it
    README.md, ARCHITECTURE.md, suites/README.md, kernels/**/README.md    what stands between

        <!-- published: headline -->
        <!-- end -->

Links are written from the root (`](/results/...)`) and made relative to the page that they are on.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from sparsebench.errors import ResultError

PAGE = "results/published/README.md"
WITH_BLOCKS = ("README.md", "ARCHITECTURE.md", "suites/README.md", "kernels/**/README.md")
BLOCK = re.compile(r"(<!-- published: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
OPENING = re.compile(r"<!-- published: (\S+) -->")


def pages(root: Path, whole: str, blocks: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    """Yield each page and the text that it should have; ResultError for a block that is unknown."""
    yield root / PAGE, _linked(whole, root, root / PAGE)
    for path in sorted({path for glob in WITH_BLOCKS for path in root.glob(glob)}):
        text = path.read_text("utf-8")
        if OPENING.search(text):
            yield path, _filled(text, root, path, blocks)


def _filled(text: str, root: Path, path: Path, blocks: Mapping[str, str]) -> str:
    whole = {found.start() for found in BLOCK.finditer(text)}
    for found in OPENING.finditer(text):
        if found[1] not in blocks:
            names = ", ".join(blocks)
            raise ResultError(f"{path}: expected a block of {names}; found {found[1]!r}")
        if found.start() not in whole:
            raise ResultError(f"{path}: expected <!-- end --> after {found[0]}, found none")

    def fill(found: re.Match[str]) -> str:
        return f"{found[1]}{_linked(blocks[found[2]], root, path)}\n{found[4]}"

    return BLOCK.sub(fill, text)


def _linked(text: str, root: Path, path: Path) -> str:
    """Make links that are written from the root relative to a page."""

    def relative(found: re.Match[str]) -> str:
        return f"]({Path(os.path.relpath(root / found[1], path.parent)).as_posix()})"

    return re.sub(r"\]\(/([^)]+)\)", relative, text)
