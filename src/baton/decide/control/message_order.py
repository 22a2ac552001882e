"""The order of a connection's control messages: repeated ones are dropped, and a missing one ends the connection.

A socket loses no message within a connection, but a fault of a proxy or of Baton itself could. Without a number, the
request that the message concerns would hang. With it, the loss is noticed at the next message, at the latest at the
next ping, and counts as the loss of the worker or host, whose requests continue elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass


class MessageLostError(ValueError):
    """A message of a connection is missing. No later message of the connection may be handled."""


@dataclass(slots=True)
class MessageOrder:
    """Counts the messages in one direction of a connection. The first message has number 0."""

    expected: int = 0
    repeated: int = 0
    """Messages that were dropped because they had arrived before."""

    def accept(self, number: int) -> bool:
        """Return whether to handle the message of this number. False: it is a repetition.

        Raises MessageLostError if an earlier message has not arrived.
        """
        if number > self.expected:
            raise MessageLostError(
                f"control message {self.expected} was lost: message {number} arrived in its place; "
                "if this repeats, use the same version of Baton on every host"
            )
        if number < self.expected:
            self.repeated += 1
            return False
        self.expected += 1
        return True
