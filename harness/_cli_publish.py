"""The command that publishes runs: publish."""

import re
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from sparsebench.errors import ResultError
from sparsebench.harness._cli import Data, out

Runs = Annotated[list[Path], typer.Argument(help="Run directories.")]
To = Annotated[Path, typer.Option("--to", help="Folder of the site; it is made, or added to.")]
BaseUrl = Annotated[
    str, typer.Option(help="Address of the site, for sitemap, feed and previews of links.")
]
Files = Annotated[
    list[Path] | None,
    typer.Option(help="What train-lm --pattern and whole wrote, for claims that are judged by it."),
]


def publish(
    runs: Runs, to: To, base_url: BaseUrl = "", files: Files = None, data: Data = None
) -> None:
    """Add runs to a static site: an index, a page a run, a format and a kernel, downloads, a feed.

    Claims are judged by the runs of the site, a page each. A run that does not validate is refused.
    Paths and names of users and hosts are left out.
    """
    from sparsebench.harness.catalog import listing
    from sparsebench.harness.claims.catalog import chosen
    from sparsebench.harness.claims.check import evidence
    from sparsebench.harness.run.validate import validate
    from sparsebench.reports.site.pages import Site
    from sparsebench.reports.site.publish import publish as published
    from sparsebench.results.formatting import amount

    def check(run: Path) -> None:
        for _ in validate(run, data):
            pass

    known = listing()
    asked = evidence(chosen([]), files or ()).asked()
    named = known["formats"], known["kernels"]
    site = Site(address(base_url), *named, version("sparsebench"), asked)
    done = published(runs, to, site, check)
    for note in done.notes:
        out.print(note, soft_wrap=True, highlight=False, markup=False)
    counts = f"{amount(len(done.slugs), 'run')}, {len(done.written)} of them written now"
    out.print(f"{counts}: {to / 'index.html'}", soft_wrap=True, highlight=False, markup=False)


def address(text: str) -> str:
    """Return the address of a site with a last slash; ResultError for what is none."""
    if text and not re.fullmatch(r"https?://[^\s/?#\"'<>]+[^\s?#\"'<>]*", text):
        expected = "expected an address as https://name.example/path/"
        raise ResultError(f"--base-url: {expected}; found {text!r}")
    return text.rstrip("/") + "/" if text else ""
