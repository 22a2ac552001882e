"""Certificates and keys that cannot be used are refused before the server starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from baton.cli.main import build_parser
from baton.cli.serve import configuration
from baton.core.errors import ConfigError
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


@pytest.mark.parametrize("flag", ["--keys", "--admin-key", "--tls-cert", "--tls-key"])
def test_an_empty_value_is_refused(flag: str) -> None:
    """As in `--admin-key "$UNSET"`, which would give every client the scope admin."""
    with pytest.raises(ConfigError, match=f"{flag}: the value is empty"):
        configured(flag, "")


def test_an_empty_key_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_ADMIN_KEY", " ")
    with pytest.raises(ConfigError, match="BATON_ADMIN_KEY: the value is empty"):
        configured()
