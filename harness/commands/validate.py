"""`sparsebench validate`: check sealed runs."""

import typer

from sparsebench.harness.commands._console import UNCHECKED, stdout
from sparsebench.harness.commands._options import Data, Plugins, RunPaths


def validate(paths: RunPaths, data: Data = None, plugins: Plugins = False) -> None:
    """Check that runs are complete, unchanged and consistent.

    The command also warns about a contender that is slower than with its default options.
    """
    from sparsebench.harness.run.validation import validate as check

    checked = True
    for path in paths:
        if len(paths) > 1:
            stdout.say(f"{path}")
        for line in check(path, data, plugins=plugins):
            stdout.say(line.text)
            checked = checked and line.checked
    if not checked:
        raise typer.Exit(UNCHECKED)
