"""Certificates that cannot be used are refused before the server starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.cli.main import build_parser
from baton.cli.serve import configuration
from baton.core.errors import ConfigError


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
