"""The simulated GPU's worker, which waits for the third contest while a file is there.

So a test sends its signals while a job is in the middle of its part, however fast the host is.
"""

import os
import time
from itertools import count
from typing import Any

from tests.simulated import simulated_contest, worker

FILE = "SPARSEBENCH_WAITS"
run, numbers = simulated_contest.run, count()


def run_or_wait(*arguments: Any) -> Any:
    number = next(numbers)
    while number >= 2 and os.path.exists(os.environ.get(FILE, "")):
        time.sleep(0.1)
    return run(*arguments)


if __name__ == "__main__":
    simulated_contest.run = run_or_wait  # type: ignore[assignment]
    worker.main()
