"""Copy KV blocks between two hosts: give orders to both movers until the copy has ended.

A copy has ended when its blocks have landed, or when neither mover can touch them any more: each mover has confirmed
the end or is dead. Only then is the cluster told, and pools reuse the blocks (INV-3). After `copy_s` seconds, both
movers are ordered to end the copy. A mover that hangs is killed, and a mover with a failed thread ends itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, assert_never

from baton.core.copies import CopyBlocks
from baton.core.types import HostId
from baton.decide.kv.layout import KVDtype, KVLayout, loss
from baton.serve.messages.moving import (
    BlocksOffered,
    BlocksWithdrawn,
    CancelPull,
    CopyEvent,
    CopySpec,
    MoverOrder,
    MoverReady,
    OfferBlocks,
    OfferRefused,
    PullBlocks,
    PullEnded,
    WithdrawBlocks,
)

_LEASE_MORE_S = 5.0
"""Seconds that an offer outlives `copy_s`, so that it does not expire before the copy's deadline."""


class Orders(Protocol):
    """Sends orders to a host's mover."""

    def send(self, generation: int, order: MoverOrder) -> None: ...


class Timer(Protocol):
    """A scheduled call."""

    def cancel(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyEnd:
    """The result of a copy."""

    landed: bool
    moved_bytes: int = 0
    took_s: float = 0.0
    error: str = ""
    loss: str = ""
    """Description of the precision that the conversion lost. Empty: none."""


@dataclass(slots=True)
class _Mover:
    """A host's mover. `ready` is None while the mover is starting; copies wait for it."""

    orders: Orders
    layout: KVLayout
    generation: int = 0
    ready: MoverReady | None = None


@dataclass(slots=True)
class _RunningCopy:
    copy: CopyBlocks
    began_s: float
    spec: CopySpec | None = None
    """Set once the source was ordered to offer the blocks."""
    transport: str = ""
    offered: bool = False
    """The source's mover may still read the blocks."""
    pulling: bool = False
    """The target's mover may still write its blocks."""
    error: str = ""
    """Reason of the failure. Empty: the copy has not failed."""
    timer: Timer | None = None
    dtypes: tuple[KVDtype, KVDtype] | None = None
    """KV types of the source and of the target."""


class Copying:
    """Runs all copies between hosts. Their number is bounded by the transfers of live requests."""

    def __init__(
        self,
        *,
        copy_s: float,
        now_s: Callable[[], float],
        later: Callable[[float, Callable[[], None]], Timer],
        ended: Callable[[CopyBlocks, CopyEnd], None],
    ) -> None:
        """`copy_s`: deadline of a copy. `later` schedules a call after a delay in seconds. `ended` gets each result."""
        self._copy_s = copy_s
        self._now_s = now_s
        self._later = later
        self._ended = ended
        self._movers: dict[HostId, _Mover] = {}
        self._copies: dict[int, _RunningCopy] = {}
        self._apart: set[tuple[HostId, HostId]] = set()
        """Pairs of hosts on one machine between which a copy through shared memory has failed."""

    def has_copy_of(self, host: HostId) -> bool:
        """Return whether a copy from or to this host is in progress. Until it ends, no new host may use the name."""
        return any(host in (running.copy.source, running.copy.target) for running in self._copies.values())

    # ---- hosts and their movers

    def add_host(self, host: HostId, orders: Orders, layout: KVLayout) -> None:
        """Add a host whose mover is starting. Copies from and to it wait until the mover is ready."""
        self._movers[host] = _Mover(orders, layout)

    def lose_host(self, host: HostId, reason: str) -> None:
        """End the copies of a lost host. Its mover may still write to its arena, but no process reads that any more."""
        if self._movers.pop(host, None) is not None:
            self._apart = {pair for pair in self._apart if host not in pair}
            self._end_at(host, f"host {host} is lost: {reason}")

    def mover_ready(self, host: HostId, generation: int, ready: MoverReady) -> None:
        """Begin the copies that waited for this mover."""
        mover = self._movers.get(host)
        if mover is not None:
            mover.generation, mover.ready = generation, ready
            for copy in list(self._copies.values()):
                self._offer(copy)

    def mover_lost(self, host: HostId, generation: int, reason: str) -> None:
        """End the copies of a lost mover. Does nothing if a newer generation of it is ready."""
        mover = self._movers.get(host)
        if mover is not None and mover.ready is not None and mover.generation == generation:
            mover.ready = None
            self._end_at(host, f"the mover of {host} is lost: {reason}")

    def _end_at(self, host: HostId, reason: str) -> None:
        """Fail every copy that involves this host's dead mover. Copies that only wait for the mover go on waiting."""
        for copy in list(self._copies.values()):
            is_begun = copy.offered or copy.pulling or host not in self._movers
            if host not in (copy.copy.source, copy.copy.target) or not is_begun:
                continue
            copy.offered = copy.offered and host != copy.copy.source
            copy.pulling = copy.pulling and host != copy.copy.target
            self._fail(copy, reason)

    # ---- copies

    def begin(self, copy: CopyBlocks) -> None:
        """Begin a copy. `ended` is called exactly once for it, after `begin` has returned."""
        running = self._copies[copy.number] = _RunningCopy(copy, self._now_s())
        strange = [host for host in (copy.source, copy.target) if host not in self._movers]
        if strange:
            why = f"host {strange[0]} has no mover"
            running.timer = self._later(0.0, lambda: self._fail(running, why))
            return
        why = f"it took longer than hosts.copy_s, which is {self._copy_s:g} s"
        running.timer = self._later(self._copy_s, lambda: self._fail(running, why))
        self._offer(running)

    def _offer(self, running: _RunningCopy) -> None:
        """Order the source to offer the blocks, once both movers are ready."""
        copy = running.copy
        source, target = self._movers.get(copy.source), self._movers.get(copy.target)
        if running.offered or running.error or source is None or target is None:
            return
        if source.ready is None or target.ready is None:
            return
        running.transport = self._transport(copy, source.ready, target.ready)
        if not running.transport:
            theirs = (", ".join(source.ready.transports), ", ".join(target.ready.transports))
            why = f"{copy.source} offers {theirs[0]}, {copy.target} pulls {theirs[1]}: no transport is common to both"
            self._later(0.0, lambda: self._fail(running, why))
            return
        running.offered = True
        running.dtypes = (source.layout.dtype, target.layout.dtype)
        running.spec = CopySpec(
            read=copy.read,
            write=copy.write,
            first_token=copy.first_token,
            tokens=copy.tokens,
            source=source.layout,
            target=target.layout,
            layers=copy.layers,
        )
        lease_s = self._copy_s + _LEASE_MORE_S
        order = OfferBlocks(copy.number, running.spec, running.transport, lease_s, copy.request_id)
        source.orders.send(source.generation, order)

    def _transport(self, copy: CopyBlocks, source: MoverReady, target: MoverReady) -> str:
        """Return the first of the target's transports that the source has too. Empty: none.

        `shm` requires that both movers run on one machine, and that it has not failed between them before.
        """
        near = source.machine == target.machine != "" and (copy.source, copy.target) not in self._apart
        common = [name for name in target.transports if name in source.transports and (near or name != "shm")]
        return common[0] if common else ""

    def mover_reported(self, host: HostId, generation: int, event: CopyEvent) -> None:
        """Handle an answer of a mover. Answers of earlier generations are dropped: their copies have ended."""
        mover, running = self._movers.get(host), self._copies.get(event.number)
        if mover is None or mover.generation != generation or running is None:
            return
        match event:
            case BlocksOffered():
                self._pull(running, event)
            case OfferRefused(error=error):
                running.offered = False
                self._fail(running, error)
            case PullEnded():
                self._pulled(running, event)
            case BlocksWithdrawn():
                running.offered = False
                self._settle(running)
            case _:
                assert_never(event)

    def _pull(self, running: _RunningCopy, event: BlocksOffered) -> None:
        target = self._movers.get(running.copy.target)
        if running.error or target is None or running.spec is None:
            return
        running.pulling = True
        target.orders.send(target.generation, PullBlocks(running.copy.number, event.ticket, running.spec))

    def _pulled(self, running: _RunningCopy, event: PullEnded) -> None:
        running.pulling = False
        if not event.landed:
            if running.transport == "shm" and not running.error:
                self._apart.add((running.copy.source, running.copy.target))
            self._fail(running, event.error)
            return
        if not running.error:
            self._order(running.copy.source, WithdrawBlocks(running.copy.number))
        lost = loss(running.dtypes[0], running.dtypes[1]) if running.dtypes else ""
        took_s = self._now_s() - running.began_s
        self._close(running, CopyEnd(landed=True, moved_bytes=event.moved_bytes, took_s=took_s, loss=lost or ""))

    def _fail(self, running: _RunningCopy, reason: str) -> None:
        """Fail a copy: order both movers to release its blocks, and report the failure once both have done so."""
        if not running.error:
            running.error = reason
            if running.pulling:
                self._order(running.copy.target, CancelPull(running.copy.number))
            if running.offered:
                self._order(running.copy.source, WithdrawBlocks(running.copy.number))
        self._settle(running)

    def _settle(self, running: _RunningCopy) -> None:
        if running.error and not running.offered and not running.pulling:
            self._close(running, CopyEnd(landed=False, took_s=self._now_s() - running.began_s, error=running.error))

    def _close(self, running: _RunningCopy, end: CopyEnd) -> None:
        if running.timer is not None:
            running.timer.cancel()
        if self._copies.pop(running.copy.number, None) is not None:
            self._ended(running.copy, end)

    def _order(self, host: HostId, order: MoverOrder) -> None:
        mover = self._movers.get(host)
        if mover is not None:
            mover.orders.send(mover.generation, order)
