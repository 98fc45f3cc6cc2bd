"""Identify the code that measures: its commit, its digest, and the packages that plug into it.

commit        SPARSEBENCH_COMMIT, else the commit of the checkout by git, else the one that the
              wheel's build wrote down (setup.py)
plugins       package ─> {distribution, version, sha256}, for each other package that a suite names
code_sha256   one digest of the code of this package, and of the plug-ins'
"""

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import Distribution, packages_distributions
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from itertools import chain
from operator import itemgetter
from pathlib import Path
from subprocess import DEVNULL, CalledProcessError
from typing import Any

FOLDERS = "harness", "formats", "kernels", "results"  # code that numbers can depend on
BUILT = "built.json"  # a file of a wheel and of an sdist (setup.py)

Plugins = Mapping[str, Mapping[str, str | None]]
"""The distribution of each package, its version, and the SHA-256 of the package's files."""


def code_sha256(plugins: Plugins | None = None) -> str:
    """Return one digest of the code that measures, equal for a checkout and a wheel of it."""
    digest = _own_digest().copy()
    for package, facts in sorted((plugins or {}).items()):
        digest.update(f"{package}\0{facts['sha256']}\0".encode())
    return digest.hexdigest()


@cache
def _own_digest() -> "hashlib._Hash":
    """Hash the files that numbers can depend on, under the names that a wheel has."""
    root = ((f"root/{f.name}", f) for f in files("sparsebench").iterdir() if f.name != BUILT)
    folders = (_files(folder, files(f"sparsebench.{folder}")) for folder in FOLDERS)
    every = sorted(chain(root, *folders), key=itemgetter(0))
    code = [(path, f) for path, f in every if path.endswith((".py", ".cu", ".cuh", ".json"))]
    evidence = re.compile(r"results/.*\.json")  # for readers of rows
    return _hash_files((path, file) for path, file in code if not evidence.fullmatch(path))


def _hash_files(named: Iterable[tuple[str, Traversable]]) -> "hashlib._Hash":
    digest = hashlib.sha256()
    for path, file in named:
        digest.update(path.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest


def plugins(modules: Iterable[str]) -> dict[str, dict[str, str | None]]:
    """Return the packages of these modules, except ours, with distribution and digest.

    The package is the outermost one that has code: for acme.fast.kernel it is acme, or acme.fast if
    acme is a namespace. An editable install is identified by its files like any other.
    """
    packages = {_package(module) for module in modules} - {"sparsebench"}
    facts: dict[str, dict[str, str | None]] = {}
    for package in sorted(packages):
        owner = _distribution(package)
        name, version = (owner.name, owner.version) if owner else (None, None)
        facts[package] = {"distribution": name, "version": version, "sha256": _digest(package)}
    return facts


def _distribution(package: str) -> Distribution | None:
    inside, names = package.replace(".", "/"), packages_distributions()
    owners = [Distribution.from_name(name) for name in {*names.get(package.partition(".")[0], [])}]
    if len(owners) > 1:  # a namespace that several share
        owners = [d for d in owners if any(str(file).startswith(inside) for file in d.files or [])]
    return owners[0] if len(owners) == 1 else None


def _package(module: str) -> str:
    """Return the outermost package of a module that is no namespace, or the module itself."""
    parts = module.split(".")
    for number in range(1, len(parts)):
        spec = find_spec(".".join(parts[:number]))
        if spec is not None and spec.origin is not None:
            return ".".join(parts[:number])
    return module


def _digest(package: str) -> str:
    spec = find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        return _hash_files([("", Path(str(spec and spec.origin)))]).hexdigest()
    folder = Path(next(iter(spec.submodule_search_locations)))  # not imported
    return _hash_files(_files(package, folder)).hexdigest()


def commit() -> dict[str, Any]:
    """Return the commit and whether the checkout is dirty; unknown values are None.

    SPARSEBENCH_COMMIT names the commit on a machine that has the code without its history.
    """
    if "SPARSEBENCH_COMMIT" in os.environ:
        return {"commit": os.environ["SPARSEBENCH_COMMIT"], "dirty": None}
    if checkout := of_checkout(_root()):
        return checkout
    built = files("sparsebench") / BUILT  # what the build of this wheel recorded
    build_record = json.loads(built.read_text("utf-8")) if built.is_file() else {}
    return {name: build_record.get(name) for name in ("commit", "dirty")}


def is_refused(environment: Mapping[str, Any]) -> bool:
    """Return whether an environment.json has no commit although the code is a checkout."""
    return not environment["commit"] and (_root() / ".git").exists()


def _root() -> Path:
    return Path(str(files("sparsebench.harness"))).resolve().parent


def of_checkout(root: Path) -> dict[str, Any] | None:
    """Return commit and dirty by git; None without a checkout or git.

    A checkout is dirty if a tracked file has changed, or if an untracked file lies beside the code
    that measures. Other untracked files, such as an earlier run, cannot change a number. git runs
    without its variables, such as GIT_DIR, which name another repository in a hook or a rebase.
    """
    if not (root / ".git").exists():
        return None
    outputs = []
    environment = {name: value for name, value in os.environ.items() if name[:4] != "GIT_"}
    beside = ["src", *FOLDERS, ":(exclude)results/published"]
    for command in (
        ["rev-parse", "HEAD"],
        ["status", "--porcelain", "--untracked-files=no"],
        ["ls-files", "--others", "--exclude-standard", "--", *beside],
    ):
        try:
            line = "git", "-C", str(root), *command
            output = subprocess.check_output(line, stderr=DEVNULL, env=environment)
        except (OSError, CalledProcessError):
            return None
        outputs.append(output.decode("utf-8", "replace").strip())
    return {"commit": outputs[0], "dirty": any(outputs[1:])}


def _files(path: str, folder: Traversable) -> Iterator[tuple[str, Traversable]]:
    """Yield every file of a folder with its path, in order, without compiled Python."""
    for item in sorted(folder.iterdir(), key=lambda item: item.name):
        if item.is_dir() and item.name != "__pycache__":
            yield from _files(f"{path}/{item.name}", item)
        elif item.is_file():
            yield f"{path}/{item.name}", item
