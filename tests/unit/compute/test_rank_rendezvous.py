"""The rendezvous of the ranks of a worker accepts processes of this host only."""

from __future__ import annotations

import socket

import pytest

from baton.compute.ranks.process_groups import host_rendezvous, join_rendezvous


def test_ranks_meet_on_loopback_only() -> None:
    """The store's own socket would listen at every address, and any client could give ranks wrong addresses."""
    meeting = host_rendezvous()
    join_rendezvous(meeting.port).set("rank", "1")
    assert meeting.get("rank") == b"1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", meeting.port), timeout=10)
