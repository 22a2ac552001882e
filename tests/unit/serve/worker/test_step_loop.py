"""The worker's loop over a real socket pair: a request that the engine cannot compute fails alone."""

from __future__ import annotations

import socket
import threading

import msgspec
import pytest

from baton.compute.hash_engine import HashEngine, hash_card
from baton.core.config import BatchLimits
from baton.core.errors import DeviceError, StepMemoryError
from baton.core.messages import (
    BlocksGranted,
    BlocksWanted,
    RequestFailed,
    RequestFinished,
    Shutdown,
    StartRequest,
    StepReport,
)
from baton.core.step import Step, StepResult
from baton.core.types import BlockId, HostId, Request, RequestId, Sampling, WorkerId, WorkerView, pack_tokens
from baton.decide.control.batcher import Batcher
from baton.decide.cost.linear import LinearCost
from baton.decide.policy.batching import BatcherPolicies, MixedChunked
from baton.decide.policy.fairness import FirstComeFirstServed
from baton.move.ipc.frames import ControlReader, ControlWriter
from baton.serve.messages.setup import FromWorkerMessage, Ping, ToWorkerMessage
from baton.serve.worker.link import ServerLink
from baton.serve.worker.loop import StepLoop

POISON = 258
"""The engine says printable characters only, and this is none: it stands in prompts alone."""
LARGE = 259
"""The engine has no memory for a step with this token."""
LETHAL = 260
"""A kernel that reads this token ends the device's context."""
BLOCK_TOKENS = 16


class Fragile(HashEngine):
    """The hash engine with a bug (it cannot read one token), too little memory for another, and a device that fails."""

    is_lost = False

    def execute(self, step: Step) -> StepResult:
        tokens = {token for part in step.slices for token in part.tokens}
        self.is_lost = self.is_lost or LETHAL in tokens
        if self.is_lost:
            raise DeviceError("cuda:0 can no longer compute in this process: device-side assert triggered")
        if LARGE in tokens:
            raise StepMemoryError("a step of 2 tokens does not fit")
        if POISON in tokens:
            raise ZeroDivisionError("a bug of the engine")
        return super().execute(step)


