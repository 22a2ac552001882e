"""HTTPS: clients and hosts check the certificate, which is replaced while the server runs."""

from __future__ import annotations

import datetime
import ipaddress
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from baton.move.clock import utc_date
from tests.hosting import joining
from tests.serving import RunningServer, listening


def write_certificate(cert: Path, key: Path) -> int:
    """Write a self-signed certificate for loopback and its key. Return its serial number."""
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "baton")])
    now = utc_date()
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(private, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    cert.write_bytes(made.public_bytes(pem))
    key.write_bytes(private.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    key.chmod(0o600)
    return made.serial_number


@dataclass
class Secured:
    """A server with HTTPS that waits for a host."""

    server: RunningServer
    cert: Path
    key: Path

    def serial(self) -> int:
        """Return the serial number of the certificate that a new connection gets."""
        port = int(self.server.url.rpartition(":")[2])
        pem = ssl.get_server_certificate(("127.0.0.1", port))
        return x509.load_pem_x509_certificate(pem.encode()).serial_number


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    write_certificate(cert, key)
    flags = ("--tls-cert", str(cert), "--tls-key", str(key), "--hosts", "1", "--api-key", "k")
    with listening("hash", *flags) as server:
        yield Secured(server, cert, key)


def _host(url: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "baton.cli.main", "host", "--join", url, "--name", "b", "--join-wait-s", "0"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | environment)


def test_a_host_joins_over_tls_if_it_trusts_the_certificate(secured: Secured, monkeypatch: pytest.MonkeyPatch) -> None:
    assert secured.server.url.startswith("https://")
    refused = _host(secured.server.url, {"BATON_JOIN_KEY": "k"})
    assert refused.returncode == 2
    assert "SSL_CERT_FILE" in refused.stderr
    monkeypatch.setenv("SSL_CERT_FILE", str(secured.cert))
    monkeypatch.setenv("BATON_JOIN_KEY", "k")
    with joining(secured.server.url, "a", "--mixed", "1"):
        secured.server.wait_ready()
        top = [sys.executable, "-m", "baton.cli.main", "top", "--once", "--url", secured.server.url]
        shown = subprocess.run(top, capture_output=True, text=True, timeout=60, env=os.environ | {"BATON_API_KEY": "k"})
        assert "a.mixed-0" in shown.stdout, shown.stderr


def test_sighup_replaces_the_certificate_and_keeps_it_if_the_new_one_is_broken(secured: Secured) -> None:
    first = secured.serial()
    second = write_certificate(secured.cert, secured.key)
    assert secured.serial() == first
    _reload(secured, "was read again")
    assert secured.serial() == second
    secured.cert.write_text("no certificate")
    _reload(secured, "did not change")
    assert secured.serial() == second


def _reload(secured: Secured, words: str) -> None:
    """Send SIGHUP, and wait until the server has said these words about it."""
    said = secured.server.output().count(words)
    secured.server.process.send_signal(signal.SIGHUP)
    for _ in range(10_000):  # each waits for the server
        secured.serial()
        if secured.server.output().count(words) > said:
            return
    raise AssertionError(f"the server did not say that the certificate {words}:\n{secured.server.output()}")
