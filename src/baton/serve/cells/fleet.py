"""The cells of a router: their connections, their checks, and the state machine that chooses among them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import aiohttp
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from baton.core.errors import RequestError
from baton.decide.control.cell_router import (
    AttemptFailed,
    Cell,
    CellCommand,
    CellDrained,
    CellEvent,
    CellRouter,
    CellRules,
    CellSaid,
    CellState,
    FailureCause,
    RefuseRequest,
    RequestCame,
    RequestEnded,
    SendToCell,
)
from baton.move.clock import now_s
from baton.move.ipc.breakable import BreakableTasks
from baton.serve.cells.log import CellLog
from baton.serve.http.wire.errors import RETRY_AFTER_S, ClusterError

_CONNECT_S = 5.0
_SILENT_S = 600.0
"""A response that sends no byte for this long counts as broken. A prompt in a full queue takes less time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckTimes:
    check_s: float = 1.0
    """Interval of the checks of a cell."""
    silent_s: float = 10.0
    """A cell without an answer for this long is lost."""


class CellLink:
    """The HTTP connections to one cell. Create it in the event loop."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.suspected = asyncio.Event()
        """Set when a request failed there, so that the cell is checked at once."""
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENT_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self.attempts = BreakableTasks()
        """Broken once the cell does not answer."""

    async def ask(self, timeout_s: float) -> CellState | None:
        """Return the state of the cell. None: it did not answer."""
        limits = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self.session.get(f"{self.url}/ready", timeout=limits, allow_redirects=False) as response:
                return "ready" if response.status == 200 else "unready"
        except aiohttp.ClientConnectorError:
            return "lost"
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None


@dataclass(slots=True, eq=False)
class CellFleet(Collector):
    """Places requests on cells. Create it in the event loop."""

    cells: Sequence[Cell]
    rules: CellRules
    times: CheckTimes
    tell: Callable[[str], None]
    log: CellLog | None
    """None: no decision is logged."""
    resumed: int = 0
    """Streams that went on in another cell."""
    links: dict[str, CellLink] = field(init=False)
    _router: CellRouter = field(init=False)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _sent: Counter[str] = field(default_factory=Counter[str])
    _failed: Counter[tuple[str, FailureCause]] = field(default_factory=Counter[tuple[str, FailureCause]])

    def __post_init__(self) -> None:
        self._router = CellRouter(self.cells, self.rules)
        self.links = {cell.name: CellLink(cell.name) for cell in self.cells}

    @property
    def takes_requests(self) -> bool:
        return any(cell.takes_requests for cell in self.cells)

    async def run(self) -> None:
        """Check the cells until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for cell in self.cells:
                    group.create_task(self._watch(cell))
        finally:
            for link in self.links.values():
                await link.session.close()

    async def _watch(self, cell: Cell) -> None:
        link, answered_s = self.links[cell.name], -self.times.silent_s
        while True:
            link.suspected.clear()
            state = await link.ask(self.times.silent_s / 2)
            if state is None:
                state = cell.state if now_s() - answered_s < self.times.silent_s else "lost"
            else:
                answered_s = now_s()
            if state != cell.state:
                self.tell(f"cell {cell.name} is {state}")
                if self._decide(CellSaid(cell.name, state)):
                    link.attempts.break_all()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(link.suspected.wait(), self.times.check_s)
                await asyncio.sleep(self.times.check_s / 10)  # a cell that fails every request is not asked for each

    # ---- requests

    def place(self, key: int) -> tuple[int, CellLink]:
        """Return the number and the cell of a new request. Raises ClusterError (503) if no cell takes requests."""
        number = next(self._numbers)
        return number, self._placed(self._decide(RequestCame(number, key)))

    def place_again(self, number: int, cell: CellLink, cause: FailureCause) -> CellLink:
        """Return the next cell for a request that failed. Raises ClusterError (503) if no cell may get it."""
        self._failed[cell.url, cause] += 1
        return self._placed(self._decide(AttemptFailed(number, cause)))

    def end(self, number: int) -> None:
        self._decide(RequestEnded(number))

    def drain(self, name: str, *, is_draining: bool) -> None:
        """Let a cell take no new requests, or take them again. Raises RequestError (404) for an unknown cell."""
        if name not in self.links:
            known = ", ".join(self.links)
            raise RequestError(f"there is no cell {name[:200]!r}; there are {known}", status=404, code="unknown_cell")
        self._decide(CellDrained(name, is_draining))
        self.tell(f"cell {name} " + ("drains" if is_draining else "takes requests again"))

    def _placed(self, commands: list[CellCommand]) -> CellLink:
        match commands:
            case [SendToCell(cell=name)]:
                self._sent[name] += 1
                return self.links[name]
            case [RefuseRequest(reason=reason)]:
                raise ClusterError(reason, status=503, code="no_cell", retry_after_s=RETRY_AFTER_S)
            case _:
                raise AssertionError(f"{commands} place no request")

    def _decide(self, event: CellEvent) -> list[CellCommand]:
        commands = self._router.handle(event)
        if self.log is not None:
            self.log.append(event, commands)
        return commands

    # ---- metrics

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Yield the metrics of the cells, for prometheus_client."""
        sent = CounterMetricFamily("baton_cell_requests_total", "Requests sent to a cell.", labels=["cell"])
        failed = CounterMetricFamily(
            "baton_cell_failures_total", "Requests that a cell did not serve.", labels=["cell", "cause"]
        )
        running = GaugeMetricFamily("baton_cell_requests_running", "Requests on a cell.", labels=["cell"])
        ready = GaugeMetricFamily("baton_cell_ready", "1: the cell takes requests.", labels=["cell"])
        for cell in self.cells:
            sent.add_metric([cell.name], self._sent[cell.name])
            running.add_metric([cell.name], cell.running)
            ready.add_metric([cell.name], cell.takes_requests)
        for labels, count in self._failed.items():
            failed.add_metric(labels, count)
        resumed = CounterMetricFamily("baton_cell_resumed_streams_total", "Streams that went on in another cell.")
        resumed.add_metric([], self.resumed)
        yield from (sent, failed, running, ready, resumed)