class Server:
    """The other end of the worker's socket: grants what is wanted, keeps what is said."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader, self._writer = ControlReader(), ControlWriter()
        self._free = iter(range(64))
        self.reports: list[StepReport] = []
        self.is_repeating = False
        """Every message is sent twice."""
        self.grants_together = 1
        """Requests that must have asked for blocks before any of them gets some: their prompts then share a step."""
        self._grants: list[bytes] = []

    def send(self, message: ToWorkerMessage) -> None:
        self._sock.sendall(self._framed(message))

    def _framed(self, message: ToWorkerMessage) -> bytes:
        return self._writer.frame(msgspec.msgpack.encode(message)) * (2 if self.is_repeating else 1)

    def grant(self, wanted: BlocksWanted) -> None:
        table = tuple(BlockId(next(self._free)) for _ in range(wanted.blocks))
        self._grants.append(self._framed(BlocksGranted(wanted.request_id, wanted.attempt, table, 0)))
        if len(self._grants) >= self.grants_together:
            self._sock.sendall(b"".join(self._grants))
            self._grants.clear()

    def lose(self, message: ToWorkerMessage) -> None:
        """Number a message like a sent one, and do not send it."""
        self._writer.frame(msgspec.msgpack.encode(message))

    def start(self, name: str, tokens: list[int]) -> None:
        sampling = Sampling(temperature=0.0)
        request = Request(
            id=RequestId(name), prompt_tokens=len(tokens), output_tokens_max=5, arrived_at_s=0.0, sampling=sampling
        )
        self.send(StartRequest(request, 1, pack_tokens(tokens), "end"))

    def serve_until(self, ended: int) -> None:
        """Answer until so many requests have ended, or the worker hangs up."""
        while sum(isinstance(event, RequestFailed | RequestFinished) for event in self.events()) < ended:
            data = self._sock.recv(65536)
            if not data:
                return
            for payload in self._reader.feed(data):
                report = msgspec.msgpack.decode(payload, type=FromWorkerMessage)
                assert isinstance(report, StepReport)
                self.reports.append(report)
                for event in report.events:
                    if isinstance(event, BlocksWanted):
                        self.grant(event)

    def events(self) -> list[object]:
        return [event for report in self.reports for event in report.events]

    def tokens(self, name: str) -> int:
        return sum(token.request_id == name for report in self.reports for token in report.tokens)


def _loop(sock: socket.socket) -> StepLoop:
    layout = hash_card().layout(block_tokens=BLOCK_TOKENS, dtype="uint8")
    engine = Fragile(layout, memoryview(bytearray(layout.block_bytes * 64)))
    view = WorkerView(id=WorkerId("w"), host=HostId("h"), role="mixed")
    batcher = Batcher(
        view,
        block_tokens=BLOCK_TOKENS,
        limits=BatchLimits(),
        policies=BatcherPolicies(batching=MixedChunked(), fairness=FirstComeFirstServed(), cost=LinearCost()),
    )
    return StepLoop(ServerLink(sock), batcher, engine)


def test_a_request_that_the_engine_cannot_compute_fails_alone() -> None:
    """Its batch is computed again without it, and the worker continues."""
    ours, theirs = socket.socketpair()
    server = Server(ours)
    for name, tokens in (("good", [70, 71, 72]), ("bad", [70, POISON]), ("fine", [80] * 20)):
        server.start(name, tokens)
    thread = threading.Thread(target=_loop(theirs).run)
    thread.start()
    server.serve_until(ended=3)
    server.start("later", [90, 91])
    server.serve_until(ended=4)
    server.send(Shutdown())
    thread.join()
    (failed,) = [event for event in server.events() if isinstance(event, RequestFailed)]
    assert failed.request_id == "bad"
    assert "ZeroDivisionError" in failed.reason
    assert [server.tokens(name) for name in ("good", "fine", "later")] == [5, 5, 5]
    ours.close()
    theirs.close()


def test_a_worker_on_which_everything_fails_dies() -> None:
    """If two requests fail in one step, the worker is broken, and other workers take its requests."""
    ours, theirs = socket.socketpair()
    server = Server(ours)
    server.start("one", [POISON])
    server.start("two", [POISON, 70])
    loop = _loop(theirs)
    granting = threading.Thread(target=server.serve_until, args=(2,))
    granting.start()
    with pytest.raises(ZeroDivisionError):
        loop.run()
    theirs.close()
    granting.join()
    ours.close()


def test_requests_without_memory_fail_and_the_worker_continues() -> None:
    """Several in one step: that says nothing about the worker. The others of their batch are computed."""
    ours, theirs = socket.socketpair()
    server = Server(ours)
    for name, tokens in (("large", [70, LARGE]), ("good", [70, 71, 72]), ("larger", [LARGE, 70, 71])):
        server.start(name, tokens)
    thread = threading.Thread(target=_loop(theirs).run)
    thread.start()
    server.serve_until(ended=3)
    server.start("later", [90, 91])
    server.serve_until(ended=4)
    server.send(Shutdown())
    thread.join()
    failed = {event.request_id: event.reason for event in server.events() if isinstance(event, RequestFailed)}
    assert failed == dict.fromkeys(("large", "larger"), "a step of 2 tokens does not fit")
    assert [server.tokens(name) for name in ("good", "later")] == [5, 5]
    ours.close()
    theirs.close()


@pytest.mark.parametrize("prompts", [[[70, LETHAL]], [[70, 71], [POISON], [LETHAL]]], ids=["alone", "in_a_batch"])
def test_a_worker_ends_at_the_first_error_of_its_device(prompts: list[list[int]]) -> None:
    """No request of that step fails: another worker can compute each of them."""
    ours, theirs = socket.socketpair()
    server = Server(ours)
    server.grants_together = len(prompts)
    for index, prompt in enumerate(prompts):
        server.start(f"request-{index}", prompt)
    loop = _loop(theirs)
    granting = threading.Thread(target=server.serve_until, args=(len(prompts),))
    granting.start()
    with pytest.raises(DeviceError, match="device-side assert"):
        loop.run()
    theirs.close()
    granting.join()
    assert not [event for event in server.events() if isinstance(event, RequestFailed)]
    ours.close()


def test_a_repeated_command_is_carried_out_once_and_a_lost_one_ends_the_worker() -> None:
    """Its host starts another worker, and the server continues the requests there."""
    ours, theirs = socket.socketpair()
    server = Server(ours)
    server.is_repeating = True
    server.start("one", [70, 71, 72])
    loop = _loop(theirs)
    thread = threading.Thread(target=loop.run)
    thread.start()
    server.serve_until(ended=1)
    assert server.tokens("one") == 5
    server.lose(Ping())
    server.start("two", [70, 71])
    thread.join()
    assert loop.link.closed
    theirs.close()
    server.serve_until(ended=2)
    assert server.tokens("two") == 0
    ours.close()
