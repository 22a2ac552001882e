"""Certificates and keys that cannot be used are refused before the server starts."""

from __future__ import annotations

import contextlib
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from baton.cli.main import build_parser
from baton.cli.serve import configuration
from baton.core.errors import ConfigError
from baton.move.ipc.tls import ServerTls
from tests.process.test_tls import write_certificate


def configured(*flags: str) -> None:
    configuration(build_parser(["serve"]).parse_args(["serve", *flags]))


def test_half_of_a_pair_is_refused() -> None:
    with pytest.raises(ConfigError, match="TLS needs both"):
        configured("--tls-cert", "cert.pem")


def test_files_that_are_missing_or_no_certificate_are_named(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    with pytest.raises(ConfigError, match=r"--tls-cert .*cert\.pem .* cannot be used: No such file"):
        configured("--tls-cert", str(cert), "--tls-key", str(key))
    for path in (cert, key):
        path.write_text("nothing")
    with pytest.raises(ConfigError, match="give a certificate chain and its private key"):
        configured("--tls-cert", str(cert), "--tls-key", str(key))


def test_an_encrypted_key_is_refused_and_no_passphrase_asked_for(tmp_path: Path) -> None:
    """The terminal of the server would be asked, at the start and at every SIGHUP."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    write_certificate(cert, key)
    private = serialization.load_pem_private_key(key.read_bytes(), None)
    pem = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    key.write_bytes(private.private_bytes(*pem, serialization.BestAvailableEncryption(b"secret")))
    with pytest.raises(ConfigError, match=r"--tls-key .*key\.pem is encrypted"):
        configured("--tls-cert", str(cert), "--tls-key", str(key))


def served_serial(tls: ServerTls) -> int:
    """Do a handshake in memory. Return the serial number of the server's certificate."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    client = trusting.wrap_bio(to_client, to_server)
    server = tls.context.wrap_bio(to_server, to_client, server_side=True)
    for end in (client, server, client):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    der = client.getpeercert(binary_form=True)
    assert der is not None
    return x509.load_der_x509_certificate(der).serial_number


def test_a_key_that_is_replaced_during_a_reload_leaves_no_half_of_a_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    write_certificate(cert, key)
    tls = ServerTls(cert, key)
    second = write_certificate(cert, key)
    load = ssl.SSLContext.load_cert_chain

    def load_and_replace(context: ssl.SSLContext, *given: object) -> None:
        load(context, *given)
        write_certificate(tmp_path / "other.pem", key)

    with monkeypatch.context() as patched:
        patched.setattr(ssl.SSLContext, "load_cert_chain", load_and_replace)
        tls.reload()
    assert served_serial(tls) == second
    with pytest.raises(ConfigError, match="cannot be used"):
        tls.reload()
    assert served_serial(tls) == second


@pytest.mark.parametrize("flag", ["--keys", "--admin-key", "--tls-cert", "--tls-key"])
def test_an_empty_value_is_refused(flag: str) -> None:
    """As in `--admin-key "$UNSET"`, which would give every client the scope admin."""
    with pytest.raises(ConfigError, match=f"{flag}: the value is empty"):
        configured(flag, "")


def test_an_empty_key_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_ADMIN_KEY", " ")
    with pytest.raises(ConfigError, match="BATON_ADMIN_KEY: the value is empty"):
        configured()
