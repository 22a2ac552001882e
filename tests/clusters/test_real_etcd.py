"""Two servers of one fleet and a real etcd: one is active, the other takes over."""

from __future__ import annotations

import fcntl
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from baton.move.etcd import Etcd, EtcdError, server_key
from tests.hosting import joining
from tests.mooncake_servers import free_ports
from tests.serving import end

pytestmark = [pytest.mark.deep, pytest.mark.timeout(300)]
CACHE = Path.home() / ".cache" / "baton" / "etcd"
POLL_S, POLLS_MAX = 0.05, 2_000
TTL_S = 6


def etcd_program() -> str:
    """Return the program of etcd, downloaded if the system has none. Skip the test if that fails."""
    if found := shutil.which("etcd"):
        return found
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test processes share the download
        if not (CACHE / "usr" / "bin" / "etcd").exists():
            try:
                subprocess.run(["apt-get", "download", "etcd-server"], cwd=CACHE, capture_output=True, check=True)
                for package in CACHE.glob("*.deb"):
                    subprocess.run(["dpkg-deb", "-x", str(package), str(CACHE)], capture_output=True, check=True)
            except (FileNotFoundError, subprocess.CalledProcessError):
                pytest.skip("no etcd: apt install etcd-server")
    return str(CACHE / "usr" / "bin" / "etcd")


def wait_for(holds: Callable[[], bool], what: str) -> None:
    for _ in range(POLLS_MAX):
        if holds():
            return
        threading.Event().wait(POLL_S)
    raise AssertionError(what)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    client, peer = (f"http://127.0.0.1:{port}" for port in free_ports(2))
    command = [etcd_program(), "--data-dir", str(tmp_path), "--listen-client-urls", client]
    command += ["--advertise-client-urls", client, "--listen-peer-urls", peer]
    command += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: _answers_etcd(client), "etcd did not start")
        yield process, client
    finally:
        end(process)


def _answers_etcd(url: str) -> bool:
    try:
        return Etcd(url).get("x") is None
    except EtcdError:
        return False


class Member:
    """A `baton standby`, and the address of the server that it runs when it is active."""

    def __init__(self, etcd: str, command: Callable[[int], list[str]]) -> None:
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        options = ["--etcd", etcd, "--name", "fleet", "--url", self.url, "--ttl-s", str(TTL_S)]
        baton = [sys.executable, "-m", "baton.cli.main", "standby", *options, "--", *command(port)]
        self.process = subprocess.Popen(baton, stdin=subprocess.DEVNULL)

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/", timeout=5):
                return True
        except OSError:
            return False


def page(port: int) -> list[str]:
    """Return the command of a server that starts in an instant."""
    return [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]


@contextmanager
def members(etcd: str, command: Callable[[int], list[str]], count: int) -> Iterator[list[Member]]:
    with ExitStack() as stack:
        found: list[Member] = []
        for _ in range(count):
            found.append(Member(etcd, command))
            stack.callback(end, found[-1].process)
            wait_for(lambda: Etcd(etcd).get(server_key("fleet")) is not None, "no member is elected")
        yield found


def active(etcd: str) -> str | None:
    return Etcd(etcd).get(server_key("fleet"))


def test_another_member_takes_over_from_a_killed_one(etcd: tuple[subprocess.Popen[bytes], str]) -> None:
    """The server of the killed member ends with it."""
    _, url = etcd
    with members(url, page, 2) as (first, second):
        wait_for(first.answers, "the first member serves")
        assert not second.answers()
        first.process.kill()
        wait_for(second.answers, "the second member takes over")
        assert active(url) == second.url
        assert not first.answers()


def test_a_member_that_ends_in_order_gives_its_lease_back(etcd: tuple[subprocess.Popen[bytes], str]) -> None:
    _, url = etcd
    with members(url, page, 2) as (first, second):
        wait_for(first.answers, "the first member serves")
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(60) != 1
        assert active(url) != first.url
        wait_for(second.answers, "the second member takes over")


def test_a_server_is_killed_before_its_lease_may_expire(etcd: tuple[subprocess.Popen[bytes], str]) -> None:
    """etcd does not answer: the active member cannot know if another one is elected."""
    process, url = etcd
    with members(url, page, 1) as (member,):
        wait_for(member.answers, "the member serves")
        process.send_signal(signal.SIGSTOP)
        try:
            wait_for(lambda: not member.answers(), "the server is killed")
        finally:
            process.send_signal(signal.SIGCONT)
        wait_for(member.answers, "the member is elected again")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_hosts_follow_the_active_server(etcd: tuple[subprocess.Popen[bytes], str], tmp_path: Path, number: int) -> None:
    """The standby gets the host, and after SIGTERM also its KV."""
    _, url = etcd
    config = tmp_path / "config.toml"
    config.write_text(f'[survival]\nresume_folder = "{tmp_path / "resume"}"\n')

    def server(port: int) -> list[str]:
        serve = ["serve", "hash", "--hosts", "1", "--port", str(port), "--config", str(config)]
        return [sys.executable, "-m", "baton.cli.main", *serve]

    host = joining(f"etcd://{url.removeprefix('http://')}/fleet", "far", "--mixed", "1")
    with members(url, server, 2) as (first, second), host:
        wait_for(lambda: _is_ready(first.url), "the first server has the host")
        text, cached = _complete(first.url)
        assert cached == 0
        first.process.send_signal(number)
        wait_for(lambda: _is_ready(second.url), "the second server has the host")
        again, cached = _complete(second.url)
    assert again == text
    assert (cached > 0) == (number == signal.SIGTERM)


def _complete(url: str) -> tuple[str, int]:
    body = {"prompt": "A prompt of some blocks. " * 8, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0).raise_for_status().json()
    return answer["choices"][0]["text"], answer["timings"]["cached_tokens"]


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5.0).status_code == 200
    except httpx.TransportError:
        return False
