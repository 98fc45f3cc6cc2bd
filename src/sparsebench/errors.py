"""Everything that sparsebench raises about what it was given; each message is one line.

    SparsebenchError          what, where, expected, found
    ├── SuiteError            a suite, its data, a flag or a plug-in is not usable
    │   └── NoMeter           --energy, and the device does not count it (harness/bench/energy.py)
    ├── ResultError           a run on disk cannot be used
    ├── FormatError           a format cannot hold this matrix
    └── Unsupported           a kernel cannot run this case here

The command line prints the message and ends with code 2. In a contest, FormatError and Unsupported
end one case and become its row.

Three exceptions are of the machine, not of what was given, and stand outside the tree:

    Fatal         the device no longer answers; the worker ends    harness/bench/contest_state.py
    WorkerError   no worker process could be started; exit code 4
    NoNvml        NVML is not here; readings are left out          harness/machine/nvml.py
"""


class SparsebenchError(ValueError):
    """What sparsebench was given cannot be used; the message says what, where and why."""


class LeftOut(UserWarning):
    """A run that was found beside others cannot be read; the message names its file."""


class SuiteError(SparsebenchError):
    """A suite, its data, a flag or a plug-in is not usable."""


class ResultError(SparsebenchError):
    """A run on disk cannot be used; the message names the file."""


class FormatError(SparsebenchError):
    """A format cannot hold this matrix; the message says why."""


class WorkerError(RuntimeError):
    """No worker process could be started; the message holds its last words."""


class Unsupported(SparsebenchError):
    """This kernel cannot run this case here; the message says why."""
