"""Runs in trouble: two at once, orphaned processes, workers that do not start, full disks."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from functools import partial
from operator import getitem
from pathlib import Path

import pytest
import typer

from sparsebench.errors import ResultError
from sparsebench.harness.bench.contest_state import ContestOptions
from sparsebench.harness.commands import _console
from sparsebench.harness.machine import child_process, parent_watch
from sparsebench.harness.plan.suite import Contest, Suite, expand
from sparsebench.harness.run import worker_process
from sparsebench.harness.run.measure import Stopped, measure
from sparsebench.harness.run.run_json import Flags
from sparsebench.harness.run.runner import Runner
from sparsebench.harness.run.worker_process import ContestResult, Log, WorkerLoss, start_worker
from sparsebench.results.record import Contender, Problem, Status
from sparsebench.results.run import store
from tests.tools.command_line import refusal, sparsebench
from tests.tools.paths import ROOT
from tests.tools.suites import BSR, linear

FIELDS = {"m": 16, "n": 32, "k": 64, "dtype": "fp32", "pattern": "blocks", "block": 8}
PROBLEM = Problem("linear", {**FIELDS, "sparsity": 0.5})
CONTEST = Contest(PROBLEM, (Contender("dense", "torch_dense", baseline=True),))
OPTIONS = {"measures": [("kernel", "hot")]}
SUITE = linear("m: 64, n: 512, k: 512", BSR)
HELLO = (
    "import json, os, subprocess, sys, time\nprint('{}', flush=True)\nsys.stdin.readline()\n"
    'print(\'{"identity": "x"}\', flush=True)\n'
)
ASKED = HELLO + "asked = json.loads(sys.stdin.readline())\n"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "START_PAUSE_S", 0.0)
    monkeypatch.setattr(child_process, "DRAIN_S", 0.2)


def answered(monkeypatch: pytest.MonkeyPatch, script: str, timeout_s: float = 60.0) -> object:
    """Return a worker's answer to one contest; the worker is this script."""
    monkeypatch.setattr(worker_process, "COMMAND", (sys.executable, "-c", script))
    worker = start_worker("cpu", None, Log())
    try:
        return worker.measure(CONTEST, OPTIONS, timeout_s)
    finally:
        worker.kill()


def has_ended(pid: int) -> bool:
    """Return whether a process ends within 20 s; a zombie counts as ended."""
    end = time.monotonic() + 20.0
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("then", ["sys.exit(3)", "time.sleep(600)"])
def test_the_children_of_a_kernel_end_with_it(monkeypatch, tmp_path, then) -> None:
    """They keep the pipes of their parent open, which must not delay the runner."""
    note = tmp_path / "pid"
    child = "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    write_pid = f"open({str(note)!r}, 'w').write(str(child.pid))\n"
    start = time.monotonic()
    lost = answered(monkeypatch, f"{ASKED}{child}{write_pid}{then}\n", timeout_s=5.0)
    assert time.monotonic() - start < 60
    assert isinstance(lost, WorkerLoss)
    assert lost.status is (Status.TIMEOUT if "sleep" in then else Status.FAILED)
    assert has_ended(int(note.read_text()))


