"""`sparsebench list`: the names that suites use."""

from rich.markup import escape
from rich.table import Table

from sparsebench.harness.commands._console import print_json, stdout
from sparsebench.harness.commands._options import Json


def list_(as_json: Json = False) -> None:
    """List ops, patterns, formats, kernels, figures and suites."""
    from sparsebench.harness.catalog import listing

    names = listing()
    if as_json:
        print_json(names)
        return
    for title, entries in names.items():
        table = Table(
            title=title, title_justify="left", title_style="bold", show_header=False, box=None
        )
        for name, line in entries.items():
            table.add_row(name, escape(line))
        stdout.print(table)
