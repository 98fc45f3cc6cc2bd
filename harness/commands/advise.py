"""`sparsebench advise`: is pruning or quantizing worth it for a model on a GPU?"""

from pathlib import Path
from typing import Annotated

import typer

from sparsebench._completion import complete
from sparsebench.harness.commands._console import print_json, stdout, warn_of_changes, wide
from sparsebench.harness.commands._options import Json, Markdown, every_run, require_one_output


def advise(
    model: Annotated[
        str,
        typer.Argument(
            help="A model's name, or its config.json.", autocompletion=complete("model")
        ),
    ],
    gpu: Annotated[
        str,
        typer.Option(help="A published GPU, such as H200.", autocompletion=complete("gpu")),
    ],
    batch: Annotated[
        int,
        typer.Option(
            help="Tokens per call: up to 256 are decoded, one for each sequence; more are a prompt."
        ),
    ],
    run: Annotated[
        list[Path] | None,
        typer.Option(
            help="Also use your own run, or folder of `new-gpu`; repeatable.", callback=every_run
        ),
    ] = None,
    markdown: Markdown = False,
    as_json: Json = False,
) -> None:
    """Should I prune, or quantize? Say whether it pays off for a model on a GPU.

    The answer is the fastest kind of fewer weights or bits whose measured loss is acceptable. Its
    speedup is a curve through published runs of the model; without any, it is estimated.
    """
    require_one_output(as_json, markdown)
    from sparsebench.errors import ResultError
    from sparsebench.reports import advice as presented
    from sparsebench.results.advice.measured_layers import of_runs, packaged_evidence
    from sparsebench.results.advice.pruning import advise as answered
    from sparsebench.results.model_shapes import read_shapes
    from sparsebench.results.run import store
    from sparsebench.results.tables.analysis import analyse

    added = of_runs((analyse(store.read(path)), str(path)) for path in run or ())
    warn_of_changes(run or ())
    if run and not added.gpus:
        raise ResultError(f"--run: expected a run on a GPU, found {', '.join(map(str, run or ()))}")
    evidence = packaged_evidence() + added
    answer = answered(evidence, read_shapes(model), gpu, batch)
    if as_json:
        print_json(answer)
    elif markdown:
        stdout.write(presented.markdown(answer, evidence))
    else:
        wide().print(presented.terminal(answer))
        for line in presented.next_steps(answer):
            stdout.say(line)
