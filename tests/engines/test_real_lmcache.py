"""The real LMCache (in an environment of its own) keeps its chunks in a pool node of Baton."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.store_servers import baton_pool

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]
PACKAGE = "lmcache==0.5.6"
IMPORTED = (
    *("numba", "prometheus_client", "py-cpuinfo", "psutil", "cachetools", "pyyaml", "sortedcontainers"),
    *("aiofile", "aiofiles", "msgspec", "pyzmq"),
)
"""What LMCache imports on a CPU. All of its requirements would be gigabytes of CUDA."""
ENVIRONMENT = Path.home() / ".cache" / "baton" / "peers" / "lmcache-0.5.6"
DRIVER = Path(__file__).with_name("lmcache_driver.py")
SOURCE = Path(__file__).parents[2] / "src"
PYTHONPATH = os.pathsep.join([str(SOURCE), sysconfig.get_path("purelib")])
PLUGIN = "remote_storage_plugin.baton"
CHUNK_BYTES = 2 * 3 * 16 * 128 * 2
POOL_BYTES = 100 * CHUNK_BYTES


@pytest.fixture(scope="module")
def python() -> Path:
    """Return the interpreter of an environment with LMCache, on the PyTorch of this one."""
    program = ENVIRONMENT / "bin" / "python"
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    if subprocess.run([program, "-c", "import numba"], capture_output=True, check=False).returncode:
        pip = [str(program), "-m", "pip", "install", "--quiet"]
        for command in ([*pip, "--no-deps", PACKAGE], [*pip, *IMPORTED]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                pytest.skip(f"{PACKAGE} cannot be installed: {done.stderr.strip().splitlines()[-1:]}")
    return program


class LMCache:
    """A process with LMCache."""

    def __init__(self, python: Path, store: str, **settings: Any) -> None:
        extra = {
            f"{PLUGIN}.module_path": "baton.integrations.lmcache.connector",
            f"{PLUGIN}.class_name": "BatonStoreConnector",
            f"{PLUGIN}.store": store,
        }
        config = {"remote_storage_plugins": ["baton"], "extra_config": extra, **settings}
        self.process = subprocess.Popen(
            [str(python), str(DRIVER), json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": PYTHONPATH, "LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"},
        )
        self.is_connected = self._answer()

    def ask(self, *order: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()[-3000:]
        return json.loads(line)

    def end(self) -> str:
        """End the process. Return its log."""
        _, log = self.process.communicate()
        return log


@contextmanager
def lmcache(python: Path, store: str, **settings: Any) -> Iterator[LMCache]:
    running = LMCache(python, store, **settings)
    try:
        yield running
    finally:
        running.end()


def test_chunks_come_back_in_another_process(python: Path) -> None:
    with baton_pool(size_bytes=POOL_BYTES) as (_, url), lmcache(python, url) as one, lmcache(python, url) as other:
        assert one.is_connected
        one.ask("put", [1, 2, 3, 4])
        assert one.ask("contains", [1, 2, 3, 4, 5]) == 4
        assert other.ask("wait_for", [1, 2, 3, 4]) == 4
        assert other.ask("get", [4, 1, 5, 2]) == [True, True, False, True]
        assert other.ask("get_prefix", [1, 2, 5, 3]) == 2
        assert other.ask("remove", [2, 9]) == [True, False]
        assert other.ask("get", [1, 2]) == [True, False]
        other.ask("cancel", [1, 3, 4])
        assert one.ask("get", [1, 3]) == [True, True]
        for each in (one, other):
            each.ask("wait_unused")
            each.ask("close")


def test_an_evicted_chunk_is_a_miss(python: Path) -> None:
    """The node has room for 8 chunks."""
    with baton_pool(size_bytes=8 * CHUNK_BYTES) as (_, url), lmcache(python, url) as one:
        one.ask("put", list(range(8)))
        one.ask("put", list(range(8, 12)))
        assert one.ask("get", list(range(12))) == [False] * 4 + [True] * 8
        assert one.ask("contains", [0]) == 0


def test_a_partial_chunk_is_not_kept(python: Path) -> None:
    with baton_pool(size_bytes=POOL_BYTES) as (_, url), lmcache(python, url) as one:
        one.ask("put", [1], 7)
        assert one.ask("get", [1]) == [False]


def test_a_pool_that_hangs_or_ends_is_a_miss(python: Path) -> None:
    with baton_pool(size_bytes=POOL_BYTES) as (node, url), lmcache(python, url) as one:
        one.ask("put", [1, 2])
        assert one.ask("ping") == 0
        node.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, node.pid, os.WSTOPPED)
        assert one.ask("get", [1, 2]) == [False, False]
        one.ask("wait_ping", False)
        node.kill()
        one.ask("put", [3])
        assert one.ask("get", [1, 3]) == [False, False]
        one.ask("wait_unused")
        with baton_pool(size_bytes=POOL_BYTES, port=int(url.rpartition(":")[2])):
            one.ask("wait_ping", True)
            one.ask("put", [4])
            assert one.ask("get", [1, 4]) == [False, True]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"use_layerwise": True}, "use_layerwise must be false"),
        ({"save_unfull_chunk": True}, "save_unfull_chunk must be false"),
        ({"remote_serde": "kivi"}, "must be naive"),
    ],
)
def test_unsupported_settings_are_told(python: Path, settings: dict[str, Any], problem: str) -> None:
    """LMCache logs the reason and runs without remote storage."""
    running = LMCache(python, "pool://127.0.0.1:1", **settings)
    assert not running.is_connected
    assert problem in running.end()


def test_a_missing_store_is_told(python: Path) -> None:
    running = LMCache(python, "pool://127.0.0.1:1")
    assert not running.is_connected
    assert "start it with baton pool" in running.end()
