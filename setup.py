"""Add to pyproject.toml what only the build knows: the commit, and the address of the repository.

    git ────────────────────────┐                  ┌─> wheel: sparsebench/built.json
    SPARSEBENCH_REPOSITORY ─────┴─> built.json ────┼─> sdist: src/sparsebench/built.json
                                                   └─> metadata: addresses, links of README.md
    results/published ─> archive.py ─> wheel: sparsebench/reports/published.tar.xz

A wheel has no history, and PyPI cannot follow relative links of README.md, so the build records
both. `harness/machine/code.py` reads the commit. setuptools-scm would record 7 digits of it and
take the version from tags instead of pyproject.toml.

An sdist cannot hold symbolic links. A build from one, or from a tree that was copied without them,
makes the links of src/sparsebench anew.
"""

import json
import os
import re
import runpy
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "src" / "sparsebench"
FOLDERS = "formats", "harness", "kernels", "reports", "results", "suites"
PAGES = {"Documentation": "README.md", "Changelog": "CHANGELOG.md", "Results": "results/published"}
LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)\s]+\))")


def built() -> dict[str, Any]:
    """Return commit, dirty and repository of the checkout, or what the sdist recorded."""
    facts: dict[str, Any] = {"commit": None, "dirty": None, "repository": None}
    if (PACKAGE / "built.json").exists():
        facts |= json.loads((PACKAGE / "built.json").read_text("utf-8"))
    code = runpy.run_path(str(ROOT / "harness" / "machine" / "code.py"))
    facts |= code["of_checkout"](ROOT) or {}
    if "SPARSEBENCH_REPOSITORY" in os.environ:
        facts["repository"] = os.environ["SPARSEBENCH_REPOSITORY"].rstrip("/")
    return facts


FACTS = built()  # before the build adds folders to the tree, which git would report as changes
for name in FOLDERS:
    if not (PACKAGE / name).exists():
        (PACKAGE / name).symlink_to(Path("..", "..", name))


def write(folder: Path) -> None:
    """Write the facts of this build into the folder of the import package."""
    (folder / "built.json").unlink(missing_ok=True)  # a release's files are hard links
    (folder / "built.json").write_text(json.dumps(FACTS, indent=1) + "\n", "utf-8")


def linked(text: str, repository: str, commit: str) -> str:
    """Return the README with absolute links: pages as rendered, pictures as raw files."""
    pictures = re.sub(r"(!\[[^]]*\]\()(?![a-z]+:)", rf"\1{repository}/raw/{commit}/", text)
    return LINK.sub(rf"\1{repository}/blob/{commit}/\2", pictures)


class BuildPy(build_py):
    """Writes built.json and the published runs into a wheel. An editable install has the tree."""

    def run(self) -> None:
        """Build, and add the files."""
        super().run()
        if not self.editable_mode:
            package = Path(self.build_lib) / "sparsebench"
            write(package)
            archive = runpy.run_path(str(ROOT / "reports" / "archive.py"))
            packed = package / "reports" / archive["ARCHIVE"]
            packed.write_bytes(archive["pack"](ROOT / "results" / "published"))


class Sdist(sdist):
    """Writes built.json into a source distribution."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Lay out the tree, and add the file."""
        super().make_release_tree(base_dir, files)
        write(Path(base_dir) / "src" / "sparsebench")


README = (ROOT / "README.md").read_text("utf-8")
REPOSITORY, COMMIT = FACTS["repository"], FACTS["commit"] or "HEAD"
setup(
    cmdclass={"build_py": BuildPy, "sdist": Sdist},
    long_description=linked(README, REPOSITORY, COMMIT) if REPOSITORY else README,
    long_description_content_type="text/markdown",
    project_urls={"Source": REPOSITORY}
    | {name: f"{REPOSITORY}/blob/{COMMIT}/{page}" for name, page in PAGES.items()}
    if REPOSITORY
    else {},
)
