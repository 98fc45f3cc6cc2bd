"""The contracts of suites and claims: they can be read, and every part of them is measured."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from sparsebench.harness.claims.claim_catalog import load
from sparsebench.harness.claims.claim_plan import parts
from sparsebench.harness.plan.selection import uncontested
from sparsebench.harness.plan.suite import read
from sparsebench.harness.testing.contract import Check, checker, expect


def suite_checks(name: str, *, device: str | None = None, data: Path | None = None) -> list[Check]:
    """Return the contract of a suite, sentence by sentence, for its name or file.

    With a `device`, such as cpu, at least one contender that is no baseline must run there. `data`
    is the folder of its source files.
    """
    about: list[tuple[str, Callable[[], None]]] = [
        ("compares contenders at every problem", partial(_compares, name, data)),
        ("has a title of one line", partial(_titled, name, data)),
    ]
    if device:
        about.append((f"runs on {device}", partial(_runs, name, data, device)))
    return [Check(f"{name} {sentence}", holds) for sentence, holds in about]


def claim_checks(name: str, *, data: Path | None = None) -> list[Check]:
    """Return the contract of a claim, sentence by sentence, for its name or file."""
    about: list[tuple[str, Callable[[], object]]] = [
        ("follows the schema", partial(load, name)),
        ("has cells for each of its tests", partial(_planned, name, data)),
    ]
    return [Check(f"{name} {sentence}", holds) for sentence, holds in about]


check_suite = checker(suite_checks)
check_claim = checker(claim_checks)


def _compares(name: str, data: Path | None) -> None:
    for contest in read(name, data).contests:
        sides = {contender.baseline for contender in contest.contenders}
        fields = dict(contest.problem.fields)
        expect(sides == {True, False}, f"expected a baseline and another contender at {fields}")


def _titled(name: str, data: Path | None) -> None:
    title = read(name, data).title
    expect(title.strip() and "\n" not in title.strip(), f"expected one line, found {title!r}")


def _runs(name: str, data: Path | None, device: str) -> None:
    alone = uncontested(read(name, data), device)
    expect(not alone, f"expected a contender that runs on {device}, found only baselines")


def _planned(name: str, data: Path | None) -> None:
    for part in parts(load(name), data):
        known = part.contests or (part.written.claim.measure and part.written.claim.measure.data)
        expect(known, f"{part.test.name}: expected a problem that it tests, found none")
