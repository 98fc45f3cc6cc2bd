"""The command line: each file NAME.py without a leading underscore is the command NAME.

    _app.py       finds the commands, runs one, and turns errors into a line and an exit code
    _options.py   option types that several commands share
    _console.py   both consoles, progress, warnings, JSON, and interrupts that keep the results
    _sharing.py   the options that share a plan out over several GPUs

NAME.py defines a function NAME, or a `typer.Typer` NAME with subcommands. In command names `_`
becomes `-`, and a trailing `_`, which avoids a Python keyword, is dropped: `try_.py` is `try`.
"""
