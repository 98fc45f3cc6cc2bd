"""`sparsebench validate`: check a sealed run."""

import typer

from sparsebench.harness.commands._console import UNCHECKED, stdout
from sparsebench.harness.commands._options import Data, Plugins, RunPath


def validate(path: RunPath, data: Data = None, plugins: Plugins = False) -> None:
    """Check a run's hashes and rows, and that its plan is complete.

    Also warn about contenders that are slower than their default or than in a neighbouring run.
    """
    from sparsebench.harness.run.validation import validate as check
    from sparsebench.results.tuning_doubts import siblings

    checked = True
    for line in check(path, data, siblings(path), plugins=plugins):
        stdout.say(line.text)
        checked = checked and line.checked
    if not checked:
        raise typer.Exit(UNCHECKED)
