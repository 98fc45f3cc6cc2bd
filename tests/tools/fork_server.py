"""Fork worker processes from one that has imported torch: importing takes seconds of CPU each.

    this process ── the command, environment and pipes of a worker ──> server, imports once
                                                                         └ fork, fork ─> worker
                 <── the worker's process id ───────────────────────────

A worker begins with a server of its own, for guests.

The worker is the child of this process, as if it had been started here: the process between it and
the server ends, and this process adopts it. It has the present environment. If a variable that
libraries read when they are imported has changed, the worker starts as usual, and so does one that
runs anything but our two modules. So does the worker of a command in a process of its
own (test_cli.py).

    pytest -p tests.tools.fork_server      a session of its own has a server too
"""

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from importlib import import_module
from typing import Any

import torch

from sparsebench.harness.machine import child_process
from sparsebench.harness.run import worker_process

MODULES = (
    worker_process.COMMAND[-1],
    "sparsebench.harness.bench.guest",
    "sparsebench.harness.plan.declare",
    "tests.simulated.worker",
)
PR_SET_CHILD_SUBREAPER = 36
MESSAGE_BYTES = 2**20
READ_BY_IMPORTS = "OMP_NUM_THREADS", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES"

_spawn = child_process.spawn


def pytest_configure(config: Any) -> None:
    """Fork worker processes, except on a GPU machine: CUDA does not survive a fork."""
    if not torch.cuda.is_available():
        server = Server()
        child_process.spawn = server.spawn
        config.add_cleanup(server.close)


class Server:
    """The server's end here. It starts with the first worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._environment = dict(os.environ)
        self._read_by_imports = read_by_imports()

    def spawn(self, *command: str) -> subprocess.Popen[str]:
        """Do what `child_process.spawn` does."""
        python, rest = command[:3], command[3:]
        if python != child_process.PYTHON or rest[0] not in MODULES:
            return _spawn(*command)
        with self._lock:
            if self._socket is None:
                self._socket = self._start()
            if read_by_imports() != self._read_by_imports:
                return _spawn(*command)
            return Forked(self._socket, [*rest])

    def close(self) -> None:
        if self._socket and self._process:
            self._socket.close()
            self._process.wait()

    def _start(self) -> socket.socket:
        here, there = socket.socketpair(type=socket.SOCK_SEQPACKET)  # a request is whole
        command = sys.executable, "-P", __file__, str(there.fileno())
        self._process = subprocess.Popen(command, pass_fds=[there.fileno()], env=self._environment)
        there.close()
        return here


def read_by_imports() -> list[str | None]:
    """Return the variables that libraries read when they are imported."""
    return [os.environ.get(name) for name in READ_BY_IMPORTS]


class Forked(subprocess.Popen[str]):
    """A forked child; the caller holds the lock of the server."""

    def __init__(self, server: socket.socket, command: list[str]) -> None:
        """Let the server fork, and adopt the child."""
        self.args, self.returncode = command, None
        ends = os.pipe(), os.pipe(), os.pipe()
        (read_in, write_in), (read_out, write_out), (read_err, write_err) = ends
        place = {"folder": os.getcwd(), "environment": dict(os.environ)}
        request = json.dumps({"command": command, **place}).encode()
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        socket.send_fds(server, [request], [read_in, write_out, write_err])
        self.pid = int(server.recv(MESSAGE_BYTES))
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0)
        for end in read_in, write_out, write_err:
            os.close(end)
        self.stdin = os.fdopen(write_in, "w", errors="replace")
        self.stdout = os.fdopen(read_out, errors="replace")
        self.stderr = os.fdopen(read_err, errors="replace")
        self._child_created = True  # what Popen's own methods need
        self._waitpid_lock = threading.Lock()
        self._communication_started, self._input = False, None


def serve(requests: socket.socket) -> None:
    """Fork a worker for each request, until the socket closes."""
    while True:
        message, pipes, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, 3)
        if not message:
            os._exit(0)
        between = os.fork()
        if not between:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:  # until the process of the tests has adopted this one
                time.sleep(0.001)
            requests.send(str(os.getpid()).encode())
            requests.close()
            work(json.loads(message), pipes)
        for pipe in pipes:
            os.close(pipe)
        os.waitpid(between, 0)


def server_of_guests(pipes: list[int]) -> Server:
    """Return a server that is forked from this worker, which has done nothing yet."""
    server, (here, there) = Server(), socket.socketpair(type=socket.SOCK_SEQPACKET)
    if not os.fork():
        for end in here.fileno(), *pipes:
            os.close(end)
        serve(there)
    there.close()
    server._socket = here
    return server


def work(request: dict[str, Any], pipes: list[int]) -> None:
    """Be the worker, and end."""
    os.setsid()
    module, *arguments = request["command"]
    if module == MODULES[0]:
        child_process.spawn = server_of_guests(pipes).spawn
    for place, pipe in enumerate(pipes):
        os.dup2(pipe, place)
        os.close(pipe)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ |= request["environment"]
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv[1:] = arguments
    code: Any = 0
    try:
        import_module(module).main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    for name in *MODULES, "triton", "scipy.sparse":
        import_module(name)
    serve(socket.socket(fileno=int(sys.argv[1])))
