"""Secrets between machines: a listening end and its client prove to each other that they know one."""

from __future__ import annotations

import random
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec import structs

from baton.cli.main import main
from baton.core.errors import ConfigError, StoreError, TransferError
from baton.core.keys import read_shared_secret
from baton.move.ipc.challenge import WrongSecretError, admit, prove
from baton.move.ipc.cluster_tls import ClusterTls
from baton.move.store import node_wire
from baton.move.store.node import StoreNode
from baton.move.store.store_url import open_store
from baton.move.transport.nixl import NixlTransport
from baton.move.transport.port import Extent
from baton.move.transport.protection import Protection
from baton.move.transport.tcp import TcpTransport
from baton.move.transport.tcp_peer import TcpLimits
from baton.move.transport.wire import SourceRequest, Verb
from tests.transfers.wires import Proxy

SECRET, OTHER = b"s" * 32, b"o" * 32
BLOCK_BYTES = 1024
REQUEST_BYTES = len(SourceRequest(Verb.PROVE, 0, 0, b"", 0, 0, 0).packed())
NAME = bytes(range(16))
KV = random.Random(4).randbytes(1 << 16)


def shows_kv(seen: list[bytes]) -> bool:
    """Return whether an eavesdropper has seen a run of 32 bytes of `KV`."""
    return any(KV[start : start + 32] in data for data in seen for start in range(0, len(KV), 4096))


def outcome(work: Callable[[], None], caught: list[Exception]) -> None:
    try:
        work()
    except OSError as error:
        caught.append(error)


def handshake(ours: bytes, theirs: bytes) -> tuple[list[Exception], list[Exception]]:
    """Return the errors of the listening end and of the client."""
    one, other = socket.socketpair()
    errors: tuple[list[Exception], list[Exception]] = [], []

    def listen() -> None:
        with one:
            outcome(lambda: admit(one, ours), errors[0])

    thread = threading.Thread(target=listen)
    thread.start()
    with other:
        outcome(lambda: prove(other, theirs), errors[1])
    thread.join()
    return errors


def test_both_ends_accept_the_same_secret() -> None:
    assert handshake(SECRET, SECRET) == ([], [])


def test_neither_end_accepts_another_secret() -> None:
    listening, client = handshake(SECRET, OTHER)
    assert isinstance(listening[0], WrongSecretError)
    assert isinstance(client[0], ConnectionResetError)


def test_a_server_that_only_repeats_what_it_gets_is_refused() -> None:
    """A reflected proof is the client's own, and not the server's."""
    one, other = socket.socketpair()

    def reflect() -> None:
        one.sendall(bytes(32))
        said = one.recv(64, socket.MSG_WAITALL)
        one.sendall(said[32:])

    thread = threading.Thread(target=reflect)
    thread.start()
    with one, other:
        with pytest.raises(WrongSecretError):
            prove(other, SECRET)
        thread.join()


# ---- pool nodes


@pytest.fixture
def files(tmp_path: Path) -> dict[bytes, Path]:
    made = {SECRET: tmp_path / "secret", OTHER: tmp_path / "other"}
    for secret, path in made.items():
        path.write_bytes(secret + b"\n")
        path.chmod(0o600)
    return made


@pytest.fixture
def locked_node() -> Iterator[StoreNode]:
    node = StoreNode(host="127.0.0.1", port=0, capacity_bytes=16 * BLOCK_BYTES, secret=SECRET)
    yield node
    node.close()


def opened(node: StoreNode, options: str) -> None:
    store = open_store(f"pool://{node.address}?{options}", layout_fingerprint="f", block_bytes=BLOCK_BYTES)
    try:
        data = memoryview(bytearray(b"x" * BLOCK_BYTES))
        assert store.put([(NAME, data)]) == [True]
        assert store.get([(NAME, memoryview(bytearray(BLOCK_BYTES)))]) == [True]
    finally:
        store.close()


