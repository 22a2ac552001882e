"""Where the ranks of a worker find each other: open to processes of this host alone."""

from __future__ import annotations

import socket

import pytest

from baton.compute.ranks.process_groups import host_rendezvous, join_rendezvous


def test_ranks_meet_on_loopback_only() -> None:
    """A store's own socket listens at every address: whoever reached the port could tell ranks where others are."""
    meeting = host_rendezvous()
    join_rendezvous(meeting.port).set("rank", "1")
    assert meeting.get("rank") == b"1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", meeting.port), timeout=10)
