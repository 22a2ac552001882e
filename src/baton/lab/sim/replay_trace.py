"""Replay a trace on a simulated cluster and return what its clients would have measured.

`python -m baton.lab.sim.replay_trace` plays one cell: it reads a job on stdin and writes its records to stdout.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal
from zlib import crc32

import msgspec
from msgspec import structs

from baton.core.config import PolicyConfig
from baton.core.errors import BatonError, ConfigError
from baton.core.messages import Outcome
from baton.core.types import BlockHash, Request, RequestId, Sampling, Slo
from baton.decide.control.cell_router import CellRules
from baton.decide.control.decision_log import Decision
from baton.decide.kv.hashing import block_hashes
from baton.decide.policy.classes import ClassTable, RouteFacts
from baton.decide.policy.policy_sets import policy_set
from baton.lab.report.summary import RequestRecord
from baton.lab.sim.build import ClusterParts, build_on
from baton.lab.sim.cells import CellJob, cell_jobs, encode_records, merge_records
from baton.lab.sim.cluster import SimCluster
from baton.lab.sim.engines import STOP_TOKEN, LengthEngine
from baton.lab.sim.fault_injector import FaultInjector
from baton.lab.sim.faults import Herd, delayed_arrival_s, select_herds
from baton.lab.sim.journal import Journal, Life
from baton.lab.sim.loop import EventLoop
from baton.lab.sim.policies import configured_policies
from baton.lab.sim.routed_cells import RoutedCells, routed_key
from baton.lab.sim.spec import ClusterSpec
from baton.lab.workload.conversation import TURN_LOST, Conversations, Turn, link_conversations
from baton.lab.workload.prompts import PromptMaker
from baton.lab.workload.request import Trace, TraceRequest

Invariant = Literal["INV-1", "INV-2", "INV-3", "INV-4", "INV-5", "INV-7", "INV-8", "INV-9"]
_REFUSALS = frozenset({"queue_full", "queue_deadline", "slo", "retries"})
"""Rejections with which a router tries another cell."""
_SAMPLING = Sampling(stop_token_ids=(STOP_TOKEN,))


class Violation(BatonError):
    """An invariant is broken, which means a bug in Baton."""

    def __init__(self, invariant: Invariant, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant


def require(fact: object, invariant: Invariant, what: str) -> None:
    if not fact:
        raise Violation(invariant, what)


class _EnoughError(Exception):
    """The caller's `enough` returned True: stop the simulation."""


