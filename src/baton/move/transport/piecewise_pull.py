"""State of one pull, shared by all transports: pieces that arrive independently, and one final result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from baton.core.errors import TransferError
from baton.move.transport.extents import Spread
from baton.move.transport.port import Ticket

CLOSED = "the transport was closed during the pull"
BUG = "a bug in Baton, please report it: the log has its traceback"


@dataclass(slots=True, eq=False)
class PullPiece:
    """A range of a pull's bytes. It is moved as a whole, and again if its connection breaks."""

    pull: PiecewisePull
    start: int
    size_bytes: int
    breaks: int = 0
    """Connections that broke during it."""


class PiecewisePull:
    """Implements `Pull`. It ends when every piece has landed, or when one has failed and no thread writes any more.

    The thread that moves a piece calls `begin` before its first write, and `landed` or `left` after its last one.
    """

    def __init__(
        self,
        ticket: Ticket,
        target: Spread,
        *,
        interrupt: Callable[[PiecewisePull], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`interrupt` stops the writers of a failed pull. `check` is called after the last byte has arrived.

        It raises TransferError if the offer was not valid until then.
        """
        self.ticket = ticket
        self.target = target
        self._interrupt = interrupt
        self._check = check
        self._changed = threading.Condition()
        self._left_bytes = target.size_bytes
        self._writers = 0
        self._failure: str | None = None
        self._over = False
        self._calls: list[Callable[[], None]] = []

    def pieces(self, piece_bytes: int) -> Iterator[PullPiece]:
        """Cut the pull into pieces."""
        size_bytes = self.target.size_bytes
        for start in range(0, size_bytes, piece_bytes):
            yield PullPiece(self, start, min(piece_bytes, size_bytes - start))

    @property
    def wanted(self) -> bool:
        """True if the pull has not failed."""
        return self._failure is None

    def begin(self) -> bool:
        """Register a writer. Return False if the pull has failed: then the caller must not write."""
        with self._changed:
            if self._failure is not None:
                return False
            self._writers += 1
            return True

    def landed(self, piece: PullPiece) -> None:
        """Unregister a writer that has moved its piece completely while the offer was valid."""
        with self._changed:
            self._left_bytes -= piece.size_bytes
            last = self._left_bytes == 0 and self._failure is None
        try:
            if last:
                self._finish()
        finally:
            self.left()

    def left(self) -> None:
        """Unregister a writer that has not moved its piece."""
        with self._changed:
            self._writers -= 1
        self._settle()

    def fail(self, message: str) -> None:
        """Fail the pull and return at once; it ends when the writers have left. Only the first reason is reported."""
        with self._changed:
            if self._failure is not None or self._left_bytes == 0:
                return
            self._failure = message
        self._interrupt(self)
        self._settle()

    def cancel(self) -> None:
        self.fail("the pull was cancelled; its target holds parts of what was offered")
        with self._changed:
            self._changed.wait_for(lambda: self._over)

    def wait(self, timeout_s: float | None = None) -> int:
        size_bytes = self.target.size_bytes
        with self._changed:
            if not self._changed.wait_for(lambda: self._over, timeout_s):
                raise TransferError(
                    f"the pull is not over after {timeout_s} s: {size_bytes - self._left_bytes} of {size_bytes} bytes"
                    " have arrived; wait again, or cancel it"
                )
            if self._failure is not None:
                raise TransferError(self._failure)
        return size_bytes

    def then(self, call: Callable[[], None]) -> None:
        with self._changed:
            if not self._over:
                self._calls.append(call)
                return
        call()

    def _finish(self) -> None:
        why: str | None = BUG
        try:
            self._check()
            why = None
        except TransferError as error:
            why = str(error)
        finally:
            with self._changed:
                self._failure = why

    def _settle(self) -> None:
        with self._changed:
            ended = self._failure is not None or self._left_bytes == 0
            if self._over or not ended or self._writers:
                return
            self._over = True
            calls, self._calls = self._calls, []
            self._changed.notify_all()
        for call in calls:
            call()
