"""Hosts that join a server, as their users start them: a process each, with its own workers, arena and mover."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from tests.serving import RunningServer, all_workers_ready, children, end, listening, nothing_used


class RunningHost:
    """A `baton host` process."""

    def __init__(self, process: subprocess.Popen[bytes], name: str) -> None:
        self.process = process
        self.name = name

    def pids(self, module: str) -> list[int]:
        """Processes that it has started as `python -m MODULE`."""
        return children(self.process.pid, module)

    def mover(self) -> int:
        (pid,) = self.pids("baton.serve.host.mover")
        return pid


@contextmanager
def joining(
    url: str, name: str, *arguments: str, inside: Sequence[str] = (), environment: dict[str, str] | None = None
) -> Iterator[RunningHost]:
    """Run `baton host --join URL` for the length of a with block; no process is left after it.

    `inside`: a command that runs it in a namespace.
    """
    command = [sys.executable, "-m", "baton.cli.main", "host", "--join", url, "--name", name, *arguments]
    process = subprocess.Popen([*inside, *command], stdin=subprocess.DEVNULL, env=os.environ | (environment or {}))
    try:
        yield RunningHost(process, name)
    finally:
        end(process)


@contextmanager
def cluster(
    model: str, hosts: dict[str, Sequence[str]], *arguments: str
) -> Iterator[tuple[RunningServer, dict[str, RunningHost]]]:
    """Run a server without workers and these hosts, by name with their arguments, until all of them are ready."""
    with listening(model, "--hosts", str(len(hosts)), *arguments) as server, ExitStack() as stack:
        joined = {name: stack.enter_context(joining(server.url, name, *given)) for name, given in hosts.items()}
        server.wait_ready()
        yield server, joined


class MendableCluster:
    """A server without workers and its hosts, for several tests. Tests may end hosts; `mend` starts them again."""

    def __init__(
        self,
        server: RunningServer,
        arguments: dict[str, Sequence[str]],
        inside: dict[str, Sequence[str]],
        *,
        url: str = "",
        environment: dict[str, str] | None = None,
    ) -> None:
        """`url`: where hosts reach the server. Empty: at its own address."""
        self.server = server
        self._url = url or server.url
        self._environment = environment
        self.hosts: dict[str, RunningHost] = {}
        self._arguments = arguments
        self._inside = inside
        self._stack = ExitStack()

    def mend(self) -> None:
        """Start the hosts that do not run, and wait until all are ready and no block is used."""
        self.mend_hosts()
        self.server.wait_until(self._is_whole, reason=f"hosts {', '.join(self._arguments)} are ready, no block is used")

    def mend_hosts(self) -> None:
        """Start the hosts that do not run."""
        for name, arguments in self._arguments.items():
            if name not in self.hosts or self.hosts[name].process.poll() is not None:
                host = joining(
                    self._url, name, *arguments, inside=self._inside.get(name, ()), environment=self._environment
                )
                self.hosts[name] = self._stack.enter_context(host)

    def _is_whole(self, state: dict) -> bool:
        ready = {host["id"] for host in state["hosts"] if host["state"] == "ready"}
        return ready - {"host-0"} == set(self._arguments) and all_workers_ready(state) and nothing_used(state)

    def close(self) -> None:
        self._stack.close()
