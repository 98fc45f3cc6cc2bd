"""`sparsebench advise`: is pruning worth it for a model on a GPU?"""

from pathlib import Path
from typing import Annotated

import typer

from sparsebench.harness.commands._console import print_json, stdout, wide
from sparsebench.harness.commands._options import Json, Markdown


def advise(
    model: Annotated[
        str, typer.Argument(help="A listed model, or a config.json or the folder that holds it.")
    ],
    gpu: Annotated[str, typer.Option(help="A GPU: a part of its name that no other GPU has.")],
    batch: Annotated[
        int,
        typer.Option(help="Tokens at once: up to 256 are sequences that decode, more are prompts."),
    ],
    run: Annotated[
        list[Path] | None, typer.Option(help="Also use this run of yours; may be repeated.")
    ] = None,
    markdown: Markdown = False,
    as_json: Json = False,
) -> None:
    """Say whether pruning is worth it for a model on a GPU, from published runs.

    Runs of the same model are used as they are; other sizes are estimated, with an interval.
    """
    from sparsebench.errors import ResultError
    from sparsebench.reports import advice as presented
    from sparsebench.results import store
    from sparsebench.results.advice import advise as answered
    from sparsebench.results.analysis import analyse
    from sparsebench.results.measured_layers import of_runs, packaged
    from sparsebench.results.model_shapes import read_shapes

    added = of_runs((analyse(store.read(path)), str(path)) for path in run or ())
    if run and not added.gpus:
        raise ResultError(f"--run: expected a run on a GPU, found {', '.join(map(str, run or ()))}")
    answer = answered(packaged() + added, read_shapes(model), gpu, batch)
    if as_json:
        print_json(answer)
    elif markdown:
        stdout.write(presented.markdown(answer))
    else:
        wide().print(presented.terminal(answer))
