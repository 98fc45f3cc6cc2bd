"""A worker's link to its parent: its arguments, and its end if the parent ends.

    parent ends ─> stdin, a pipe from it, closes ─> a thread wakes ─> GRACE_S later kills everything

The main thread cannot wait for that itself, because it may be in a kernel that never returns. A
worker that reads the end of the same closed pipe has normally exited before GRACE_S is over.
"""

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable

GRACE_S = 5.0
WAIT = "--wait"  # import everything, then wait for a line with the device and the data folder


def worker_arguments(import_all: Callable[[], None]) -> list[str]:
    """Return DEVICE [DATA]: from the command line, or after WAIT and imports from stdin.

    The list is empty if the parent has ended.
    """
    arguments = sys.argv[1:]
    if arguments != [WAIT]:
        return arguments
    import_all()
    received: list[str] = json.loads(sys.stdin.readline() or "[]")
    return received


def end_with_parent() -> None:
    """Watch stdin, a pipe from the parent, from now on."""
    threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    pipe = select.poll()
    pipe.register(0, 0)  # the closing of the other end is always reported
    pipe.poll()
    time.sleep(GRACE_S)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # also what a kernel has started
    os._exit(1)