@pytest.mark.parametrize("via", ["auto", "tcp"])
def test_a_client_with_the_secret_reads_and_writes(locked_node: StoreNode, files: dict[bytes, Path], via: str) -> None:
    opened(locked_node, f"via={via}&secret_file={files[SECRET]}")


def test_a_client_without_the_secret_is_refused_with_the_remedy(
    locked_node: StoreNode, files: dict[bytes, Path]
) -> None:
    with pytest.raises(StoreError, match="asks for a secret: add secret_file"):
        opened(locked_node, "via=tcp")
    with pytest.raises(StoreError, match="has another secret"):
        opened(locked_node, f"via=tcp&secret_file={files[OTHER]}")
    opened(locked_node, f"secret_file={files[SECRET]}")


@pytest.mark.parametrize("secret", [SECRET, b""])
def test_an_eavesdropper_sees_blocks_only_without_a_secret(files: dict[bytes, Path], secret: bytes) -> None:
    node = StoreNode(host="127.0.0.1", port=0, capacity_bytes=1 << 20, secret=secret)
    seen: list[bytes] = []
    options = f"via=tcp&secret_file={files[SECRET]}" if secret else "via=tcp"
    into = memoryview(bytearray(len(KV)))
    try:
        with Proxy(node.address, tap=seen.append) as proxy:
            store = open_store(f"pool://{proxy.address}?{options}", layout_fingerprint="f", block_bytes=len(KV))
            try:
                assert store.put([(NAME, memoryview(bytearray(KV)))]) == [True]
                assert shows_kv(seen) is not bool(secret)
                seen.clear()
                assert store.get([(NAME, into)]) == [True]
            finally:
                store.close()
    finally:
        node.close()
    assert into == KV
    assert shows_kv(seen) is not bool(secret)
    assert any(NAME in data for data in seen) is not bool(secret)


def test_a_silent_client_is_disconnected_soon(monkeypatch: pytest.MonkeyPatch, locked_node: StoreNode) -> None:
    """Before it is admitted. The 256 connections of a node must not be held without the secret."""
    monkeypatch.setattr("baton.move.store.node.FIRST_REQUEST_S", 0.1)
    host, _, port = locked_node.address.rpartition(":")
    with socket.create_connection((host, int(port)), 60) as silent:
        assert silent.recv(1) == b""


def is_cut(address: str, bytes_max: int) -> bool:
    """Return whether a client is disconnected that sends fewer than `bytes_max` bytes, one after the other."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 60) as slow, suppress(ConnectionError):
        slow.settimeout(0.05)
        for _ in range(bytes_max - 1):
            slow.sendall(b"x")
            with suppress(TimeoutError):
                return slow.recv(1) == b""
        return False
    return True


def test_a_client_that_sends_byte_after_byte_is_disconnected_soon(
    monkeypatch: pytest.MonkeyPatch, locked_node: StoreNode
) -> None:
    """A limit of each call would never end it."""
    monkeypatch.setattr("baton.move.store.node.FIRST_REQUEST_S", 0.2)
    monkeypatch.setattr("baton.move.transport.tcp_source.FIRST_REQUEST_S", 0.2)
    assert is_cut(locked_node.address, node_wire.HELLO.size)
    source = TcpTransport("127.0.0.1:0", protection=Protection(SECRET))
    assert is_cut(source.address, REQUEST_BYTES)
    source.close()


def test_a_client_of_nixl_that_sends_byte_after_byte_is_disconnected_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nixl_cu12", reason="NIXL is not installed: pip install -e '.[nixl]'")
    monkeypatch.setattr("baton.move.transport.nixl.FIRST_REQUEST_S", 0.2)
    source = NixlTransport("127.0.0.1:0")
    assert is_cut(source.address, REQUEST_BYTES)
    source.close()


def test_a_client_with_a_secret_uses_no_node_without_one(node: StoreNode, files: dict[bytes, Path]) -> None:
    """Another process that listens at the node's port could otherwise read the blocks."""
    with pytest.raises(StoreError, match="asks for no secret"):
        opened(node, f"secret_file={files[SECRET]}")


