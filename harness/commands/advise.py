"""`sparsebench advise`: is pruning or quantizing worth it for a model on a GPU?

With --attention: from which context length on is attention to selected keys?
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from sparsebench._completion import complete
from sparsebench.harness.commands._console import print_json, stdout, warn_of_changes, wide
from sparsebench.harness.commands._options import Json, Markdown, every_run, require_one_output


def advise(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model's name, or its config.json.", autocompletion=complete("model")
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="A published GPU, such as H200.", autocompletion=complete("gpu")),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            help="Tokens per call: up to 256 are decoded, one for each sequence; more are a prompt."
        ),
    ] = None,
    attention: Annotated[
        bool,
        typer.Option(
            "--attention",
            help="From which context length on does it pay to select keys? MODEL and --gpu choose.",
        ),
    ] = False,
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
    if attention:
        _advise_attention(model, gpu, batch, run or (), markdown, as_json)
        return
    required = {"MODEL": model, "--gpu": gpu, "--batch": batch}
    if model is None or gpu is None or batch is None:
        absent = ", ".join(name for name, value in required.items() if value is None)
        raise typer.BadParameter(f"expected MODEL, --gpu and --batch, or --attention; no {absent}")
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


def _advise_attention(
    model: str | None,
    gpu: str | None,
    batch: int | None,
    runs: Sequence[Path],
    markdown: bool,
    as_json: bool,
) -> None:
    """Print the lengths from which on attention to selected keys is faster than dense."""
    from sparsebench.errors import ResultError
    from sparsebench.reports import crossings
    from sparsebench.results.advice.crossings import (
        AttentionEvidence,
        curves_of,
        packaged_attention,
    )
    from sparsebench.results.model_shapes import read_shapes
    from sparsebench.results.run import store
    from sparsebench.results.tables.analysis import analyse

    if batch is not None:
        raise ResultError(f"--batch: expected none with --attention, found {batch}")
    packaged = packaged_attention()
    added = curves_of((analyse(store.read(path)), str(path)) for path in runs)
    warn_of_changes(runs)
    if runs and not added:
        expected = "a run on a GPU with kernels that select, of attention-select for example"
        raise ResultError(f"--run: expected {expected}; found {', '.join(map(str, runs))}")
    evidence = AttentionEvidence([*packaged.curves, *added], packaged.quality)
    curves = crossings.select_curves(evidence, gpu, read_shapes(model) if model else None)
    if as_json:
        print_json(AttentionEvidence(curves, evidence.quality))
    elif markdown:
        stdout.write(crossings.markdown(curves, evidence))
    else:
        for part in crossings.terminal(curves, evidence):
            wide().print(part)
        for sentence, lines in crossings.missing(curves).items():
            for line in (sentence, *(f"  {line}" for line in lines.values())):
                stdout.say(line)
