"""A worker's link to its parent: its device, and its end if the parent ends.

    parent ends ─> stdin, a pipe from it, closes ─> a thread wakes ─> GRACE_S later kills everything

The main thread cannot wait for that itself, because it may be in a kernel that never returns. A
worker that reads the end of the same closed pipe has normally exited before GRACE_S is over.

A scheduler that ends a job sends its signal to every process of the job, and its grace is 30 s in
Slurm. A worker ignores that signal: if it ended, its parent, which may run on during the grace,
would take the end for a crash of the kernel and write that into a row.
"""

import os
import select
import signal
import threading
import time

GRACE_S = 5.0
LEFT_TO_PARENT = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2  # USR2: submitit


def end_with_parent() -> None:
    """Watch stdin, a pipe from the parent, from now on, and leave signals to the parent.

    What this process starts, such as a compiler, ignores the signals, too.
    """
    for number in LEFT_TO_PARENT:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    pipe = select.poll()
    pipe.register(0, 0)  # the closing of the other end is always reported
    pipe.poll()
    time.sleep(GRACE_S)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # also what a kernel has started
    os._exit(1)
