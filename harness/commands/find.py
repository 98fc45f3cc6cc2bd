"""`sparsebench find`: a published cell by words."""

from typing import Annotated

import typer

from sparsebench.harness.commands._console import print_json, stdout, wide
from sparsebench.harness.commands._options import Json


def find(
    words: Annotated[
        list[str], typer.Argument(help="2:4 14336x4096 m=64 H100: formats, sizes, GPUs, kernels.")
    ],
    as_json: Json = False,
) -> None:
    """Find published cells: the fastest kernel of a format in a problem, on a GPU.

    If no cell fits all words, the nearest one is shown, and the command that measures yours.
    """
    from sparsebench.reports import cells

    result = cells.find(cells.packaged_cells(), " ".join(words))
    if as_json:
        print_json(result)
        return
    wide().print(cells.SearchAnswer(result))
    for command in [result.command] if result.differs else result.cells[0]["commands"]:
        stdout.say(f"  {command}" if command else "No command follows from that cell.")
