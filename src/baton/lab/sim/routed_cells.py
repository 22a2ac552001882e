"""Simulated cells behind the router of `baton cells`, which places each request by its prefix and the cells' loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from baton.core.types import RequestId
from baton.decide.control.cell_router import (
    KEY_BITS,
    AttemptFailed,
    Cell,
    CellCommand,
    CellRouter,
    CellRules,
    CellSaid,
    RequestCame,
    RequestEnded,
    SendToCell,
)
from baton.lab.sim.cluster import SimCluster
from baton.lab.workload.request import TraceRequest

PREFIX_TOKENS = 1024
"""Leading tokens of a prompt without a session that decide about its cell: as many as live, of 4 KiB."""


@dataclass(slots=True)
class RoutedCells:
    """The clusters of all cells, on one event loop, and their router."""

    clusters: Sequence[SimCluster]
    rules: CellRules
    _router: CellRouter = field(init=False)
    _numbers: dict[RequestId, int] = field(default_factory=dict[RequestId, int])
    _sent: int = 0

    def __post_init__(self) -> None:
        names = [str(number) for number in range(len(self.clusters))]
        self._router = CellRouter([Cell(name) for name in names], self.rules)
        for name in names:
            self._router.handle(CellSaid(name, "ready"))

    def place(self, request_id: RequestId, key: int) -> SimCluster:
        """Return the cell of a new request."""
        number = self._numbers[request_id] = self._sent
        self._sent += 1
        found = self._cell(self._router.handle(RequestCame(number, key)))
        assert found is not None, "no simulated cell is lost"
        return found

    def place_again(self, request_id: RequestId) -> SimCluster | None:
        """Return the next cell for a request that its cell refuses. None: the refusal is final."""
        return self._cell(self._router.handle(AttemptFailed(self._numbers[request_id], "refused")))

    def end(self, request_id: RequestId) -> None:
        self._router.handle(RequestEnded(self._numbers.pop(request_id)))

    def _cell(self, commands: Sequence[CellCommand]) -> SimCluster | None:
        match commands:
            case [SendToCell(cell=name)]:
                return self.clusters[int(name)]
            case _:
                return None


def routed_key(request: TraceRequest, index: int) -> int:
    """Return the key of a request for the router: of its tenant, and of its session or else its prefix."""
    if request.session:
        part = request.session
    elif request.prefix_ids:
        part = repr(request.prefix_ids[: -(-PREFIX_TOKENS // max(1, request.prefix_block_tokens))])
    else:
        part = f"{index}"
    digest = blake2b(f"{request.tenant}\0{part}".encode(), digest_size=KEY_BITS // 8).digest()
    return int.from_bytes(digest, "little")
