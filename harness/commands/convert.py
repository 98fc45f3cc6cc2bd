"""`sparsebench convert`: give sparse checkpoints of other tools layers that run."""

from pathlib import Path
from typing import Annotated

import typer

from sparsebench.harness.commands._console import print_json, stdout
from sparsebench.harness.commands._options import Device, Json, out_file


def convert(
    checkpoint: Annotated[
        Path, typer.Argument(help="A local Hugging Face directory with 2:4 or bitmask weights.")
    ],
    out: Annotated[Path, out_file("Directory to write.")],
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float16 or bfloat16: apply the scales and round to this. Default: as stored."
        ),
    ] = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Convert a 2:4 or bitmask checkpoint into sparse layers."""
    from sparsebench.errors import SuiteError
    from sparsebench.harness.machine.device import pick
    from sparsebench.harness.models.pruning.compressed import HALF
    from sparsebench.harness.models.pruning.convert import convert, lines

    kinds = {str(kind).removeprefix("torch."): kind for kind in HALF}
    if dtype is not None and dtype not in kinds:
        raise SuiteError(f"--dtype: expected {' or '.join(kinds)}, found {dtype!r}")
    conversion = convert(checkpoint, out, kinds[dtype] if dtype else None, pick(device))
    if as_json:
        print_json(conversion)
    else:
        for line in lines(out, conversion):
            stdout.say(line)
