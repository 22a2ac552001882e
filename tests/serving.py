"""Start the real server as its users do: a process, real workers, real sockets on loopback."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

START_S = float(os.environ.get("BATON_TESTS_START_S", "240"))
"""Also on a machine under load, and less than the time limit of a test, so that a failure shows the output.

tools/gpu.py has a shorter limit for tests, and sets the variable.
"""
FLAGS = ("--port", "0", "--queue-s", "600")
"""A busy machine is slow: no request of a test is refused for that. A test of the limit gives its own."""
POLL_S = 0.01
"""The pause between two requests of a wait. Without it the wait would take a core from the awaited processes."""
POLL_S_MAX = 0.05
"""The longest pause. A long wait asks less often, because each request takes CPU time from the awaited processes."""
POLLS_MAX = 9000
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients of plain HTTP. The default context reads all root certificates, which takes 40 ms for each client."""


class RunningServer:
    """A `baton serve` process that has said that it is ready."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log
        self.url = ""
        self._follower = threading.Thread(target=self._follow, daemon=True)
        self._listening = threading.Event()
        self._ready = threading.Event()

    def wait_listening(self) -> None:
        """Follow the output until the server has said where it listens."""
        self._follower.start()
        assert self._listening.wait(START_S), f"not listening in {START_S} s:\n{self.output()}"
        assert self.url, f"the server ended:\n{self.output()}"

    def wait_ready(self, start_s: float = START_S) -> None:
        """Wait for the ready line. Fails with the output if the process ends before."""
        assert self._ready.wait(start_s), f"not ready in {start_s} s:\n{self.output()}"
        assert b"ready: " in self.log.read_bytes(), f"the server ended:\n{self.output()}"

    def _follow(self) -> None:
        assert self.process.stdout is not None
        with self.log.open("wb") as log, self.process.stdout as stream:
            for raw in stream:
                log.write(raw)
                log.flush()
                if raw.startswith(b"listening on "):
                    self.url = raw.split()[2].decode()
                    self._listening.set()
                if raw.startswith(b"ready: "):
                    self._ready.set()
        self._listening.set()
        self._ready.set()

    def wait_output(self, *texts: str) -> None:
        """Wait until the output has one of the texts. A line may come after an HTTP response that shows its cause."""
        self.wait_until(lambda _: any(text in self.output() for text in texts), reason=f"says {' or '.join(texts)}")

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def client(self, *, timeout_s: float = 60.0) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=timeout_s, verify=NO_TLS)

    def wait_until(self, condition: Callable[[dict], bool], *, reason: str, polls_max: int = POLLS_MAX // 3) -> dict:
        """Request /cluster until the condition holds. Return that state."""
        pause = threading.Event()
        with self.client() as client:
            for number in range(polls_max):
                state = client.get("/cluster").raise_for_status().json()
                if condition(state):
                    return state
                pause.wait(min(POLL_S_MAX, POLL_S * (1 + number / 4)))
        raise AssertionError(f"never happened: {reason}; last seen {state}\n{self.output()}")

    def cluster(self) -> dict:
        with self.client() as client:
            return client.get("/cluster").raise_for_status().json()

    def worker_pids(self) -> list[int]:
        return [worker["pid"] for worker in self.cluster()["workers"]]

    def metric(self, name: str, label: str = "") -> float:
        """Sum the series of one metric: all, or those with a label, `outcome="stored"`. Fails where there is none."""
        with self.client() as client:
            lines = client.get("/metrics").raise_for_status().text.splitlines()
        assert f"# TYPE {name.removesuffix('_count')} " in "\n".join(lines), f"there is no metric {name}"
        series = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in series if label in line)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end, and for the last line of output. Returns the exit code."""
        self.process.send_signal(number)
        code = self.process.wait(60)
        self._follower.join(60)
        return code


@contextmanager
def serving(
    *arguments: str, environment: dict[str, str] | None = None, flags: Sequence[str] = FLAGS
) -> Iterator[RunningServer]:
    """Run `baton serve FLAGS ARGUMENTS` for the length of a with block; no process is left after it."""
    with listening(*arguments, environment=environment, flags=flags) as server:
        server.wait_ready()
        yield server


@contextmanager
def listening(
    *arguments: str,
    environment: dict[str, str] | None = None,
    inside: Sequence[str] = (),
    flags: Sequence[str] = FLAGS,
) -> Iterator[RunningServer]:
    """As `serving`, but before it is ready: hosts may join. `inside`: a command that runs it in a namespace."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [*inside, sys.executable, "-m", "baton.cli.main", "serve", *flags, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
        )
        server = RunningServer(process, Path(folder) / "log")
        try:
            server.wait_listening()
            yield server
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that may be stopped or have ended: ask first, kill after 30 s."""
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def nothing_used(state: dict) -> bool:
    """INV-2 and INV-4, on every host."""
    return all(
        host["kv_blocks_used"] == 0 and host["kv_blocks_free"] + host["kv_blocks_cached"] == host["kv_blocks_total"]
        for host in state["hosts"]
    )


def all_workers_ready(state: dict) -> bool:
    return all(worker["state"] == "ready" for worker in state["workers"])


def children(pid: int, module: str) -> list[int]:
    """Return the processes that a process has started as `python -m MODULE`."""
    done = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(line.split()[0]) for line in done.stdout.splitlines() if f"-m {module}" in line]


def alive(pid: int) -> bool:
    """Tell whether a process exists and is not a zombie."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return "State:\tZ" not in status