@dataclass(slots=True, kw_only=True)
class _Replay:
    """Submits a trace's requests and records their outcomes. A prompt is in memory only while its request is open."""

    spec: ClusterSpec
    prompts: PromptMaker
    slo: Slo | None
    """SLO of requests without one in the trace."""
    linked: Conversations
    """Later turns of conversations. Each waits for the answer before it."""
    tokens_max: int
    """Tokens of one request that every host can hold."""
    asked_tokens_max: int
    """Output limit of every request, unless fewer tokens fit."""
    shares_blocks: bool
    """Blocks need hashes, for prefix hits, tiers or a window. If False, all prompt tokens are 0 and nothing is hashed.
    """
    herds: Sequence[Herd] = ()
    """Periods in which no request arrives, neither of new conversations nor of later turns."""
    index_of: dict[RequestId, int] = field(default_factory=dict[RequestId, int])
    """Trace index of each open request for which a later turn waits."""
    output_tokens: dict[RequestId, int] = field(default_factory=dict[RequestId, int])
    """Output lengths in the trace. Only the engine reads them."""
    records: list[RequestRecord] = field(default_factory=list[RequestRecord])
    classes: ClassTable = field(default_factory=ClassTable)
    cells: RoutedCells | None = None
    """The cells, if a router deals the requests. None: there is one cluster."""
    enough: Callable[[RequestRecord], bool] | None = None
    """Called with every record. It returns True to stop the simulation."""

    def open_next(self, cluster: SimCluster, openers: Iterator[tuple[int, TraceRequest]]) -> None:
        """Schedule the next request that opens a conversation. Its arrival schedules the one after it."""
        for index, request in openers:
            at_s = delayed_arrival_s(request.at_s, self.herds)
            cluster.loop.at(at_s, partial(self._open, cluster, request, index, openers))
            return

    def _open(
        self, cluster: SimCluster, request: TraceRequest, index: int, openers: Iterator[tuple[int, TraceRequest]]
    ) -> None:
        self.open_next(cluster, openers)
        self.arrive(cluster, request, index)

    def arrive(self, cluster: SimCluster, request: TraceRequest, index: int) -> None:
        if not self._admit(cluster, request, index, request.input_tokens):
            return
        if self.shares_blocks:
            prompt = array("I", self.prompts.token_ids(request, index))
        else:
            prompt = array("I", bytes(4 * request.input_tokens))
        self._submit(cluster, request, index, prompt)

    def _follow(self, cluster: SimCluster, turn: Turn, said: Sequence[int]) -> None:
        """Submit the next turn of a conversation. `said` holds the tokens so far, with the last answer."""
        if not self._admit(cluster, turn.request, turn.index, turn.prompt_tokens(len(said))):
            return
        own = self.prompts.token_ids(turn.request, turn.index)
        self._submit(cluster, turn.request, turn.index, array("I", turn.prompt(own, said)))

    def _admit(self, cluster: SimCluster, request: TraceRequest, index: int, prompt_tokens: int) -> bool:
        """Return whether a host can hold the request. If not, record it as rejected, before its prompt is built.

        The live HTTP server does the same.
        """
        if prompt_tokens < self.tokens_max:
            return True
        self._note_lost(request, cluster.loop.now_s, "rejected")
        self._give_up(index, cluster.loop.now_s, "rejected")
        return False

    def _submit(self, cluster: SimCluster, request: TraceRequest, index: int, prompt: array[int]) -> None:
        edge_s = self.spec.edge.before_s(len(prompt))
        if edge_s:
            cluster.loop.after(edge_s, partial(self._reach, cluster, request, index, prompt))
        else:
            self._reach(cluster, request, index, prompt)

    def _reach(self, cluster: SimCluster, request: TraceRequest, index: int, prompt: array[int]) -> None:
        """Submit a request to the coordinator, once the HTTP edge has processed it."""
        request_id = RequestId(f"request-{index}")
        if self.linked.is_followed(index):
            self.index_of[request_id] = index
        self.output_tokens[request_id] = request.output_tokens
        choice = self.classes.choose(RouteFacts(tenant=request.tenant))
        arriving = Request(
            id=request_id,
            prompt_tokens=len(prompt),
            block_hashes=self._hashes(prompt),
            output_tokens_max=min(self.asked_tokens_max, self.tokens_max - len(prompt)),
            arrived_at_s=cluster.loop.now_s,
            sampling=_SAMPLING,
            tenant=request.tenant,
            client=request.client or crc32(request.tenant.encode()),
            priority=request.priority,
            shares_blocks=self.shares_blocks,
            slo=request.slo or choice.slo or self.slo,
            service=choice.service,
        )
        if self.cells is not None:
            cluster = self.cells.place(request_id, routed_key(request, index))
        cluster.server.submit(arriving, prompt)

    def _hashes(self, prompt: array[int]) -> tuple[BlockHash, ...]:
        return block_hashes(prompt, block_tokens=self.spec.kv.block_tokens) if self.shares_blocks else ()

    def _give_up(self, index: int, now_s: float, outcome: Outcome) -> None:
        """Record the later turns of a failed or rejected request as lost, so that they count against the policy too."""
        for turn in self.linked.take_rest(index):
            self._note_lost(turn.request, now_s, outcome)

    def _note_lost(self, request: TraceRequest, now_s: float, outcome: Outcome) -> None:
        record = RequestRecord(
            arrival_s=now_s,
            end_s=now_s,
            outcome=outcome,
            failure=TURN_LOST if outcome == "failed" else "",
            input_tokens=request.input_tokens,
            slo=request.slo,
            tenant=request.tenant,
        )
        self._keep(record)

    def _keep(self, record: RequestRecord) -> None:
        self.records.append(record)
        if self.enough is not None and self.enough(record):
            raise _EnoughError

    def close(self, cluster: SimCluster, life: Life) -> None:
        ended_at_s, close = life.closes[0]
        if self.cells is not None:
            other = self.cells.place_again(life.request.id) if close.reject in _REFUSALS else None
            if other is not None:
                del cluster.server.journal.lives[life.request.id]
                cluster.loop.after(0.0, partial(other.server.submit, life.request, life.tokens))
                return
            self.cells.end(life.request.id)
        edge, times_s = self.spec.edge, life.token_times_s
        lacking = self.output_tokens.pop(life.request.id) - life.request.output_tokens_max
        if edge.token_s:
            times_s = array("d", [at_s + edge.token_s for at_s in times_s])
        record = RequestRecord(
            arrival_s=life.request.arrived_at_s - edge.before_s(life.request.prompt_tokens),
            end_s=ended_at_s + edge.token_s,
            outcome=close.outcome,
            reject=close.reject,
            failure=close.reason if close.outcome == "failed" else "",
            input_tokens=life.request.prompt_tokens,
            token_times_s=times_s,
            cached_tokens=life.cached_tokens,
            cut_tokens=lacking if lacking > 0 and close.outcome == "finished" else 0,
            slo=life.request.slo,
            tenant=life.request.tenant,
        )
        self._keep(record)
        self._go_on(cluster, life)
        del cluster.server.journal.lives[life.request.id]

    def _go_on(self, cluster: SimCluster, life: Life) -> None:
        """Schedule the next turn after its think time. If the request did not finish, its later turns are lost."""
        index, outcome = self.index_of.pop(life.request.id, None), life.closes[0][1].outcome
        if index is not None and outcome != "finished":
            self._give_up(index, cluster.loop.now_s, outcome)
            return
        turn = None if index is None else self.linked.take_next(index)
        if turn is not None:
            think_s = (turn.request.think_s or 0.0) + self.spec.edge.token_s
            at_s = delayed_arrival_s(cluster.loop.now_s + think_s, self.herds)
            cluster.loop.at(at_s, partial(self._follow, cluster, turn, tuple(life.tokens)))


