"""What is released: the sdist is the repository, the wheel is the same from either, and says where
it is from."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from sparsebench.harness.machine.code import code_sha256
from sparsebench.reports.archive import ARCHIVE, pack
from tests.tools.paths import PUBLISHED, ROOT

REPOSITORY = "https://forge.example/o/r"
needs_git = pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="needs a checkout: git lists its files"
)


def git(*command: str, at: Path) -> str:
    named = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
    done = subprocess.run(["git", "-C", at, *named, *command], capture_output=True, check=True)
    return done.stdout.decode().strip()


def built(kind: str, tree: Path, out: Path) -> Path:
    """Build an sdist or a wheel of a tree, as `python -m build` does."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    out.mkdir(exist_ok=True)
    before = {*out.iterdir()}
    environment = {**os.environ, "SPARSEBENCH_REPOSITORY": REPOSITORY}
    command = [sys.executable, "-P", "-c", code]
    subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True)
    (archive,) = {*out.iterdir()} - before
    return archive


def inside(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as file:
        return {name: file.read(name) for name in file.namelist()}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the files that git tracks here into a new repository with one commit.

    A few published runs are enough: to pack all takes 25 s, in each of three wheels.
    """
    home = tmp_path_factory.mktemp("tree")
    left_out = re.compile(rf"{PUBLISHED.relative_to(ROOT)}/[^/]+/(?!quick|earlier/[^/]+/quick).*/")
    for name in git("ls-files", at=ROOT).splitlines():
        if (ROOT / name).exists() and not left_out.match(name):
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_symlink():
                (home / name).symlink_to((ROOT / name).readlink())
            else:
                shutil.copy(ROOT / name, home / name)
    git("init", at=home)
    git("add", "--all", "--force", at=home)
    git("commit", "--message", "All", at=home)
    return home


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("sdist", tree, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", tree, tmp_path_factory.mktemp("wheel"))


@needs_git
@pytest.mark.exhaustive
def test_an_sdist_has_every_file_that_git_tracks_and_adds_none_but_its_own(sdist, tree) -> None:
    with tarfile.open(sdist) as file:
        names = [member.name.partition("/")[2] for member in file if member.isfile()]
    files = set(git("ls-files", at=tree).splitlines())
    files -= {name for name in files if (tree / name).is_symlink()}
    added = {name for name in names if ".egg-info/" not in name} - files
    assert added == {"PKG-INFO", "setup.cfg", "src/sparsebench/built.json"}
    assert files <= {*names}


@needs_git
@pytest.mark.exhaustive
def test_a_wheel_is_the_same_from_the_sdist_and_from_the_tree(sdist, wheel, tmp_path) -> None:
    with tarfile.open(sdist) as file:
        file.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    assert inside(built("wheel", unpacked, tmp_path / "out")) == inside(wheel)


@needs_git
@pytest.mark.exhaustive
def test_a_wheel_knows_its_commit_and_has_the_digest_of_its_checkout(wheel, tree, tmp_path) -> None:
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
    program = (
        "import json; from sparsebench.harness.machine import code\n"
        "print(json.dumps([code.__file__, code.commit(), code.code_sha256()]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    environment.pop("SPARSEBENCH_COMMIT", None)
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, env=environment, check=True, capture_output=True)
    place, commit, digest = json.loads(done.stdout)
    assert Path(place).is_relative_to(tmp_path)
    assert commit == {"commit": git("rev-parse", "HEAD", at=tree), "dirty": False}
    assert digest == code_sha256()


@needs_git
@pytest.mark.exhaustive
def test_a_wheel_has_all_that_kernels_compile_and_read(wheel: Path, tree: Path) -> None:
    files = (tree / "kernels").rglob("*")
    read = {file for file in files if file.is_file() and file.suffix not in (".md", ".pyc")}
    names = {f"sparsebench/{file.relative_to(tree)}" for file in read}
    assert names <= {*inside(wheel)}


@needs_git
@pytest.mark.exhaustive
def test_a_wheel_has_the_published_runs_in_one_small_file(wheel: Path, tree: Path) -> None:
    few = inside(wheel)[f"sparsebench/reports/{ARCHIVE}"], tree / "results" / "published"
    every = pack(PUBLISHED), PUBLISHED
    for packed, home in (few, every):
        with tarfile.open(fileobj=io.BytesIO(packed)) as file:
            runs = {name for name in file.getnames() if name.endswith("/run.json")}
        assert runs == {str(run.relative_to(home)) for run in home.glob("*/*/run.json")}
        assert runs
        assert len(packed) < 5e6


@pytest.mark.exhaustive
def test_a_wheel_has_addresses_and_no_link_that_is_relative(wheel: Path, tree: Path) -> None:
    (metadata,) = (text for name, text in inside(wheel).items() if name.endswith("/METADATA"))
    text, commit = metadata.decode(), git("rev-parse", "HEAD", at=tree)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert f"Project-URL: Source, {REPOSITORY}\n" in text
    assert f"Project-URL: Changelog, {REPOSITORY}/blob/{commit}/CHANGELOG.md\n" in text
    assert f"{REPOSITORY}/raw/{commit}/results/published/speedup.svg" in links
    assert f"{REPOSITORY}/blob/{commit}/harness/README.md" in links
    assert not [link for link in links if not link.startswith("https://")]


@needs_git
@pytest.mark.exhaustive
def test_the_image_for_a_gpu_host_copies_all_that_a_wheel_is_made_of(tree, wheel, tmp_path) -> None:
    copies = re.findall(r"^COPY (.+) (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    for sources, target in copies:
        for pattern in sources.split():
            for source in tree.glob(pattern):
                place = tmp_path / "source" / target
                if source.is_dir():
                    shutil.copytree(source, place)
                else:
                    place.mkdir(parents=True, exist_ok=True)
                    shutil.copy(source, place)
    contents = inside(built("wheel", tmp_path / "source", tmp_path / "out"))
    assert contents.keys() == inside(wheel).keys()


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=str)
def test_every_action_of_a_workflow_is_pinned(path: Path) -> None:
    jobs = yaml.safe_load(io.StringIO(path.read_text()))["jobs"].values()
    used = [step["uses"] for job in jobs for step in job["steps"] if "uses" in step]
    assert used
    assert not [name for name in used if not re.fullmatch(r"[\w/-]+@v\d+\.\d+\.\d+", name)]
