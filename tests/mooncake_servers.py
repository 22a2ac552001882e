"""A real Mooncake Store on this machine: a master, and a client that lends memory. The wheel is kept in a cache."""

from __future__ import annotations

import fcntl
import platform
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes.util import find_library
from pathlib import Path

import pytest

PACKAGE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
CACHE = Path.home() / ".cache" / "baton" / "peers" / "mooncake-0.3.13.post1"
LIBRARIES = "libraries"
SYSTEM_PACKAGES = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")
POLL_S, POLLS_MAX = 0.02, 3_000
CONNECT = """
import sys
sys.path.insert(0, sys.argv[1])
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", sys.argv[2]) == 0
keys = sys.argv[3:]
"""
DAMAGE = """
values = [bytearray(store.get(key)) for key in keys]
values[0][-1] ^= 1
for key, value in zip(keys, (values[0], values[1][:-1], values[3])):
    assert store.remove(key, True) == 0
    assert store.put(key, bytes(value)) == 0
"""
SHOW = """
for key in keys:
    print(store.get(key).hex())
"""


def mooncake_folder() -> Path:
    """Return a folder with the installed package and its libraries. Skip the test if it cannot be installed."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("Mooncake is packaged for Linux on x86-64")
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    with CACHE.with_name("mooncake.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test processes share the installation
        if not CACHE.exists():
            with tempfile.TemporaryDirectory(dir=CACHE.parent) as folder:
                into = Path(folder) / "mooncake"
                _install(into)
                into.rename(CACHE)
    return CACHE


def _install(into: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
    _run([*pip, "--target", str(into), PACKAGE], f"{PACKAGE} cannot be installed")
    (into / LIBRARIES).mkdir()
    if find_library("ibverbs") is None:
        missing = "Mooncake needs libibverbs (apt install libibverbs1), and apt-get does not download it"
        _run(["apt-get", "download", *SYSTEM_PACKAGES], missing, folder=into)
        for package in into.glob("*.deb"):
            _run(["dpkg-deb", "-x", str(package), str(into / "system")], missing)
        for library in (into / "system").rglob("*.so.*"):
            library.rename(into / LIBRARIES / library.name)


def _run(command: list[str], problem: str, *, folder: Path | None = None) -> None:
    """Run a command, or skip the test if it fails."""
    try:
        subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"{problem}: {getattr(error, 'stderr', error)}")


class Mooncake:
    """A master on fixed ports, and a client that lends memory."""

    def __init__(self, *, memory: str = "64MB") -> None:
        self._programs = mooncake_folder() / "mooncake"
        self._memory = memory
        self.port, self.metrics_port, self._client_port = free_ports(3)
        self.master = self._start_master()
        try:
            self.holder = self._start_holder()
        except BaseException:
            _end(self.master)
            raise

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}?metrics_port={self.metrics_port}"

    def kill_master(self) -> None:
        _end(self.master)

    def start_master(self) -> None:
        """Start another master on the ports of the killed one. The holder joins it by itself."""
        self.master = self._start_master()
        self._await_holder(self.holder)

    def kill_holder(self) -> None:
        _end(self.holder)

    def start_holder(self) -> None:
        """Start another holder, once the master has noticed the end of the killed one."""
        self._await(self.master, lambda: not self._master_answer("get_all_segments").split())
        self.holder = self._start_holder()

    def damage(self, changed: str, cut: str, swapped: str, *, source: str) -> None:
        """Change a byte of a value, cut another one, and replace the third by that of `source`."""
        self._run(DAMAGE, changed, cut, swapped, source)

    def values(self, prefix: str) -> list[bytes]:
        """Return the values whose keys begin with a prefix."""
        keys = [key for key in self._master_answer("get_all_keys").decode().split() if key.startswith(prefix)]
        return [bytes.fromhex(line) for line in self._run(SHOW, *keys).split()]

    def close(self) -> None:
        _end(self.holder)
        _end(self.master)

    def _start_master(self) -> subprocess.Popen[bytes]:
        addresses = ["--rpc_address=127.0.0.1", f"--rpc_port={self.port}", "--metrics_host=127.0.0.1"]
        master = self._start("mooncake_master", *addresses, f"--metrics_port={self.metrics_port}", "--client_ttl=2")
        self._await(master, lambda: bool(self._master_answer("health")))
        return master

    def _start_holder(self) -> subprocess.Popen[bytes]:
        addresses = ["--host=127.0.0.1", "--metadata_server=P2PHANDSHAKE", f"--port={self._client_port}"]
        memory = f"--global_segment_size={self._memory}"
        holder = self._start("mooncake_client", *addresses, memory, f"--master_server_address=127.0.0.1:{self.port}")
        self._await_holder(holder)
        return holder

    def _start(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        quiet = subprocess.DEVNULL
        return subprocess.Popen([self._programs / program, *arguments], stdout=quiet, stderr=quiet)

    def _run(self, script: str, *arguments: str) -> str:
        command = [sys.executable, "-c", CONNECT + script, str(self._programs.parent), f"127.0.0.1:{self.port}"]
        return subprocess.run([*command, *arguments], capture_output=True, text=True, check=True).stdout

    def _await_holder(self, holder: subprocess.Popen[bytes]) -> None:
        self._await(holder, lambda: len(self._master_answer("get_all_segments").split()) == 1)

    def _master_answer(self, path: str) -> bytes:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/{path}", timeout=5) as answer:
                return answer.read()
        except OSError:
            return b""

    def _await(self, process: subprocess.Popen[bytes], is_ready: Callable[[], bool]) -> None:
        for _ in range(POLLS_MAX):
            if is_ready():
                return
            assert process.poll() is None, f"{process.args} ended"
            threading.Event().wait(POLL_S)
        _end(process)
        raise AssertionError(f"{process.args} did not start")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def free_ports(count: int) -> list[int]:
    """Return ports that no process of this machine uses."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@contextmanager
def mooncake(*, memory: str = "64MB") -> Iterator[Mooncake]:
    """Run a Mooncake Store, and let processes that are started meanwhile import its package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(mooncake_folder()), prepend=":")
        patch.setenv("LD_LIBRARY_PATH", str(mooncake_folder() / LIBRARIES), prepend=":")
        running = Mooncake(memory=memory)
        try:
            yield running
        finally:
            running.close()
