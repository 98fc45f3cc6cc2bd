"""The harness: it plans a suite, runs it in fresh processes and writes what came back.

    commands/  api.py           the command line  |  runs from Python and notebooks
    ────────────────────────────────────────────────────────────────────────────────────────
    testing/                    the contracts as functions, and the pytest plug-in
    claims/                     what others published: bounded, measured, judged
    run/       doctor/          a whole run, its workers, tuning  |  is the machine fit?
    sim/                        a GPU that is not there: a worker, a clock
    plan/                       a suite file to the contests of a run
    bench/                      one contest in one process: operands, check, timing, ceilings
    catalog.py                  names to ops, formats, kernels and suites
    ops/       patterns/        what is computed  |  which weights are kept: one file each
    inputs/    machine/         bits, grids of blocks, files  |  the device, NVML, telemetry
    ────────────────────────────────────────────────────────────────────────────────────────
    models/                     apart from contests: models pruned, trained, and measured whole

A folder imports from those below it, never from those above (tests/test_architecture.py).
"""
