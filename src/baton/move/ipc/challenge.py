"""Mutual proof that both ends of a connection know one secret, before anything else is sent.

Each end answers a random challenge of the other one. The secret itself is never sent, and no answer is valid twice.
The bytes that follow are neither encrypted nor signed; for that, see cluster_tls.py.
"""

from __future__ import annotations

import hmac
import secrets
import socket

from baton.move.ipc.connections import receive_views

SECRET_BYTES = 32
_CHALLENGE_BYTES = _PROOF_BYTES = 32


class WrongSecretError(PermissionError):
    """The other end of a connection does not know the secret."""


def admit(connection: socket.socket, secret: bytes) -> None:
    """Exchange proofs of the secret with a client. Raises WrongSecretError, or OSError if the connection breaks."""
    ours = secrets.token_bytes(_CHALLENGE_BYTES)
    connection.sendall(ours)
    theirs, proof = _receive(connection, _CHALLENGE_BYTES), _receive(connection, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"client", ours + theirs)):
        raise WrongSecretError("a client does not know the secret")
    connection.sendall(_proof(secret, b"server", ours + theirs))


def prove(connection: socket.socket, secret: bytes) -> None:
    """Exchange proofs of the secret with a server. Raises WrongSecretError, or OSError if the connection breaks."""
    theirs = _receive(connection, _CHALLENGE_BYTES)
    ours = secrets.token_bytes(_CHALLENGE_BYTES)
    connection.sendall(ours + _proof(secret, b"client", theirs + ours))
    try:
        proof = _receive(connection, _PROOF_BYTES)
    except ConnectionResetError as error:
        raise ConnectionResetError("it hung up during the proof; perhaps it has another secret") from error
    if not hmac.compare_digest(proof, _proof(secret, b"server", theirs + ours)):
        raise WrongSecretError("the server does not know the secret")


def _proof(secret: bytes, end: bytes, challenges: bytes) -> bytes:
    return hmac.digest(secret, b"baton " + end + challenges, "sha256")


def _receive(connection: socket.socket, size_bytes: int) -> bytes:
    data = bytearray(size_bytes)
    receive_views(connection, [memoryview(data)])
    return bytes(data)
