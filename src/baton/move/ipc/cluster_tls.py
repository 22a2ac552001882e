"""TLS between processes that know one secret: each end has a certificate that only the secret's owner can sign."""

from __future__ import annotations

import hashlib
import os
import socket
import ssl
from datetime import UTC, datetime

from baton.core.errors import ConfigError
from baton.move.ipc.challenge import WrongSecretError
from baton.move.ipc.tls_socket import TlsSocket

_VALID_FROM, _VALID_UNTIL = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)
"""Certificates live as long as the process. Their dates must hold on machines whose clocks are wrong."""


class ClusterTls:
    """Opens TLS 1.3 on connections between processes that know one secret.

    The private key of a certificate authority is derived from the secret. Each process signs a certificate for a key of
    its own, and accepts peers with a certificate of this authority only. The keys of a connection are ephemeral:
    recorded bytes remain unreadable if the secret becomes known later.
    """

    def __init__(self, secret: bytes) -> None:
        """Raises ConfigError if the package `cryptography` is missing."""
        authority, identity = _certificates(secret)
        self._server = _context(authority, identity, is_server=True)
        self._server.num_tickets = 0  # sessions are never resumed
        self._client = _context(authority, identity, is_server=False)

    def accept(self, connection: socket.socket) -> TlsSocket:
        """Return the encrypted connection to a client. The caller closes it and `connection`, of which it is a copy.

        Raises WrongSecretError, or another OSError if the connection breaks.
        """
        return _opened(TlsSocket(connection.dup(), self._server, server_side=True))

    def connect(self, connection: socket.socket) -> TlsSocket:
        """Return the encrypted connection to a server. It replaces `connection`, also if this raises.

        Raises WrongSecretError, or another OSError if the connection breaks.
        """
        return _opened(TlsSocket(connection, self._client, server_side=False))


def _opened(encrypted: TlsSocket) -> TlsSocket:
    try:
        encrypted.handshake()
    except ssl.SSLCertVerificationError as error:
        encrypted.close()
        raise WrongSecretError("the other end of the connection has another secret") from error
    except OSError:
        encrypted.close()
        raise
    return encrypted


def _context(authority: str, identity: bytes, *, is_server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the secret identifies the peer; hosts may have any address
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authority)
    with os.fdopen(os.memfd_create("baton-tls"), "wb") as file:  # Python reads private keys from files only
        file.write(identity)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context


def _certificates(secret: bytes) -> tuple[str, bytes]:
    """Return two PEM texts: the authority's certificate; a certificate signed by the authority, and its private key.

    The authority's key follows from `secret`, so all processes with the same secret trust the same authority.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
    except ImportError as error:
        raise ConfigError(f"TLS between hosts lacks a package: pip install cryptography ({error})") from None
    digest = hashlib.blake2b(secret, digest_size=32, person=b"baton-tls").digest()
    authority_key, own_key = Ed25519PrivateKey.from_private_bytes(digest), Ed25519PrivateKey.generate()
    authority_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "baton cluster")])
    own_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "baton")])

    def builder(name: x509.Name, key: Ed25519PublicKey, *, is_authority: bool) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder(authority_name, name, key, x509.random_serial_number(), _VALID_FROM, _VALID_UNTIL)
            .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        )

    usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    root = builder(authority_name, authority_key.public_key(), is_authority=True).sign(authority_key, None)
    leaf = builder(own_name, own_key.public_key(), is_authority=False).add_extension(usages, critical=False)
    signed = leaf.add_extension(issuer, critical=False).sign(authority_key, None)
    own_pem = own_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return root.public_bytes(Encoding.PEM).decode(), signed.public_bytes(Encoding.PEM) + own_pem
