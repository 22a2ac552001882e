"""Hosts with a network between them: namespaces of one machine, joined by links that can be slow, or cut."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.hosting import RunningHost, joining
from tests.process.test_hosts import (
    DECODE,
    PREFILL,
    all_ready,
    ask,
    many,
    text_of,
)
from tests.serving import RunningServer, listening, nothing_used
from tests.store_servers import baton_pool

SUBNET = f"10.213.{os.getpid() % 256}"
"""Of the test's own bridge."""
SLOW = "400kbit"
"""At which the KV of a long prompt of the hash model takes seconds."""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _missing() -> str:
    """What this machine lacks for namespaces. Empty: nothing."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc (package iproute2)"
    if os.geteuid() != 0:
        return "root"
    probe = f"baton-probe-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if done.returncode:
        return f"the right to make network namespaces: {done.stderr.strip()}"
    _ip("netns", "del", probe)
    return ""


MISSING = _missing()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING}")


class Net:
    """A server's namespace with a bridge, and hosts' namespaces with a link to it each."""

    def __init__(self) -> None:
        self._suffix = str(os.getpid())
        self._made: list[str] = []
        self.server = self._space("s")
        _ip("-n", self.server, "link", "add", "br0", "type", "bridge")
        _ip("-n", self.server, "addr", "add", f"{SUBNET}.1/24", "dev", "br0")
        _ip("-n", self.server, "link", "set", "br0", "up")
        self._door = f"bt{self._suffix}"[:15]
        _ip("link", "add", self._door, "type", "veth", "peer", "name", "door", "netns", self.server)
        _ip("-n", self.server, "link", "set", "door", "master", "br0", "up")
        _ip("addr", "add", f"{SUBNET}.254/24", "dev", self._door)
        _ip("link", "set", self._door, "up")

    def _space(self, name: str) -> str:
        space = f"baton-{name}-{self._suffix}"
        _ip("netns", "add", space)
        self._made.append(space)
        _ip("-n", space, "link", "set", "lo", "up")
        return space

    def add(self, name: str, number: int) -> str:
        """Make a host's namespace. Its link is called `wire`."""
        space = self._space(name)
        _ip("-n", space, "link", "add", "wire", "type", "veth", "peer", "name", f"to-{name}", "netns", self.server)
        _ip("-n", self.server, "link", "set", f"to-{name}", "master", "br0", "up")
        _ip("-n", space, "addr", "add", f"{SUBNET}.{number}/24", "dev", "wire")
        _ip("-n", space, "link", "set", "wire", "up")
        return space

    def shape(self, name: str, rate: str, burst: str = "64kb") -> None:
        """Let what the host sends go out no faster than this. `burst`: what passes unshaped, more on fast links."""
        space = f"baton-{name}-{self._suffix}"
        command = ["tc", "-n", space, "qdisc", "replace", "dev", "wire", "root", "tbf", "rate", rate]
        subprocess.run([*command, "burst", burst, "latency", "2s"], check=True, capture_output=True, text=True)

    def switch(self, name: str, state: str) -> None:
        """Set the host's link up or down."""
        _ip("-n", f"baton-{name}-{self._suffix}", "link", "set", "wire", state)

    def close(self) -> None:
        for space in self._made:
            _ip("netns", "del", space)
        subprocess.run(["ip", "link", "del", self._door], capture_output=True)


@pytest.fixture
def net() -> Iterator[Net]:
    net = Net()
    try:
        net.add("a", 2)
        net.add("b", 3)
        yield net
    finally:
        net.close()


def _inside(space: str) -> list[str]:
    return ["ip", "netns", "exec", space]


@contextmanager
def cluster_in(net: Net, model: str, *arguments: str) -> Iterator[tuple[RunningServer, dict[str, RunningHost]]]:
    """A server in its namespace, a host that prefills and one that decodes in theirs."""
    given = ("--hosts", "2", "--host", f"{SUBNET}.1", "--insecure", *arguments)
    with listening(model, *given, inside=_inside(net.server)) as server, ExitStack() as stack:
        hosts = {
            name: stack.enter_context(
                joining(server.url, name, *roles, inside=_inside(net.server.replace("-s-", f"-{name}-")))
            )
            for name, roles in (("a", PREFILL), ("b", DECODE))
        }
        server.wait_ready()
        yield server, hosts


@pytest.fixture
def fast(tmp_path: Path) -> tuple[str, str]:
    path = tmp_path / "baton.toml"
    path.write_text("[hosts]\nsilent_s = 3.0\nmover_silent_s = 2.0\ncopy_s = 60.0\n")
    return "--config", str(path)


def _is_under_way(state: dict) -> bool:
    """Blocks are kept at the host that decodes, and its worker has nothing to do yet: KV is on its way there."""
    used = {host["id"]: host["kv_blocks_used"] for host in state["hosts"]}
    running = sum(worker["running"] + worker["waiting"] for worker in state["workers"] if worker["host"] == "b")
    return used.get("b", 0) > 0 and running == 0