def replay_trace(
    spec: ClusterSpec,
    trace: Trace,
    *,
    policy: str | PolicyConfig,
    seed: int,
    slo: Slo | None = None,
    tap: Callable[[Decision], None] | None = None,
) -> list[RequestRecord]:
    """Replay a whole trace and return a record of each request, in the order in which they closed.

    `policy` is the name of a policy set, or a configuration. `seed` determines prompt tokens and message delays.
    `slo` applies to requests without one in the trace; policies see it, as in live mode. `tap` receives every decision
    as it is made. Raises ConfigError for an unknown policy, and for a tap on more than one cell.
    """
    config = policy_set(policy) if isinstance(policy, str) else policy
    job = CellJob(spec=structs.replace(spec, cells=1), trace=trace, policy=config, seed=seed, slo=slo)
    if spec.cells == 1:
        return play_cell(job, tap)
    if tap is not None:
        what = "a log, a page and a trace are of one server"
        raise ConfigError(f"{what}, and the cluster has cells = {spec.cells}: play one cell")
    if spec.router is not None:
        return play_routed(job, spec.cells, spec.router)
    return merge_records([play_cell(job) for job in cell_jobs(spec, trace, config, seed=seed, slo=slo)])


def play_cell(
    job: CellJob,
    tap: Callable[[Decision], None] | None = None,
    enough: Callable[[RequestRecord], bool] | None = None,
) -> list[RequestRecord]:
    """Play one cell with its faults and return its records. Raises ConfigError for policies that do not fit.

    `enough` receives every record. Once it returns True, the simulation stops and returns the records so far.
    """
    loop, replaying = EventLoop(), _replay_of(job, enough)
    cluster = _cluster_of(job, replaying, loop, tap)
    return _played(job, replaying, [cluster])


def play_routed(job: CellJob, cells: int, rules: CellRules) -> list[RequestRecord]:
    """Play a trace on cells behind a router, in one event loop. Return the records in the order of their ends."""
    loop, replaying = EventLoop(), _replay_of(job, None)
    jobs = [structs.replace(job, seed=job.seed + number) for number in range(cells)]
    clusters = [_cluster_of(each, replaying, loop, None) for each in jobs]
    replaying.cells = RoutedCells(clusters, rules)
    return _played(job, replaying, clusters)


