"""TLS between processes: a server's certificate, which can be replaced while it serves, and its clients."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from baton.core.errors import ConfigError


@dataclass(slots=True)
class ServerTls:
    """The certificate of a server, and the context that its listening sockets share."""

    cert: Path
    """PEM file with the certificate, and those of the authorities between it and the root."""
    key: Path
    context: ssl.SSLContext = field(init=False)
    _current: ssl.SSLContext = field(init=False)
    """Context of new connections. It replaces `context` at the start of each handshake."""

    def __post_init__(self) -> None:
        self.context = self._current = self._loaded()
        self.context.sni_callback = self._use_current

    def reload(self) -> None:
        """Read the files again, for new connections. Raises ConfigError for invalid ones: nothing changes then."""
        self._current = self._loaded()

    def _use_current(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._current

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert, self.key, self._refuse_passphrase)
        except OSError as error:  # includes SSLError, for files that are no certificate
            raise ConfigError(
                f"--tls-cert {self.cert} and --tls-key {self.key} cannot be used: {error.strerror or error}; "
                "give a certificate chain and its private key as PEM files"
            ) from error
        return context

    def _refuse_passphrase(self) -> str:
        """Raise ConfigError for an encrypted key: OpenSSL would ask the terminal for its passphrase, and wait."""
        raise ConfigError(
            f"--tls-key {self.key} is encrypted; give a file of mode 0600 without a passphrase: "
            f"openssl pkey -in {self.key} -out FILE"
        )


def client_context() -> ssl.SSLContext:
    """Return the context of a client: it trusts the system's authorities, or those in the file SSL_CERT_FILE."""
    return ssl.create_default_context()
