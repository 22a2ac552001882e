"""The first message to a child process, with its descriptors."""

from __future__ import annotations

import os
import socket

import pytest

from baton.core.errors import WorkerError
from baton.move.ipc.child import ParentSocket
from baton.move.ipc.frames import ControlWriter


def received(descriptors: int) -> int:
    """Send the first message with this many descriptors. Return how many of them arrive."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(ours, [ControlWriter().frame(b"setup")], [ours.fileno()] * descriptors)
        payload, arrived = ParentSocket(theirs).receive_first()
    assert payload == b"setup"
    for descriptor in arrived:
        os.close(descriptor)
    return len(arrived)


def test_a_worker_with_a_spill_space_gets_the_file_of_its_weights() -> None:
    """Without this file, every worker would pack a copy of the weights."""
    assert received(3) == 3


def test_a_descriptor_that_the_kernel_drops_is_an_error() -> None:
    with pytest.raises(WorkerError, match="attached more than 3 descriptors"):
        received(4)
