"""A host sends nothing before its hello, and keeps no arena that is of no use."""

from __future__ import annotations

import asyncio
import os

import pytest

from baton.compute.models.resolve import resolve_model
from baton.core.config import Config
from baton.core.types import HostId
from baton.move.arena.memfd import create_arena
from baton.move.ipc.stream import FramedStream
from baton.serve.host.build import HostArena, choose_computing
from baton.serve.host.membership import KeptArena, Membership
from baton.serve.messages.hosting import FromAgentMessage, HostLeaves, MoverDown
from baton.serve.messages.moving import MoverReady


def test_a_mover_that_dies_at_its_first_start_is_not_told_of() -> None:
    """A server closes a connection that begins with another message, and the next mover may start."""
    config, card, name = Config(model="hash"), resolve_model("hash"), HostId("a")

    async def run() -> list[FromAgentMessage]:
        loop, heard, over = asyncio.get_running_loop(), list[FromAgentMessage](), asyncio.Event()
        theirs = FramedStream[FromAgentMessage](
            FromAgentMessage, on_message=heard.append, on_end=lambda _why: over.set()
        )
        server = await loop.create_server(lambda: theirs, "127.0.0.1", 0)
        ours = Membership(config, card, choose_computing(config, card), lambda _line: None)
        await loop.create_connection(lambda: ours._stream, *server.sockets[0].getsockname()[:2])
        ours.mover_lost(name, 1, "its port was taken")
        ours.mover_ready(name, 2, MoverReady(pid=1, machine="m", transports=("tcp",), address="a:1"))
        ours.mover_lost(name, 2, "killed")
        ours.leave("the test is over")
        await over.wait()
        server.close()
        return heard

    heard = asyncio.run(asyncio.wait_for(run(), 30))
    assert heard == [MoverDown(2, "killed"), HostLeaves("the test is over")]


def test_a_kept_arena_is_freed_if_the_server_has_another_model_now() -> None:
    config, card, arena = Config(model="hash"), resolve_model("hash"), create_arena(4096)
    kept = KeptArena("of another model", HostArena("0" * 32, arena, 1))

    async def run() -> Membership:
        return Membership(config, card, choose_computing(config, card), lambda _line: None, kept)

    assert asyncio.run(run()).kept is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(arena.fd)