def test_a_worker_ends_with_its_parent() -> None:
    worker = (
        "import sys, time\nfrom sparsebench.harness.machine import parent_watch\n"
        "parent_watch.GRACE_S = 0.1\nparent_watch.end_with_parent()\nprint('on', flush=True)\n"
        "while True: time.sleep(0.01)\n"
    )
    start = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-P', '-c', {worker!r}],"
        " start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "assert child.stdout.readline() == b'on\\n'\nprint(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE) as middle:
        assert middle.stdout
        orphan = int(middle.stdout.readline())
        middle.kill()
    assert has_ended(orphan)
    assert 1 <= parent_watch.GRACE_S <= 30


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_scheduler_that_ends_a_job_does_not_make_a_kernel_fail(device: str) -> None:
    # Slurm sends its signals to every process of a job; submitit uses USR2 near the time limit.
    options = asdict(ContestOptions(measures=(("kernel", "hot"),)))
    worker = start_worker(device, None, Log())
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
            os.kill(worker.pid, number)
        assert isinstance(worker.measure(CONTEST, options, 60), ContestResult)
    finally:
        worker.kill()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("{'rows': []}", "KeyError('contest')"),
        ("{'contest': 'x', 'rows': [], 'spent_s': {}}", "found 'x'"),
        ("{'contest': name, 'rows': [], 'spent_s': {}}", "expected 1 rows, each once, found 0"),
        ("{'contest': name, 'rows': [{}], 'spent_s': {}}", "KeyError('case')"),
        ("['rows']", "expected an answer in JSON"),
        ("{'at': []}", "IndexError"),
    ],
)
def test_an_answer_names_its_contest_and_is_complete(monkeypatch, answer, message) -> None:
    script = f"{ASKED}name = {PROBLEM.id!r}\nprint(json.dumps({answer}), flush=True)\n"
    lost = answered(monkeypatch, f"{script}time.sleep(600)\n")
    assert isinstance(lost, WorkerLoss)
    assert lost.status is Status.FAILED
    assert message in lost.detail


def test_every_case_has_a_row_if_no_worker_starts_again(monkeypatch, tmp_path) -> None:
    """The first worker starts and dies in the contest; each later one says why it cannot start."""
    mark = tmp_path / "second"
    script = (
        f"import os, sys\nif os.path.exists({str(mark)!r}): sys.exit('no GPU left')\n"
        f"open({str(mark)!r}, 'w')\n{ASKED}sys.exit(1)\n"
    )
    monkeypatch.setattr(worker_process, "COMMAND", (sys.executable, "-c", script))
    runner = Runner("cpu", None, timeout_s=60)
    try:
        (measured,) = runner.run([CONTEST])
    finally:
        runner.kill()
    (row,) = measured.rows
    assert row.status is Status.FAILED
    assert "no GPU left" in row.detail


def test_the_first_signal_ends_a_run_and_the_second_is_ignored() -> None:
    """A closed terminal sends SIGHUP, and a scheduler repeats its signal."""
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    before = {stop: signal.getsignal(stop) for stop in _console.STOPS}
    written = []

    def interrupted() -> None:
        with _console.measuring():
            try:
                os.kill(os.getpid(), signal.SIGHUP)
                time.sleep(10)
            finally:
                for again in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    os.kill(os.getpid(), again)
                time.sleep(0.05)
                written.append(True)

    with pytest.raises(typer.Exit) as stopped:
        interrupted()
    assert written
    assert stopped.value.exit_code == _console.INTERRUPTED
    assert {stop: signal.getsignal(stop) for stop in _console.STOPS} == before
    signal.signal(signal.SIGHUP, hang_up)


@pytest.mark.parametrize(
    ("out", "hint"),
    [
        (None, "`sparsebench run --resume c/quick` resumes"),
        (Path("c"), "the same command with --out c resumes"),
    ],
)
def test_an_interrupt_names_what_resumes(out: Path | None, hint: str, capfd) -> None:
    def interrupted() -> None:
        with _console.measuring(out=out):
            raise Stopped(Path("c/quick"))

    with pytest.raises(typer.Exit):
        interrupted()
    assert capfd.readouterr().err == f"interrupted; the results so far are kept; {hint}\n"


def test_signals_that_nohup_ignores_stay_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _console.measuring():
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.05)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="module")
def suite() -> Suite:
    return expand("small.yaml", SUITE)


