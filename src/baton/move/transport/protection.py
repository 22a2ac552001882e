"""Protection of the connections over which hosts pull KV: TLS, or only a proof that both know one secret."""

from __future__ import annotations

import socket

from baton.move.ipc.challenge import WrongSecretError, admit, prove
from baton.move.ipc.cluster_tls import ClusterTls
from baton.move.transport.offers import REFUSALS, OfferStatus
from baton.move.transport.wire import (
    BrokenStreamError,
    SourceRequest,
    Verb,
    answer_head,
    receive_answer,
    receive_request,
)


class Protection:
    """Protects the connections of one transport, as source and as consumer.

    A consumer first names the protection that it expects. A source with another one says so and hangs up, so neither
    end sends KV that is protected less than it was told to.
    """

    def __init__(self, secret: bytes = b"", *, encrypt: bool = True) -> None:
        """`secret`: that of the cluster. Empty: connections are not protected. `encrypt=False`: they have no TLS."""
        self._secret = secret
        self._tls = ClusterTls(secret) if secret and encrypt else None
        self._verb = Verb.PROVE if self._tls is None else Verb.ENCRYPT

    def accept(self, connection: socket.socket) -> socket.socket:
        """Return a connection to a consumer that knows the secret. The caller closes it, and `connection`.

        Raises OSError for another consumer, or if the connection breaks.
        """
        if not self._secret:
            return connection
        request = receive_request(connection)
        is_expected = request is not None and request.verb is self._verb
        connection.sendall(answer_head(OfferStatus.VALID if is_expected else OfferStatus.OTHER_PROTECTION, 0, 0))
        if not is_expected:
            raise WrongSecretError(REFUSALS[OfferStatus.OTHER_PROTECTION])
        if self._tls is not None:
            return self._tls.accept(connection)
        admit(connection, self._secret)
        return connection

    def connect(self, connection: socket.socket) -> socket.socket:
        """Return a connection to a source that knows the secret. It replaces `connection`, also if this raises.

        Raises WrongSecretError if the source has another secret or protection, OSError if the connection breaks.
        """
        if not self._secret:
            return connection
        try:
            connection.sendall(SourceRequest(self._verb, 0, 0, b"", 0, 0, 0).packed())
            status, _, _ = receive_answer(connection)
            if status is OfferStatus.BUSY:
                raise BrokenStreamError(REFUSALS[status])
            if status is not OfferStatus.VALID:
                raise WrongSecretError(REFUSALS[OfferStatus.OTHER_PROTECTION])
            if self._tls is not None:
                return self._tls.connect(connection)
            prove(connection, self._secret)
        except OSError:
            connection.close()
            raise
        return connection
