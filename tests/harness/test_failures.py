"""Failures explain themselves: tracebacks in the run, the first reason on the console."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Timer

import pytest

from sparsebench.harness.bench.contest_state import LONGEST, traceback_of
from sparsebench.harness.machine import child_process
from sparsebench.harness.plan.suite import Contest
from sparsebench.harness.run import worker_process
from sparsebench.harness.run.runner import Runner
from sparsebench.results.record import Contender, Problem
from tests.tools.command_line import sparsebench
from tests.tools.suites import ON_CPU, linear

FIELDS = {"m": 4, "n": 32, "k": 64, "dtype": "fp32", "pattern": "dense", "sparsity": 0.0}
PROBLEM = Problem("linear", {**FIELDS, "block": 1})
SUITE = linear(
    "m: [4, 8], n: 32, k: 64, dtype: fp32, block: 8",
    "{format: dense, kernel: KERNEL}",
    baselines=(ON_CPU,),
)


def raised(text: str = "too many tiles") -> RuntimeError:
    try:
        try:
            {}["missing"]
        except KeyError as error:
            raise RuntimeError(text) from error
    except RuntimeError as error:
        return error


def test_a_traceback_names_modules_and_no_path() -> None:
    text = traceback_of(raised())
    assert text.rstrip().endswith("RuntimeError: too many tiles")
    assert "KeyError: 'missing'" in text
    assert "test_failures.py" in text
    assert str(Path(__file__).parent) not in text


def test_a_long_traceback_is_cut_at_its_beginning() -> None:
    text = traceback_of(raised("x" * 2 * LONGEST))
    assert len(text) < LONGEST + 10
    assert text.startswith("...\n")


def failures(*kernels: str, timeout_s: float, file: Path | None = None) -> str:
    """Return the failures that a runner logs for a contest of the baseline and faulty kernels."""
    runner = Runner("cpu", None, timeout_s)
    runner.log.file = file
    baseline = Contender("dense", "torch_dense", baseline=True)
    try:
        contest = Contest(PROBLEM, (baseline, *(Contender("dense", k) for k in kernels)))
        [*runner.run([contest])]
    finally:
        runner.kill()
    return "".join(runner.log.failures)


def test_stacks_of_crashes_and_exceptions_are_kept(tmp_path: Path) -> None:
    """The attempt after a crash reports an exception again, but not its traceback."""
    left = failures("faulty:raises", "faulty:crashes", timeout_s=100, file=tmp_path / "worker.log")
    text = (tmp_path / "failures.log").read_text()
    assert not left
    assert "dense/faulty:crashes at linear m=4 n=32 k=64" in text
    assert (
        "(process 0, attempt 0): the contender's process ended with signal 11: about to read"
        in text
    )
    assert "Segmentation fault" in text
    assert re.search(r'File "faulty.py", line \d+ in run', text)
    assert ": prepare: RuntimeError: no such instruction <b>here</b>\n" in text
    assert len(re.findall(r'faulty.py", line \d+, in raises', text)) == 1
    assert str(Path(__file__).parent) not in text


def test_the_stack_of_a_hang_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept any stack: on a busy machine a worker that starts slowly times out too."""
    monkeypatch.setattr(child_process, "DUMP_S", 600.0)
    text = failures("faulty:hangs", timeout_s=2)
    assert "no answer within " in text
    assert "most recent call first" in text


def test_a_worker_that_is_ended_from_outside_has_not_failed() -> None:
    """A run on several GPUs stops its parts from another thread in the same way."""
    runner = Runner("cpu", None, 600)
    contest = Contest(PROBLEM, (Contender("dense", "faulty:hangs", baseline=True),))

    def stop() -> None:
        runner.stopping.set()
        runner.kill()

    later = Timer(1.0, stop)
    later.start()
    with pytest.raises(KeyboardInterrupt):
        [*runner.run([contest])]
    later.join()
    assert runner.log.failures == []


def test_a_run_reports_the_first_reason_and_keeps_all(tmp_path: Path) -> None:
    suite, run, gpu = (tmp_path / name for name in ("small.yaml", "run", "gpu.yaml"))
    suite.write_text(SUITE.replace("KERNEL", "reference"))
    gpu.write_text("faults: [{when: kernel=reference, fault: crash}]\n")
    flags = ["--replicates", 1, "--device", f"sim:{gpu}"]
    done = sparsebench("run", suite, "--out", run, *flags)
    assert done.returncode == 3, done.stderr
    assert (run / "failures.log").read_text().count("dense/reference") > 1
    assert done.stderr.count("a case failed: dense/reference") == 1
    assert "Its traceback is in failures.log." in done.stderr
    assert "failures.log" not in (run / "manifest.json").read_text()


def test_try_shows_the_traceback_with_debug() -> None:
    words = ["faulty:raises", "format=dense", "m=8", "n=64", "k=64", "--device", "cpu"]
    assert "Traceback" not in sparsebench("try", *words).stderr
    done = sparsebench("try", *words, "--debug")
    assert (done.returncode, "Traceback" in done.stderr) == (3, True)
    assert re.search(r'faulty.py", line \d+, in raises', done.stderr)


def test_cases_of_a_suite_are_called_in_their_ranges(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    suite = tmp_path / "small.yaml"
    suite.write_text(SUITE.replace("KERNEL", "faulty:raises"))
    done = sparsebench("run", suite, "--device", "cpu", "--repeat", 2, "--only", "m=4")
    assert done.returncode == 3
    baseline, faulty = done.stdout.splitlines()
    assert baseline.startswith("dense/torch_dense linear dtype=fp32")
    assert "case " in baseline
    assert "failed: prepare: RuntimeError: no such instruction" in faulty
    assert not (tmp_path / "runs").exists()


def test_no_line_is_lost_if_several_workers_write_at_once(tmp_path: Path) -> None:
    """Each has a thread that reads what it says."""
    log, before = worker_process.Log(tmp_path / "worker.log"), sys.getswitchinterval()

    def read(worker: int) -> None:
        for line in range(100):
            log.add(f"{worker} {line}\n")
            log.explain(f"{worker} {line}", f"unlike others: {worker} {line}")

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(read, range(8)))
    finally:
        sys.setswitchinterval(before)
    lines = (tmp_path / "worker.log").read_text().splitlines()
    assert sorted(lines) == sorted(f"{worker} {line}" for worker in range(8) for line in range(100))
    reasons = (tmp_path / worker_process.FAILURES).read_text().splitlines()[::3]
    assert sorted(reasons) == sorted(lines)