@pytest.fixture(scope="module")
def run(suite: Suite, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run on a simulated GPU whose data have an absolute path."""
    folder = tmp_path_factory.mktemp("safety")
    return measure(suite, Flags("sim", data=folder, replicates=1), folder / "run", None)


def test_two_processes_do_not_write_to_one_run(suite: Suite, run: Path) -> None:
    before = (run / "rows.jsonl").read_bytes()
    with (
        store.lock_run(run),
        pytest.raises(ResultError, match="expected no other process, found one"),
    ):
        measure(suite, Flags("sim", replicates=1), None, run)
    assert (run / "rows.jsonl").read_bytes() == before
    with store.lock_run(run):
        pass


def test_two_runs_that_start_in_one_second_have_two_names(suite, tmp_path, monkeypatch) -> None:
    from sparsebench.harness.run import measure as measuring

    monkeypatch.chdir(tmp_path)
    record = measuring.Record(suite.name, Flags("sim"), 1, {}, measuring.now())
    paths = {measuring.create_directory(None, suite, {}, record, "sim") for _ in range(3)}
    assert len(paths) == 3
    assert all((path / "run.json").exists() for path in paths)


def test_no_file_of_a_run_names_a_path_or_the_host(run: Path) -> None:
    hidden = [str(run.parent), str(Path.home()), str(ROOT), socket.gethostname()]
    for file in run.iterdir():
        text = file.read_text()
        assert not [name for name in hidden if name in text and len(name) > 5], file
        if file.name != "lock.txt":
            assert not re.search(r'"(/|~/)[\w.-]+/', text), file
    assert store.read(run).state["flags"]["data"] is None


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("ImportError: /home/joe/lib/x.so: no", "ImportError: x.so: no"),
        ("in '/usr/lib/joe' or ~/a/b.py:12", "in 'PATH' or b.py:12"),
        ("PATH=/home/joe:/srv/joe", "PATH=PATH:PATH"),
        ("12 GB/s, dense/cublas, 1 / 2, https://a.org/b", None),
        (f"on {socket.gethostname()}x", None),
    ],
)
def test_messages_of_kernels_lose_their_paths(message: str, shown: str | None) -> None:
    assert store.without_paths(message) == (message if shown is None else shown)


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_run_directory_appears_whole_or_not_at_all(tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(store, "set_state", full)
        with pytest.raises(ResultError, match="No space left on device"):
            store.create(tmp_path / "run", SUITE, {}, {})
    assert not [*tmp_path.iterdir()]
    (tmp_path / "run").mkdir()  # an empty directory, as an older version could leave
    store.create(tmp_path / "run", SUITE, {}, {})
    assert {file.name for file in (tmp_path / "run").iterdir()} >= {"run.json", "rows.jsonl"}


@pytest.mark.parametrize("what", ["fifo", "device"])
def test_only_regular_files_are_read(tmp_path: Path, what: str) -> None:
    path = Path("/dev/zero")
    if what == "fifo":
        os.mkfifo(path := tmp_path / "pipe.yaml")
    else:
        (tmp_path / "pipe.yaml").symlink_to(path)
    assert "found no regular file" in refusal("check", tmp_path / "pipe.yaml", "--device", "cpu")


def test_exit_codes_are_documented_in_one_place() -> None:
    table = re.findall(r"^\| (\d+) \|", (ROOT / "harness" / "README.md").read_text(), re.MULTILINE)
    names = "GATE_FAILED", "BAD_INPUT", "SOME_FAILED", "UNFIT", "UNCHECKED", "DEFECT", "INTERRUPTED"
    assert [int(code) for code in table] == [0, *(getattr(_console, name) for name in names)]


def test_an_internal_error_is_one_line_with_exit_code_70(monkeypatch: pytest.MonkeyPatch) -> None:
    fails = partial(getitem, {}, "nothing")  # without a frame in tests, which are a plug-in here
    monkeypatch.setattr("sparsebench.harness.catalog.listing", fails)
    done = sparsebench("list")
    assert done.returncode == _console.DEFECT
    assert "sparsebench: KeyError: 'nothing'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_run_is_not_reproduced_on_another_kind_of_device(run: Path, tmp_path: Path) -> None:
    line = refusal("reproduce", run, "--device", "cpu", "--out", tmp_path / "again")
    assert "--device: expected sim" in line
    assert not (tmp_path / "again").exists()
