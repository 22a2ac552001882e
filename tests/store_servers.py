"""Real servers for the stores on other machines: Redis or Valkey, and something that speaks S3."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@contextmanager
def _running(command: list[str], *, ready: str) -> Iterator[str]:
    """Run a server, and yield the line in which it says that it is ready. What it says later is thrown away."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        reader = threading.Thread(target=server.stdout.read)
        try:
            said = []
            while not said or ready not in said[-1]:
                said.append(server.stdout.readline())
                assert said[-1], "the server ended: " + "".join(said)
            reader.start()
            yield said[-1]
        finally:
            server.kill()
            if reader.ident is not None:
                reader.join()


@contextmanager
def redis_server(folder: Path, *, port: int | None = None, options: tuple[str, ...] = ()) -> Iterator[int]:
    """Run a Redis on a port of this machine, without anything on disk. Yields the port; skips where it is missing."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("no redis-server and no valkey-server: apt install redis-server")
    if importlib.util.find_spec("redis") is None:
        pytest.skip("no package redis: pip install 'baton[redis]'")
    port = port or _free_port()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *options]
    with _running(command, ready="eady to accept connections"):
        yield port


@contextmanager
def s3_server(bucket: str) -> Iterator[str]:
    """Run an object store on this machine, with one bucket. Yields its endpoint; skips where a package is missing."""
    for package, extra in (("obstore", "s3"), ("moto", "dev")):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"no package {package}: pip install 'baton[{extra}]'")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(_free_port())]
    with _running(command, ready="Running on") as line:
        endpoint = line.split()[-1]
        httpx.put(f"{endpoint}/{bucket}", timeout=60.0).raise_for_status()  # the first request loads all that it plays
        yield endpoint


@contextmanager
def baton_pool(
    *arguments: str, size_bytes: float = 4e6, port: int = 0, inside: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `baton pool`. Yield its process and URL. `inside`: a command that runs it in a namespace."""
    command = [sys.executable, "-m", "baton.cli.main", "pool", "--bytes", str(size_bytes), "--port", str(port)]
    with subprocess.Popen([*inside, *command, *arguments], stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        try:
            yield node, node.stdout.readline().split()[-1]
        finally:
            node.kill()
