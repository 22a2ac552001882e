"""`python -m baton.serve.host.mover FD`: moves KV blocks between this host's arena, other arenas and tiers.

The mover is a separate process for two reasons. Copies must delay neither the server's event loop nor a worker's step.
A mover that hangs can be killed, because it holds no other state. It only carries out orders; the server decides.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import assert_never

import msgspec

from baton.core.errors import ArenaError, ConfigError, TransferError
from baton.core.tier_messages import DropBlocks, LoadBlocks, StoreBlocks
from baton.move.arena.opening import open_arena_on
from baton.move.clock import now_s
from baton.move.ipc.child import ParentSocket, die_with_parent
from baton.move.ipc.shared_memory import machine_id
from baton.move.transport.convert import source_extents
from baton.move.transport.nixl import NixlTransport
from baton.move.transport.port import Memory, Pull, Ticket, Transport
from baton.move.transport.protection import Protection
from baton.move.transport.shm import ShmTransport
from baton.move.transport.staged import StagedMemory
from baton.move.transport.tcp import TcpTransport, with_port
from baton.serve.host.arena_bytes import bytes_of, transferable
from baton.serve.host.pull_target import ARENA, PullTarget, Staging, block_extents, plan_of
from baton.serve.host.tier_opening import UnopenedTier, open_usable_tiers
from baton.serve.host.tier_work import TierWork
from baton.serve.messages.moving import (
    BlocksOffered,
    BlocksWithdrawn,
    CancelPull,
    FromMoverMessage,
    ListTiers,
    MoverFailed,
    MoverOrder,
    MoverPong,
    MoverReady,
    MoverSetup,
    OfferBlocks,
    OfferRefused,
    PullBlocks,
    PullEnded,
    ToMoverMessage,
    WithdrawBlocks,
)
from baton.serve.messages.setup import Ping

log = logging.getLogger("baton.host")

_THREADS = 4
"""Threads for conversions, withdrawals and cancels, which may block. Copies run in threads of the transports."""
_OPEN_TIER_S = 5.0
"""Deadline to open a store, as for a call to one. The host joins without the tier, and uses it once it is open."""


@dataclass(slots=True)
class _Pulling:
    """A pull in progress."""

    pull: Pull
    began_s: float
    target: PullTarget


class Mover:
    """Carries out orders on one arena, and reports the results through the outbox."""

    def __init__(self, setup: MoverSetup, memory: Memory, arena_fd: int, outbox: Outbox) -> None:
        """Raises ConfigError if no configured transport can move this memory."""
        self._outbox = outbox
        self._arena = memory
        self.address = ""
        self._transports = {name: self._build(name, setup) for name in _usable(setup.transports, memory)}
        for transport in self._transports.values():
            transport.register(memory, descriptor=arena_fd if isinstance(memory, memoryview) else None)
        self._staging = Staging(self._register)
        self._tickets: dict[int, Ticket] = {}
        self._pulls: dict[int, _Pulling] = {}
        self._ending = ThreadPoolExecutor(_THREADS)
        self._lock = threading.Lock()
        found = open_usable_tiers(setup.tiers, layout=setup.layout, fingerprint=setup.fingerprint, wait_s=_OPEN_TIER_S)
        for tier in found:
            if isinstance(tier, UnopenedTier):
                log.warning("%s; this host continues without the tier until it can be opened", tier.problem)
        self.rules = tuple(tier.rules for tier in found)
        """Rules of the tiers below the arena."""
        block_bytes = setup.layout.block_bytes
        self._tiers = TierWork(found, bytes_of(memory, block_bytes), block_bytes, outbox.put) if found else None

    def _build(self, name: str, setup: MoverSetup) -> Transport:
        if name == ShmTransport.name:
            return ShmTransport()
        listen = with_port(setup.listen, 0)
        if name == NixlTransport.name:
            made: NixlTransport | TcpTransport = NixlTransport(listen)
        else:
            made = TcpTransport(listen, protection=Protection(setup.secret, encrypt=setup.encrypt))
        assert made.name == name, f"{name} is no transport"
        if setup.advertise:
            made.address = with_port(setup.advertise, int(made.address.rpartition(":")[2]))
        self.address = made.address
        return made

    @property
    def transports(self) -> tuple[str, ...]:
        """Names of the usable transports, the best first."""
        return tuple(self._transports)

    def handle(self, order: MoverOrder) -> None:
        """Begin to carry out an order. Does not wait for copies."""
        match order:
            case OfferBlocks():
                self._offer(order)
            case PullBlocks():
                self._pull(order)
            case WithdrawBlocks(number=number):
                self._submit(partial(self._withdraw, number))
            case CancelPull(number=number):
                pulling = self._pulls.get(number)
                if pulling is not None:
                    self._submit(pulling.pull.cancel)
            case StoreBlocks() | DropBlocks() | LoadBlocks():
                self._tier_work().keep(order)
            case ListTiers():
                self._tier_work().list_held()
            case _:
                assert_never(order)

    def _tier_work(self) -> TierWork:
        assert self._tiers is not None, "an order for tiers came to a host without tiers"
        return self._tiers

    def close(self) -> None:
        """Cancel every transfer, and wait for conversions that have begun."""
        for transport in self._transports.values():
            transport.close()
        self._ending.shutdown()
        if self._tiers is not None:
            self._tiers.close()
        if isinstance(self._arena, StagedMemory):
            self._arena.close()

    def _offer(self, order: OfferBlocks) -> None:
        try:
            spec = order.spec
            plan = plan_of(spec)
            extents = (
                block_extents(spec.read, spec.source, spec.layers) if plan is None else source_extents(plan, ARENA)
            )
            ticket = self._transports[order.transport].offer(extents, lease_s=order.lease_s)
        except TransferError as error:
            self._outbox.put(OfferRefused(order.number, str(error)))
            return
        self._tickets[order.number] = ticket
        self._outbox.put(BlocksOffered(order.number, ticket))

    def _withdraw(self, number: int) -> None:
        ticket = self._tickets.pop(number, None)
        if ticket is not None:
            self._transports[ticket.transport].withdraw(ticket)
        self._outbox.put(BlocksWithdrawn(number))

    def _pull(self, order: PullBlocks) -> None:
        began_s = now_s()
        target = PullTarget(order.spec, self._arena)
        try:
            target.plan()
            with self._lock:
                target.borrow(self._staging)
            pull = self._transports[order.ticket.transport].pull(order.ticket, target.extents())
        except TransferError as error:
            self._give_back(target)
            self._outbox.put(PullEnded(order.number, landed=False, error=str(error)))
            return
        self._pulls[order.number] = _Pulling(pull, began_s, target)
        pull.then(lambda: self._on_pulled(order.number))

    def _on_pulled(self, number: int) -> None:
        """Finish a pull whose bytes have arrived. A conversion runs in the mover's threads, not in the transport's."""
        if self._pulls[number].target.is_direct:
            self._finish(number)
        else:
            self._submit(partial(self._finish, number))

    def _submit(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread. If it fails, end this process.

        Otherwise the order would stay unanswered and its blocks reserved. The end of the process releases them.
        """
        self._ending.submit(work).add_done_callback(self._end_if_failed)

    def _end_if_failed(self, done: Future[None]) -> None:
        error = done.exception()
        if error is not None:
            self._outbox.put(MoverFailed(f"a bug in Baton, please report it: {type(error).__name__}: {error}"))
            os._exit(1)

    def _finish(self, number: int) -> None:
        pulling = self._pulls.pop(number)
        error, moved_bytes = "", 0
        try:
            moved_bytes = pulling.pull.wait(0)
            pulling.target.finish()
        except TransferError as failure:
            error = str(failure)
        self._give_back(pulling.target)
        took_s = now_s() - pulling.began_s
        self._outbox.put(PullEnded(number, landed=not error, moved_bytes=moved_bytes, took_s=took_s, error=error))

    def _give_back(self, target: PullTarget) -> None:
        with self._lock:
            target.give_back(self._staging)

    def _register(self, memory: memoryview) -> int:
        """Register memory with every transport. Return the region number, which is the same for all of them."""
        regions = {transport.register(memory) for transport in self._transports.values()}
        assert len(regions) == 1, f"transports count their regions differently: {regions}"
        return regions.pop()


