"""The command line as a script sees it, in this process: starting one takes seconds for torch."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from subprocess import CompletedProcess
from unittest.mock import patch

from sparsebench.harness.commands._app import main
from sparsebench.harness.commands._console import BAD_INPUT


def sparsebench(*arguments: object) -> CompletedProcess[str]:
    """Run a command; return its exit code and what it wrote, 200 columns wide (conftest.py)."""
    argv, out, err = ["sparsebench", *map(str, arguments)], io.StringIO(), io.StringIO()
    with patch.object(sys, "argv", argv), redirect_stdout(out), redirect_stderr(err):
        code = main()
    return CompletedProcess(argv, code, out.getvalue(), err.getvalue())


def output(*arguments: object) -> str:
    """Run a command that must succeed; return what it printed."""
    done = sparsebench(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusal(*arguments: object) -> str:
    """Run a command with bad input; return its error, which must be one line or a usage error."""
    done = sparsebench(*arguments)
    assert done.returncode == BAD_INPUT, done.stderr
    assert done.stderr.startswith("Usage: ") or done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())
