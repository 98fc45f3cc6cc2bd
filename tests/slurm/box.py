"""A Slurm cluster on this host: two node names, one controller, started and stopped by a test.

munged ─ slurmctld ─┬─ slurmd n1 (one CPU)      all as root, in one folder, on free ports
                    └─ slurmd n2 (one CPU)
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NEEDED = "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "munged"
NODES = "n1", "n2"
READY_S = 30.0
CONF = """
ClusterName=box
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
MinJobAge=5
SlurmdTimeout=20
BatchStartTimeout=5
MessageTimeout=30
SchedulerParameters=batch_sched_delay=0,sched_interval=1
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=1000
PartitionName=sim Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Say which programs of a cluster are missing; "" if none is."""
    if os.geteuid() != 0:
        return "needs root, to start Slurm"
    lacking = [name for name in NEEDED if not shutil.which(name)]
    hint = "apt-get install --no-install-recommends slurm-wlm munge"
    return f"needs {', '.join(lacking)}: {hint}" if lacking else ""


class Box:
    """The cluster. With `environment`, Slurm's commands use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start all daemons and wait until both nodes are idle."""
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir()
        host = socket.gethostname().partition(".")[0]
        ports = _free_ports(3)
        conf = CONF.format(folder=self.folder, host=host, ports=ports)
        (self.folder / "slurm.conf").write_text(conf)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self._run("munged", "--foreground", "--force", f"--key-file={key}", *(
            f"--{what}={self.folder}/munge.{what.partition('-')[0]}"
            for what in ("socket", "pid-file", "log-file", "seed-file")
        ))  # fmt: skip
        _until(lambda: (self.folder / "munge.socket").exists())
        self.start_controller()
        for node in NODES:
            self._run("slurmd", "-D", "-N", node)
        _until(lambda: self.nodes() == {"idle"})

    def start_controller(self) -> None:
        self._run("slurmctld", "-D")
        _until(lambda: self.ask("scontrol", "ping").returncode == 0)

    def kill_controller(self) -> None:
        child = self._children.pop("slurmctld -D")
        child.kill()
        child.wait()

    def nodes(self) -> set[str]:
        return set(self.ask("sinfo", "--noheader", "--Node", "--format=%t").stdout.split())

    def ask(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands."""
        environment = os.environ | self.environment
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=60
        )

    def stop(self) -> None:
        """End all jobs, then all daemons."""
        self.ask("scancel", "--user=root", "--signal=KILL", "--full")
        with suppress(TimeoutError):
            _until(lambda: not self.ask("squeue", "--noheader").stdout.strip(), 10)
        for child in reversed(self._children.values()):
            child.send_signal(signal.SIGTERM)
        for child in self._children.values():
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def _run(self, *command: str) -> None:
        environment = os.environ | self.environment
        with (self.folder / f"{command[0]}.out").open("ab") as log:
            child = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self._children[" ".join(command)] = child


@contextmanager
def box(folder: Path) -> Iterator[Box]:
    """Yield a running cluster, and stop it at the end."""
    sandbox = Box(folder)
    try:
        sandbox.start()
        yield sandbox
    finally:
        sandbox.stop()


def _free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def _until(true, seconds: float = READY_S) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise TimeoutError(f"not so within {seconds:g} s")
        time.sleep(0.1)
