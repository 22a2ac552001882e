"""Secrets between machines: a listening end and its client prove to each other that they know one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.cli.main import main
from baton.core.errors import ConfigError, StoreError, TransferError
from baton.core.keys import read_shared_secret
from baton.move.ipc.challenge import WrongSecretError, admit, prove
from baton.move.store.node import StoreNode
from baton.move.store.store_url import open_store
from baton.move.transport.port import Extent
from baton.move.transport.tcp import TcpTransport
from baton.move.transport.tcp_peer import TcpLimits

SECRET, OTHER = b"s" * 32, b"o" * 32
BLOCK_BYTES = 1024
NAME = bytes(range(16))


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


def pulled(secret: bytes) -> bytes:
    """Pull bytes from a source with `SECRET`. Raises TransferError."""
    source = TcpTransport("127.0.0.1:0", secret=SECRET)
    target = TcpTransport("127.0.0.1:0", limits=TcpLimits(breaks_max=1, pause_s=0.01, stall_s=2.0), secret=secret)
    try:
        memory, into = memoryview(bytearray(b"k" * 64)), memoryview(bytearray(64))
        ticket = source.offer([Extent(0, 64, source.register(memory))], lease_s=30)
        target.pull(ticket, [Extent(0, 64, target.register(into))]).wait(20)
        return bytes(into)
    finally:
        target.close()
        source.close()


def test_movers_of_one_cluster_exchange_kv() -> None:
    assert pulled(SECRET) == b"k" * 64


@pytest.mark.parametrize("secret", [OTHER, b""])
def test_a_mover_without_the_clusters_secret_gets_no_byte(secret: bytes) -> None:
    """Even with a valid ticket."""
    with pytest.raises(TransferError):
        pulled(secret)
