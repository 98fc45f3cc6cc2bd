"""`sparsebench contribute`: make a pull request of a result."""

from pathlib import Path
from typing import Annotated

from sparsebench.harness.commands._console import stdout
from sparsebench.harness.commands._options import Data, RunPaths, out_file


def contribute(
    runs: RunPaths,
    out: Annotated[Path | None, out_file("New folder. Default: contribution-GPU.")] = None,
    data: Data = None,
) -> None:
    """Check a result, show what it tells, and write a pull request.

    Nothing is sent. Names of users and hosts, paths and logs are left out, and the command lists
    every fact about the machine that remains. Results of any GPU are welcome, and so is another
    card of a kind that has results already.
    """
    from sparsebench.harness.run.validation import validate
    from sparsebench.reports.contribution import contribute as write
    from sparsebench.reports.published_runs import published_runs

    made = write(runs, out, published_runs(), lambda run: (r.text for r in validate(run, data)))
    for line in made.lines:
        stdout.say(line)
