"""The harness: plans a suite, runs it in fresh processes and writes the run.

    commands/  api.py           the command line  |  runs from Python and notebooks
    ────────────────────────────────────────────────────────────────────────────────────────
    testing/                    the contracts as functions, and the pytest plug-in
    claims/                     measures what claims need
    run/       doctor/          a whole run, its workers, tuning  |  whether the machine is fit
    plan/                       reads a suite file into the contests of a run
    bench/                      one contest in one process: operands, checks, timing, ceilings
    catalog.py                  loads ops, formats, kernels and suites by name
    ops/       patterns/        what is computed  |  which elements are kept: one file each
    inputs/    machine/         bits, grids of blocks, files  |  the device, NVML, telemetry
    ────────────────────────────────────────────────────────────────────────────────────────
    models/                     apart from contests: whole models, pruned and converted

A folder imports from those below it, never from those above (tests/test_architecture.py).
"""
