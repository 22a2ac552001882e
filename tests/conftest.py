"""What all tests share: options, the profile of every property, servers, and what a run says at its end."""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pluggy
import pytest
from hypothesis import HealthCheck, Phase, settings

from baton.move.clock import utc_date
from baton.move.store.node import StoreNode
from tests.seeds import Seeds
from tests.serving import RunningServer, serving
from tests.stores import BLOCK_BYTES

SLOWEST = 10
CPU_S = "cpu_s"
LONG = (
    "process/test_hosts.py",
    "process/test_parallel_worker.py",
    "numerics/test_through_http.py",
    "process/test_survival.py",
    "numerics/test_smollm2.py",
    "process/test_topologies.py",
    "process/test_namespaces.py",
    "unit/compute/test_triton_decode.py",
    "unit/compute/test_step_runner.py",
    "process/",
    "numerics/",
    "simulation/",
    "http/",
    "browser/",
    "conformance/",
    "clusters/",
    "engines/",
    "bench/",
    "property/",
)
"""Files and folders that take long, in this order: started first, they do not leave one core idle at the end."""

REAL = (
    "process/",
    "http/",
    "browser/",
    "clients/",
    "engines/",
    "clusters/",
    "conformance/",
    "attack/",
    "bench/",
    "numerics/test_through_http.py",
)
"""Folders whose tests drive processes that run in real time, beside all other tests on a machine that may be slow.

A test of these that fails gets one more try. The run names it with what failed, so that it can be mended.
"""

# The same examples on every run, so that a red build is red again; and no deadline, for no test asserts a time.
for name, examples in (("house", 20), ("deep", 600)):
    settings.register_profile(
        name,
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=examples,
        stateful_step_count=40,
        print_blob=False,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("baton")
    group.addoption("--deep", action="store_true", help="run deep tests too, and campaigns with many seeds")
    group.addoption("--all-files", action="store_true", help="at the end, list the time of every file")
    group.addoption("--seed-day", type=int, help="draw the seeds of this day; a run names its day at its end")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the day here, in the first process: the processes of a parallel run inherit it."""
    settings.load_profile("deep" if config.option.deep else "house")
    config.pluginmanager.register(CpuMeter())
    if config.option.seed_day is None:
        config.option.seed_day = utc_date().date().toordinal()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let one process of a parallel run collect first. The others then read the bytecode that it has written.

    Each of them would compile all tests and their libraries, while the checks of `make test` use the second core.
    """
    with Path(__file__).open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave deep tests out of a run that is not deep, and put folders that take long first."""
    left_out = [item for item in items if not config.option.deep and item.get_closest_marker("deep")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    kept = set(items) - set(left_out)
    for item in kept:
        if _place(item.path).startswith(REAL):
            item.add_marker(pytest.mark.flaky(reruns=1))
    items[:] = sorted((item for item in items if item in kept), key=lambda item: _rank(item.path))


def _rank(path: Path) -> int:
    place = _place(path)
    return next((rank for rank, long in enumerate(LONG) if place.startswith(long)), len(LONG))


def _place(path: Path) -> str:
    """Return the path of a test file below this folder."""
    return path.relative_to(Path(__file__).parent).as_posix()


class CpuMeter:
    """Adds to each report the CPU time that this process and its ended children have used since the last one."""

    def __init__(self) -> None:
        self._used_s = sum(os.times()[:4])

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pluggy.Result[pytest.TestReport]]:
        report = (yield).get_result()
        used_s = sum(os.times()[:4])
        report.user_properties.append((CPU_S, used_s - self._used_s))
        self._used_s = used_s


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the slowest tests and files, skips, second tries, and how to repeat the seeds. pytest's last line follows.

    The CPU time of a server counts where the server ends: in the test or file that used it last.
    """
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    tests: Counter[str] = Counter()
    files: Counter[str] = Counter()
    files_cpu: Counter[str] = Counter()
    skips: Counter[str] = Counter()
    for report in reports:
        if isinstance(report, pytest.TestReport):
            file = report.nodeid.partition("::")[0]
            tests[report.nodeid] += report.duration
            files[file] += report.duration
            files_cpu[file] += dict(report.user_properties).get(CPU_S, 0.0)
        if getattr(report, "skipped", False) and isinstance(report.longrepr, tuple):
            skips[report.longrepr[2].removeprefix("Skipped: ")] += 1
    terminalreporter.section(f"{SLOWEST} slowest tests")
    for nodeid, seconds in tests.most_common(SLOWEST):
        terminalreporter.line(f"{seconds:7.1f} s  {nodeid}")
    listed = None if config.option.all_files else SLOWEST
    terminalreporter.section(f"{listed or 'all'} files by time: elapsed, CPU")
    for file, seconds in files.most_common(listed):
        terminalreporter.line(f"{seconds:7.1f} s {files_cpu[file]:7.1f} s  {file}")
    terminalreporter.line(f"{files.total():7.1f} s {files_cpu.total():7.1f} s  all {len(files)} files")
    if skips:
        terminalreporter.section("skipped, by reason")
    for reason, count in skips.most_common():
        terminalreporter.line(f"{count:7}    {reason}")
    repeated = terminalreporter.stats.get("rerun", [])
    if repeated:
        terminalreporter.section("failed, and ran a second time")
    for report in repeated:
        terminalreporter.line(f"{report.nodeid} ({report.when})")
        terminalreporter.line(report.longreprtext)
    if not config.option.deep:
        terminalreporter.line(
            f"Seeds of day {config.option.seed_day}; deep tests were left out. "
            f"The same again: --seed-day {config.option.seed_day}. All of it: make test-deep"
        )


@pytest.fixture(scope="session")
def seeds(pytestconfig: pytest.Config) -> Seeds:
    return Seeds(day=pytestconfig.option.seed_day, deep=pytestconfig.option.deep)


@pytest.fixture(scope="session")
def hash_server() -> Iterator[RunningServer]:
    """A real server of the hash model: 1 prefill + 1 decode worker, no weights, no torch."""
    with serving("hash") as server:
        yield server


@pytest.fixture(scope="session")
def smollm_server() -> Iterator[RunningServer]:
    """A real server of the embedded model in float32: 1 prefill + 1 decode worker."""
    with serving("--dtype", "float32") as server:
        yield server


@pytest.fixture
def node() -> Iterator[StoreNode]:
    """A pool node in this process, with room for ten blocks."""
    node = StoreNode(host="127.0.0.1", port=0, capacity_bytes=10 * BLOCK_BYTES)
    yield node
    node.close()
