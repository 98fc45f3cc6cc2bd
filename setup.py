"""What a build adds to pyproject.toml: which commit it is of, and where the repository is.

    git ────────────────────────┐                  ┌─> wheel: sparsebench/built.json
    SPARSEBENCH_REPOSITORY ─────┴─> built.json ────┼─> sdist: harness/_root/built.json, and so on
                                                   └─> its metadata: addresses, links of README.md

A wheel has no history, and PyPI follows no link of README.md into the repository. Both are asked
when something is built: `harness/machine/code.py` reads the commit. setuptools-scm would record 7
digits of the commit, and would take the version from tags in place of pyproject.toml.
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
BUILT = "harness/_root/built.json"  # in a tree that an sdist was unpacked to
PAGES = {"Documentation": "README.md", "Changelog": "CHANGELOG.md", "Results": "results/published"}
LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)\s]+\))")


def built() -> dict[str, Any]:
    """Return commit, dirty and repository: of the checkout, or as the sdist has them."""
    known = json.loads((ROOT / BUILT).read_text()) if (ROOT / BUILT).exists() else {}
    code = runpy.run_path(str(ROOT / "harness" / "machine" / "code.py"))
    facts = {"commit": None, "dirty": None, "repository": None} | known
    facts |= code["of_checkout"](ROOT) or {}
    if "SPARSEBENCH_REPOSITORY" in os.environ:
        facts["repository"] = os.environ["SPARSEBENCH_REPOSITORY"].rstrip("/")
    return facts


FACTS = built()  # now: a build puts folders into the tree, which git calls changes


def write(folder: Path) -> None:
    """Write what is known of this build into a folder of the import package."""
    (folder / "built.json").unlink(missing_ok=True)  # a release's files are hard links
    (folder / "built.json").write_text(json.dumps(FACTS, indent=1) + "\n")


def linked(text: str, repository: str, commit: str) -> str:
    """Return the README with absolute links: pages as they are shown, pictures as they are."""
    pictures = re.sub(r"(!\[[^]]*\]\()(?![a-z]+:)", rf"\1{repository}/raw/{commit}/", text)
    return LINK.sub(rf"\1{repository}/blob/{commit}/\2", pictures)


class BuildPy(build_py):
    """Writes built.json into a wheel. An editable install has its history beside it."""

    def run(self) -> None:
        """Build, and add the file."""
        super().run()
        if not self.editable_mode:
            write(Path(self.build_lib) / "sparsebench")


class Sdist(sdist):
    """Writes built.json into a source distribution."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Lay out the tree, and add the file."""
        super().make_release_tree(base_dir, files)
        write(Path(base_dir) / "harness" / "_root")


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