def _replay_of(job: CellJob, enough: Callable[[RequestRecord], bool] | None) -> _Replay:
    spec, trace = job.spec, job.trace
    return _Replay(
        spec=spec,
        prompts=PromptMaker(seed=job.seed),
        slo=job.slo,
        linked=link_conversations(trace.requests),
        tokens_max=spec.request_tokens_max,
        asked_tokens_max=asked_tokens_max(spec, trace),
        classes=ClassTable(spec.classes, spec.routes, spec.default_class),
        enough=enough,
        shares_blocks=spec.window is not None  # only blocks with a hash can be released behind the window
        or spec.spill is not None  # only blocks with a hash are spilled
        or bool(spec.tiers)  # only blocks with a hash are written to a tier, or read back
        or any(each.copy_tokens for each in spec.classes)  # only blocks with a hash are copied
        or any(request.prefix_ids or request.think_s is not None for request in trace.requests),
        herds=select_herds(job.faults),
    )


def _cluster_of(
    job: CellJob, replaying: _Replay, loop: EventLoop, tap: Callable[[Decision], None] | None
) -> SimCluster:
    built: list[SimCluster] = []
    parts = ClusterParts(
        spec=job.spec,
        policies=configured_policies(job.policy, job.spec),
        new_engine=lambda host: LengthEngine(replaying.output_tokens, layers=job.spec.layers),
        seed=job.seed,
        journal=Journal(keep_log=False, tap=tap),
        closed=lambda life: replaying.close(built[0], life),
    )
    built.append(build_on(loop, parts))
    return built[0]


def _played(job: CellJob, replaying: _Replay, clusters: Sequence[SimCluster]) -> list[RequestRecord]:
    """Play the trace to its end, or until there is enough."""
    openers = sorted(replaying.linked.openers, key=lambda opener: opener[1].at_s)
    replaying.open_next(clusters[0], iter(openers))
    for cluster in clusters:
        FaultInjector(cluster).schedule(fault for fault in job.faults if not isinstance(fault, Herd))
    try:
        clusters[0].loop.run(until_s=math.inf, events_max=sys.maxsize)
    except _EnoughError:
        return replaying.records
    for cluster in clusters:
        check_nothing_left(cluster)
    return replaying.records


def check_nothing_left(cluster: SimCluster) -> None:
    """Raise Violation if a request, block, transfer or starting worker is left at the end (INV-1, INV-2, INV-9)."""
    for host, pool in cluster.server.pools.items():
        require(pool.holders == 0, "INV-2", f"the pool of {host} still knows {pool.holders} requests")
        used = pool.view().blocks_used
        require(used == 0, "INV-2", f"{used} blocks of {host} are used without a request")
    waiting = [transfer.request.id for transfer in cluster.server.cluster.transfers.table]
    require(not waiting, "INV-2", f"transfers of {waiting} are still under way")
    putting = cluster.server.cluster.transfers.waiting_for_pools
    require(not putting, "INV-2", f"{putting} still wait until their blocks are in a pool")
    routes, workers = cluster.server.routes.keys(), cluster.server.cluster.workers.keys()
    require(
        routes == workers, "INV-9", f"the server has routes to {sorted(routes)}, but the cluster has {sorted(workers)}"
    )
    starting = cluster.server.coordinator.starting
    require(not starting, "INV-9", f"at the end, scaling still waits for workers to start: {dict(starting)}")
    live = cluster.server.coordinator.live_requests
    require(live == 0, "INV-1", f"the coordinator still knows {live} requests")
    for worker in cluster.workers:
        view = worker.batcher.view(cluster.loop.now_s)
        lanes = view.running_requests + view.waiting_requests
        require(lanes == 0, "INV-2", f"{worker.id} still has {lanes} requests")


USUAL_TOKENS_MAX = 4096
"""Output limit of a request, unless the cluster sets another or the trace has longer answers."""


def asked_tokens_max(spec: ClusterSpec, trace: Trace) -> int:
    """Return the output limit that every request asks for: the cluster's, otherwise enough for the longest answer.

    All requests have the same limit, so that no policy can tell a short answer from a long one.
    """
    if spec.output_tokens_max is not None:
        return spec.output_tokens_max
    return max(USUAL_TOKENS_MAX, max((request.output_tokens for request in trace.requests), default=0))


def main() -> int:
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=CellJob)
    sys.stdout.buffer.write(encode_records(play_cell(job)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
