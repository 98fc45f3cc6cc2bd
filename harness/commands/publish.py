"""`sparsebench publish`: a static site of runs and claims."""

import re
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from sparsebench.errors import ResultError
from sparsebench.harness.commands._console import BAD_INPUT, progress_bar, stderr, stdout
from sparsebench.harness.commands._options import Data, RunPaths


def publish(
    runs: RunPaths,
    out: Annotated[
        Path, typer.Option("--out", help="Folder of the site: a new one, or a site to add to.")
    ],
    base_url: Annotated[
        str, typer.Option(help="Address of the site, for its sitemap, feed and link previews.")
    ] = "",
    source: Annotated[
        str,
        typer.Option(
            envvar="SPARSEBENCH_REPOSITORY", help="Address of the source code, for a link."
        ),
    ] = "",
    files: Annotated[
        list[Path] | None,
        typer.Option(help="JSON of a script in experiments, as evidence for claims."),
    ] = None,
    data: Data = None,
) -> None:
    """Add runs to a static site.

    The site has a page for each run, format, kernel and claim. Each run is validated first. User
    names, host names and paths are left out. A run that is refused does not keep the others out;
    the exit code is then 2.
    """
    addresses = address(base_url, "--base-url"), address(source, "--source").rstrip("/")
    from sparsebench.harness.catalog import listing
    from sparsebench.harness.claims.checking import evidence
    from sparsebench.harness.claims.claim_plan import read_claims
    from sparsebench.reports.site.pages import Site
    from sparsebench.reports.site.publish import publish as add
    from sparsebench.results.formatting import amount

    names = listing()
    claims = evidence(read_claims([]), files or ()).planned()
    site = Site(*addresses, names["formats"], names["kernels"], version("sparsebench"), claims)
    with progress_bar() as show:
        added = add(runs, out, site, partial(check, data), show)
    for note in added.notes:
        stdout.say(note)
    counts = f"{amount(len(added.slugs), 'run')}, {len(added.written)} of them new"
    stdout.say(f"{counts}: {out / 'index.html'}")
    for reason in added.refused:
        stderr.flag("error", "red", f"not published: {reason}")
    if added.refused:
        raise typer.Exit(BAD_INPUT)


def check(data: Path | None, run: Path) -> None:
    """Validate a run. Raises ResultError at the first failure."""
    from sparsebench.harness.run.validation import validate

    for _ in validate(run, data):
        pass


def address(text: str, option: str = "--base-url") -> str:
    """Return a site's address with one slash at its end. Raises ResultError if it is not one."""
    if text and not re.fullmatch(r"https?://[^\s/?#\"'<>]+[^\s?#\"'<>]*", text):
        expected = "expected an address such as https://name.example/path/"
        raise ResultError(f"{option}: {expected}; found {text!r}")
    return text.rstrip("/") + "/" if text else ""