def _usable(names: Sequence[str], memory: Memory) -> Sequence[str]:
    """Return the transports that can move this memory. Raises ConfigError if there is none."""
    if isinstance(memory, memoryview):
        return names
    able = (TcpTransport.name,) if memory.location is None else (TcpTransport.name, NixlTransport.name)
    usable = [name for name in names if name in able]
    if names and not usable:
        raise ConfigError(f"hosts.transports is {', '.join(names)}, and this arena on a GPU needs tcp; add it")
    return usable


class Outbox:
    """Sends messages to the parent process, from any thread."""

    def __init__(self, parent: ParentSocket) -> None:
        self._parent = parent
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()

    def put(self, message: FromMoverMessage) -> None:
        with self._lock:
            self._parent.put(self._encoder.encode(message))


def run_mover(descriptor: int) -> int:
    """Serve on an inherited Unix socket until the parent hangs up. Return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; only the parent ends this process
    die_with_parent()
    parent = ParentSocket(socket.socket(fileno=descriptor))
    outbox = Outbox(parent)
    decoder = msgspec.msgpack.Decoder(ToMoverMessage)
    payload, (arena_fd,) = parent.receive_first()
    setup = decoder.decode(payload)
    assert isinstance(setup, MoverSetup), f"the first message was {setup!r}"
    try:
        blocks = setup.arena_bytes // setup.layout.block_bytes
        arena = open_arena_on(setup.device, arena_fd, setup.layout, blocks)
        mover = Mover(setup, transferable(arena, setup.layout), arena_fd, outbox)
    except (ArenaError, TransferError, ConfigError) as error:
        outbox.put(MoverFailed(str(error)))
        return 1
    outbox.put(
        MoverReady(
            pid=os.getpid(),
            machine=machine_id(),
            transports=mover.transports,
            address=mover.address,
            tiers=mover.rules,
        )
    )
    while not parent.closed:
        for payload in parent.receive(wait=True) or ():
            message = decoder.decode(payload)
            if isinstance(message, Ping):
                outbox.put(MoverPong())
            elif not isinstance(message, MoverSetup):
                mover.handle(message)
    mover.close()
    return 0


if __name__ == "__main__":
    sys.exit(run_mover(int(sys.argv[1])))
