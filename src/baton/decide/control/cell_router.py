"""Route requests to cells: consistent hashing with a bound of load, health, draining, and further attempts.

Source: weighted rendezvous hashing (Schindelhauer and Schomaker, 2005) with bounded loads (Mirrokni, Thorup and
Zadimoghaddam, 2018).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Annotated, Literal, assert_never

from msgspec import Struct

from baton.core.validation import Range

CellState = Literal["ready", "unready", "lost"]
"""It takes requests; it answers, but takes none; it does not answer."""
FailureCause = Literal["broken", "refused", "unknown"]
"""The connection broke or the server ends; it refused the request for its load; it does not have the stored state that
the request names, and another cell may."""
KEY_BITS = 64
_MASK = (1 << KEY_BITS) - 1
_REFUSALS_SAVED_MAX = 100.0


class CellRules(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rules of a router of cells."""

    load_ratio: Annotated[float, Range(least=1.0, most=100.0)] = 1.25
    """Most running requests of a cell, relative to its fair share. 1: all cells have equal loads; more: more requests
    reach the cell that has their prefix."""
    free_requests: Annotated[int, Range(least=0, most=2**20)] = 8
    """Running requests that a cell may always have, so that few requests do not leave the cell of their prefix."""
    attempts_max: Annotated[int, Range(least=1, most=16)] = 4
    """Maximum cells that a request is sent to, one after the other."""
    refusal_ratio: Annotated[float, Range(least=0.0, most=1.0)] = 0.2
    """Refused requests that are sent to another cell, per new request. So full cells do not get more load."""


# ---- events


class RequestCame(Struct, frozen=True, tag=True):
    """A client has sent a request. `number` is unique among open requests. `key`: hash of its tenant and prefix."""

    number: int
    key: int


class AttemptFailed(Struct, frozen=True, tag=True):
    """The cell of a request did not serve it, or not to its end."""

    number: int
    cause: FailureCause


class RequestEnded(Struct, frozen=True, tag=True):
    number: int


class CellSaid(Struct, frozen=True, tag=True):
    """A check of a cell has ended."""

    cell: str
    state: CellState


class CellDrained(Struct, frozen=True, tag=True):
    """An operator lets a cell take no new requests, or take them again."""

    cell: str
    is_draining: bool


CellEvent = RequestCame | AttemptFailed | RequestEnded | CellSaid | CellDrained


# ---- commands


class SendToCell(Struct, frozen=True, tag=True):
    number: int
    cell: str


class RefuseRequest(Struct, frozen=True, tag=True):
    """No cell may get the request. It is not open any more."""

    number: int
    reason: str


class DropConnections(Struct, frozen=True, tag=True):
    """End the connections to a cell that does not answer. Then the attempts of its requests fail."""

    cell: str


CellCommand = SendToCell | RefuseRequest | DropConnections


# ---- the machine


@dataclass(slots=True, eq=False)
class Cell:
    """A server with its workers, and the requests of this router on it."""

    name: str
    weight: float = 1.0
    """Its size, relative to the others."""
    state: CellState = "lost"
    is_draining: bool = False
    running: int = 0
    _seed: int = field(init=False)

    def __post_init__(self) -> None:
        self._seed = int.from_bytes(blake2b(self.name.encode(), digest_size=KEY_BITS // 8).digest(), "little")

    @property
    def takes_requests(self) -> bool:
        return self.state == "ready" and not self.is_draining

    def distance(self, key: int) -> float:
        """Return the distance of a key. The nearest cell is its home; each cell is home of its weight's share of keys.

        A cell that joins or leaves changes no distance of another one, so that only its own keys get another home.
        """
        return -math.log((_mixed(key ^ self._seed) + 0.5) / (_MASK + 1)) / self.weight


@dataclass(slots=True)
class _Open:
    """A request that was sent to a cell and has not ended."""

    key: int
    cell: Cell
    tried: tuple[Cell, ...]


class CellRouter:
    """Decides which cell serves each request. It needs no time: checks and deadlines belong to its driver."""

    def __init__(self, cells: Iterable[Cell], rules: CellRules) -> None:
        self.cells = {cell.name: cell for cell in cells}
        self._rules = rules
        self._open: dict[int, _Open] = {}
        self._refusals_left = _REFUSALS_SAVED_MAX

    @property
    def open_requests(self) -> int:
        return len(self._open)

    def handle(self, event: CellEvent) -> list[CellCommand]:
        """Apply an event and return the commands. Events of requests that are not open change nothing."""
        match event:
            case RequestCame(number=number, key=key):
                self._refusals_left = min(_REFUSALS_SAVED_MAX, self._refusals_left + self._rules.refusal_ratio)
                return [self._send(number, key, ())]
            case AttemptFailed():
                return self._retry(event)
            case RequestEnded(number=number):
                ended = self._open.pop(number, None)
                if ended is not None:
                    ended.cell.running -= 1
                return []
            case CellSaid():
                return self._note(event)
            case CellDrained(cell=name, is_draining=is_draining):
                self.cells[name].is_draining = is_draining
                return []
            case _:
                assert_never(event)

    def _note(self, said: CellSaid) -> list[CellCommand]:
        cell = self.cells[said.cell]
        was, cell.state = cell.state, said.state
        return [DropConnections(cell.name)] if said.state == "lost" != was else []

    def _retry(self, failed: AttemptFailed) -> list[CellCommand]:
        found = self._open.pop(failed.number, None)
        if found is None:
            return []
        found.cell.running -= 1
        tried = (*found.tried, found.cell)
        if len(tried) >= self._rules.attempts_max and failed.cause != "unknown":
            return [RefuseRequest(failed.number, f"{len(tried)} cells did not serve the request")]
        if failed.cause == "refused":
            if self._refusals_left < 1.0:
                return [RefuseRequest(failed.number, "its cell refused the request, as cells refuse many now")]
            self._refusals_left -= 1.0
        return [self._send(failed.number, found.key, tried)]

    def _send(self, number: int, key: int, tried: Sequence[Cell]) -> SendToCell | RefuseRequest:
        able = [cell for cell in self.cells.values() if cell.takes_requests and cell not in tried]
        if not able:
            return RefuseRequest(number, self._lack(tried))
        cell = self._nearest(key, able)
        cell.running += 1
        self._open[number] = _Open(key, cell, tuple(tried))
        return SendToCell(number, cell.name)

    def _nearest(self, key: int, able: Sequence[Cell]) -> Cell:
        """Return the nearest cell whose load is below its bound. Because the ratio is at least 1, there is one."""
        requests = 1 + sum(cell.running for cell in able)
        share = self._rules.load_ratio * requests / sum(cell.weight for cell in able)
        least = self._rules.free_requests
        free = [cell for cell in able if cell.running < max(least, math.ceil(share * cell.weight))]
        return min(free, key=lambda cell: (cell.distance(key), cell.name))

    def _lack(self, tried: Sequence[Cell]) -> str:
        cells = [cell for cell in self.cells.values() if cell not in tried]
        draining = sum(cell.state != "lost" and cell.is_draining for cell in cells)
        lost = sum(cell.state == "lost" for cell in cells)
        others = "no other cell" if tried else "no cell"
        return f"{others} takes requests: {lost} do not answer, {draining} drain, of {len(self.cells)}"


def _mixed(number: int) -> int:
    """Return 64 bits, each of which depends on every given bit. Source: SplitMix64 (Steele et al., 2014)."""
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
    return number ^ number >> 31
