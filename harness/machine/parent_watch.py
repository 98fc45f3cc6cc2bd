"""A worker ends with its parent, also where the parent was killed and could say nothing.

    parent ends ─> stdin, a pipe from it, closes ─> a thread wakes ─> GRACE_S later all is killed

The main thread may be in a kernel that never returns, so it cannot wait for that itself. A worker
that is asked to end, by the same closed pipe, is gone before.
"""

import os
import select
import signal
import threading
import time

GRACE_S = 5.0
WAIT = "--wait"  # of a worker: import everything, then wait for a line: the device, the data folder


def end_with_parent() -> None:
    """Watch stdin, a pipe from the parent, from now on."""
    threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    pipe = select.poll()
    pipe.register(0, 0)  # that the other end is closed is always reported
    pipe.poll()
    time.sleep(GRACE_S)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # and what a kernel has started
    os._exit(1)