@pytest.mark.parametrize("victim", ["a", pytest.param("b", marks=pytest.mark.deep)])
def test_a_link_that_is_cut_in_mid_handoff_costs_no_token(
    victim: str, net: Net, fast: tuple[str, str], hash_server: RunningServer
) -> None:
    """The host behind it is given up, the request goes on at the other; once the link is back, so is the host."""
    body = {"prompt": "long " * 700, "max_tokens": 20, "ignore_eos": True, "temperature": 0}
    with hash_server.client() as client:
        expected = text_of(ask(client, body))
    with cluster_in(net, "hash", *fast) as (server, _hosts):
        net.shape("a", SLOW)
        threads, answers = many(server, [body])
        server.wait_until(_is_under_way, reason="a copy is under way")
        net.switch(victim, "down")
        other = "b" if victim == "a" else "a"
        server.wait_until(lambda c: [host["id"] for host in c["hosts"]] == [other], reason="the host is given up")
        threads[0].join()
        assert answers == [expected]
        server.wait_until(nothing_used, reason="no block is used")
        net.shape("a", "1gbit")
        net.switch(victim, "up")
        server.wait_until(all_ready("a", "b"), reason="the host is back")
        again = {**body, "prompt": "short"}
        with server.client() as client, hash_server.client() as one:
            assert text_of(ask(client, again)) == text_of(ask(one, again))


@pytest.mark.parametrize("victim", [pytest.param("a", marks=pytest.mark.deep), "b"])
def test_an_agent_that_is_killed_in_mid_handoff_costs_no_token(
    victim: str, net: Net, fast: tuple[str, str], hash_server: RunningServer
) -> None:
    """The copy ends with it, on the other side too: its blocks are used again."""
    body = {"prompt": "long " * 700, "max_tokens": 20, "ignore_eos": True, "temperature": 0}
    with hash_server.client() as client:
        expected = text_of(ask(client, body))
    with cluster_in(net, "hash", *fast) as (server, hosts):
        net.shape("a", SLOW)
        threads, answers = many(server, [body])
        server.wait_until(_is_under_way, reason="a copy is under way")
        hosts[victim].process.kill()
        threads[0].join()
        assert answers == [expected]
        server.wait_until(lambda c: len(c["hosts"]) == 1 and nothing_used(c), reason="one host, nothing used")
        with server.client() as client:
            assert text_of(ask(client, body)) == expected


def test_kv_in_a_pod_of_its_own_outlives_the_hosts_of_its_machine(net: Net, tmp_path: Path) -> None:
    """As the DaemonSet of the chart: a pool in the network namespace of its pod, and hosts in those of theirs.

    Both mount one folder. So a host maps the pool's memory, and the next one finds the KV of a host that was killed.
    """
    body = {"prompt": "kept " * 100, "max_tokens": 20, "ignore_eos": True, "temperature": 0}
    folder = TemporaryDirectory(prefix="baton-")  # short: it is part of a socket's address
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef" * 4)
    secret.chmod(0o600)
    address = f"pool://{SUBNET}.2:8700"
    tier = ("--tier", f"{address}?secret_file={secret}", "--mixed", "1", "--kv-blocks", "96")
    inside = {"inside": _inside(net.server.replace("-s-", "-b-"))}
    pool = baton_pool(
        *("--host", f"{SUBNET}.2", "--secret-file", str(secret), "--socket-folder", folder.name),
        port=8700,
        inside=_inside(net.server.replace("-s-", "-a-")),
    )
    given = ("--hosts", "1", "--host", f"{SUBNET}.1", "--insecure")
    with folder, pool, listening("hash", *given, inside=_inside(net.server)) as server, server.client() as client:
        with joining(server.url, "first", *tier, **inside) as host:
            server.wait_ready()
            expected = text_of(ask(client, body))
            server.wait_until(
                lambda state: state["hosts"][0]["tiers"][0]["kv_blocks_cached"] > 30, reason="the pool has the blocks"
            )
            assert "memfd:baton-pool" in Path(f"/proc/{host.mover()}/maps").read_text()
            host.process.kill()
            host.process.wait()
        with joining(server.url, "second", *tier, **inside):
            server.wait_until(all_ready("second"), reason="the next host has joined")
            answer = ask(client, body)
        assert text_of(answer) == expected
        assert answer["timings"]["cached_tokens"] > 400


@pytest.mark.deep
def test_the_real_model_over_a_link_of_one_gigabit(net: Net, smollm_server: RunningServer) -> None:
    """Some 20 MB of KV over a wire that needs 0.2 s for them; INV-8, and TCP, because memory is not shared here."""
    words = " ".join(f"item {index}" for index in range(120))
    body = {"prompt": f"A list: {words}", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with smollm_server.client() as client:
        expected = text_of(ask(client, body))
    net.shape("a", "1gbit")
    with cluster_in(net, "smollm2-135m", "--dtype", "float32") as (server, _hosts), server.client() as client:
        answer = ask(client, body)
        assert text_of(answer) == expected
        assert answer["timings"]["decode_worker"] == "b.decode-0"
        assert server.metric("baton_handoff_bytes_total") > 10e6
        assert server.metric("baton_handoff_layer_bytes_total") > 0, "the end of the prompt went over by layer"
        server.wait_until(nothing_used, reason="no block is used")
