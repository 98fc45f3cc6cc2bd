"""Shared by all tests: paths for workers, marks, the record of compiles, the tests left out."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsebench.harness.machine import stand_in
from tests.compiling import record
from tests.simulated.in_process import in_this_process
from tests.tools import fork_server

HERE = Path(__file__).parent
collect_ignore = ["thirdparty"]  # a separate package with its own tests (test_plugins.py)
PATHS = [str(HERE / "contenders"), *filter(None, [os.environ.get("PYTHONPATH")]), str(HERE.parent)]
os.environ[stand_in.VARIABLE] = "sim=tests.simulated.worker"
os.environ["PYTHONPATH"] = os.pathsep.join(PATHS)  # for workers; pyproject.toml has it for pytest
os.environ |= {"COLUMNS": "200", "NO_COLOR": "1"}  # of tables, read when the command is imported
# Neither exists, so that no test reads the user's tables.
os.environ["SPARSEBENCH_TUNED"] = str(HERE / "tuned")
os.environ["SPARSEBENCH_CHOICES"] = str(HERE / "choices")
torch.set_num_threads(1)
# Rows are millions of objects, which a young collection after each 700 would visit: 1 s of 10.
gc.set_threshold(50_000)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    from tests.tools.quick_interpreter import quicken

    quicken()
COMPILE = "compile"  # a test's property: an entry of compiling/record.txt
# Modules with tests of a minute: they begin first, so that no process waits for another's last.
LONG = ["kernels/test_interpreted.py", "slurm/test_slurm.py", "test_packaging.py"]
LONG += ["reports/test_every_published_run.py", "test_outsider.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first = {HERE / name for name in LONG}
    items.sort(key=lambda item: item.path not in first)
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        marker = item.get_closest_marker("interpreted")
        if marker and not INTERPRETED and not marker.kwargs.get("also_compiled"):
            item.add_marker(pytest.mark.skip(reason="run by test_interpreted.py"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Freeze what was imported and collected, which each collection of garbage would visit."""
    gc.disable()  # 4.6 of 16.4 s
    result = yield
    gc.freeze()
    gc.enable()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Freeze what a file of tests has imported: transformers and torch.compile cost 0.2 s each."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write tests/compiling/record.txt anew")
    parser.addoption(
        "--browser-required", action="store_true", help="no test in Chromium is skipped"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(fork_server)
    config.pluginmanager.register(LeftOut(config))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config.option.record))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Keep the entries of the record of compiles that a test looked up."""
    record.lookups.clear()
    yield
    item.user_properties += [(COMPILE, entry) for entry in record.lookups]


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_disks() -> Iterator[None]:
    """Leave the thousands of files of tests in memory; each fsync takes milliseconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module")
def in_one_process() -> Iterator[None]:
    """Let the simulated GPU's workers run in this process."""
    with pytest.MonkeyPatch.context() as patch:
        in_this_process(patch)
        yield


@pytest.fixture(scope="module")
def no_figures() -> Iterator[None]:
    """Write reports without figures, which take seconds, for tests of something else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparsebench.reports.build.figures", list)
        yield


class LeftOut:
    """Count the exhaustive tests that `make test` does not run, and say so at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.tests = config, 0

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.tests += sum(item.get_closest_marker("exhaustive") is not None for item in items)

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workeroutput"):  # a process of xdist: it collects all tests
            self.config.workeroutput["left_out"] = self.tests

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.tests = max(self.tests, getattr(node, "workeroutput", {}).get("left_out", 0))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.tests:
            terminalreporter.write_line(f"{self.tests} exhaustive tests left out: make test-all")


class Recorder:
    """Say how many compiles the record lacks, since they take minutes.

    With --record, write it instead: what tests that passed compiled or found in it. If a test
    failed or was skipped, what is in the record stays there.
    """

    def __init__(self, writes: bool) -> None:
        self.writes = writes
        self.entries: set[str] = set()
        self.without = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        entries = {value for name, value in report.user_properties if name == COMPILE}
        self.entries |= entries if report.passed or not self.writes else set()
        self.without += not report.passed

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.writes and self.without:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.writes:
            if count := len(self.entries - record.recorded()):
                new = f"{count} compiles are not in the record"
                terminalreporter.write_line(f"{new}, so tests ran the compilers: make compiled")
            return
        if self.without:
            reason = f"{self.without} tests failed or were skipped"
            terminalreporter.write_line(f"nothing leaves the record: {reason}")
            self.entries |= record.recorded()
        terminalreporter.write_line(record.write(self.entries))