def test_a_pool_node_of_a_network_needs_a_secret(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pool", "--bytes", "1e6", "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "it has no secret: give it --secret-file" in capsys.readouterr().err


def test_a_short_secret_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.touch(0o600)
    path.write_text("password\n")
    with pytest.raises(ConfigError, match="it has 8 characters, but must have 32 or more"):
        read_shared_secret(path)


# ---- movers


def pulled(theirs: Protection, ours: Protection, seen: list[bytes]) -> bytes:
    """Pull `KV` through an eavesdropper from a source with another protection or the same. Raises TransferError."""
    source = TcpTransport("127.0.0.1:0", protection=theirs)
    limits = TcpLimits(breaks_max=1, pause_s=0.01, stall_s=2.0)
    target = TcpTransport("127.0.0.1:0", limits=limits, protection=ours)
    try:
        memory, into = memoryview(bytearray(KV)), memoryview(bytearray(len(KV)))
        ticket = source.offer([Extent(0, len(KV), source.register(memory))], lease_s=30)
        with Proxy(ticket.address, tap=seen.append) as proxy:
            through = structs.replace(ticket, address=proxy.address)
            target.pull(through, [Extent(0, len(KV), target.register(into))]).wait(20)
        assert any(ticket.secret in data for data in seen) is shows_kv(seen)
        return bytes(into)
    finally:
        target.close()
        source.close()


@pytest.mark.parametrize("encrypt", [True, False])
def test_an_eavesdropper_sees_kv_only_if_encryption_is_turned_off(encrypt: bool) -> None:
    seen: list[bytes] = []
    ours, theirs = (Protection(SECRET, encrypt=encrypt) for _ in range(2))
    assert pulled(theirs, ours, seen) == KV
    assert shows_kv(seen) is not encrypt


@pytest.mark.parametrize(
    ("theirs", "ours", "why"),
    [
        (Protection(SECRET), Protection(OTHER), "another secret"),
        (Protection(SECRET), Protection(SECRET, encrypt=False), "hosts.encrypt_kv"),
        (Protection(SECRET), Protection(), "hosts.encrypt_kv"),
        (Protection(SECRET, encrypt=False), Protection(SECRET), "hosts.encrypt_kv"),
        (Protection(SECRET, encrypt=False), Protection(OTHER, encrypt=False), "another secret"),
        (Protection(SECRET, encrypt=False), Protection(), "hosts.encrypt_kv"),
        (Protection(), Protection(SECRET), "hosts.encrypt_kv"),
    ],
)
def test_a_mover_with_another_secret_or_protection_gets_no_byte(theirs: Protection, ours: Protection, why: str) -> None:
    """Even with a valid ticket. The error names the setting."""
    seen: list[bytes] = []
    with pytest.raises(TransferError, match=why):
        pulled(theirs, ours, seen)
    assert not shows_kv(seen)


def test_a_listener_without_the_secret_cannot_pose_as_a_source() -> None:
    """A certificate of the other authority, as an attacker between two hosts has one."""
    listening, client = socket.socketpair()
    refusals: list[Exception] = []

    def pose() -> None:
        with listening:
            outcome(lambda: ClusterTls(OTHER).accept(listening).close(), refusals)

    thread = threading.Thread(target=pose)
    thread.start()
    with client, pytest.raises(WrongSecretError, match="another secret"):
        ClusterTls(SECRET).connect(client)
    thread.join()
    assert len(refusals) == 1


def test_a_client_without_a_certificate_is_refused() -> None:
    """TLS alone is no proof: a source accepts certificates of the cluster only."""
    listening, client = socket.socketpair()
    refusals: list[Exception] = []

    def accept() -> None:
        with listening:
            outcome(lambda: ClusterTls(SECRET).accept(listening).close(), refusals)

    thread = threading.Thread(target=accept)
    thread.start()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(client) as stranger, suppress(OSError):
        stranger.recv(1)
    thread.join()
    assert "PEER_DID_NOT_RETURN_A_CERTIFICATE" in str(refusals[0])
