"""A worker's link to its parent: its device, and its end if the parent ends.

    parent ends ─> stdin, a pipe from it, closes ─> a thread wakes ─> GRACE_S later kills everything

The main thread cannot wait for that itself, because it may be in a kernel that never returns. A
worker that reads the end of the same closed pipe has normally exited before GRACE_S is over.
"""

import os
import select
import signal
import threading
import time

GRACE_S = 5.0


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
