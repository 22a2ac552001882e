"""The sources that a transport has met, each asked over a connection of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from baton.core.errors import TransferError
from baton.move.transport.asker import Asker
from baton.move.transport.pulling import CLOSED


class AskedPeer(Protocol):
    """A source that answers questions about its offers."""

    asker: Asker

    def close(self) -> None: ...


Met = TypeVar("Met", bound=AskedPeer)


class Peers(Generic[Met]):
    """One peer per address. Those whose process has ended are let go when a new one is met."""

    def __init__(self, meet: Callable[[str], Met]) -> None:
        """`meet` makes a peer of an address, or raises TransferError."""
        self._meet = meet
        self._lock = threading.Lock()
        self._met: dict[str, Met] = {}
        self._closed = False

    def at(self, address: str) -> Met:
        """Find the source there. Raises TransferError where it cannot be one, or after `hang_up`."""
        with self._lock:
            if self._closed:
                raise TransferError(CLOSED)
            if address not in self._met:
                peer = self._meet(address)
                self._met = {name: known for name, known in self._met.items() if not known.asker.close_if_gone()}
                self._met[address] = peer
            return self._met[address]

    def hang_up(self) -> None:
        """Ask nothing more, and wake up whoever waits for an answer."""
        with self._lock:
            self._closed = True
        for peer in self._met.values():
            peer.asker.hang_up()

    def close(self) -> None:
        """Let go of connections and of what was learnt over them. Nobody asks any more."""
        for peer in self._met.values():
            peer.close()
