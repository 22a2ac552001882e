"""Checkers: observe a simulated cluster and raise `Violation` for a broken invariant (docs/invariants.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from baton.core.messages import HostLost
from baton.core.step import Slice, Step
from baton.core.ticking import Tick
from baton.core.types import BlockId, HostId, Request, RequestId
from baton.decide.control.decision_log import replay
from baton.decide.kv.host_pool import HostPool
from baton.decide.kv.window import Window
from baton.lab.sim.cluster import SimCluster, fresh_cluster
from baton.lab.sim.journal import Life
from baton.lab.sim.replay_trace import Violation, check_nothing_left, require
from baton.lab.sim.worker import SimWorker
from tests.campaign.content_engine import ContentEngine
from tests.campaign.restless import play_policies

POOL_CHECK_EVENTS = 8
"""Events between two checks of whole pools. A check costs about as much as an event."""
WORDS_PER_REQUEST_MAX = 8
"""Bound of the commands that wait for one worker, on its link or in its inbox, per request of the run (INV-9)."""


@dataclass(slots=True, kw_only=True)
class Watch:
    """Checks that run during the simulation. The event loop calls `after_event` after every event."""

    cluster: SimCluster
    policy: str
    """Name of the scenario's policies, from which a replay builds them again."""
    live_max: int = 0

    def after_event(self) -> None:
        self._check_steps()
        loop, server = self.cluster.loop, self.cluster.server
        self.live_max = max(self.live_max, server.coordinator.live_requests)
        if loop.events % POOL_CHECK_EVENTS == 0:
            self.check_pool()

    def check_pool(self) -> None:
        """INV-2 and INV-4: every pin belongs to a request, no block is lost, and no closed request holds blocks."""
        for pool in self.cluster.server.pools.values():
            try:
                pool.check()
            except AssertionError as error:
                raise Violation("INV-4", str(error)) from error
            view = pool.view()
            total = view.blocks_free + view.blocks_used + view.blocks_cached
            require(total == view.blocks_total, "INV-4", f"{total} of {view.blocks_total} blocks are accounted for")

    def _check_steps(self) -> None:
        """INV-3: a running step reads and writes only blocks that its requests hold."""
        by_host: dict[HostId, list[SimWorker]] = {}
        for worker in self.cluster.workers:
            if worker.executing is not None:
                by_host.setdefault(worker.batcher.host, []).append(worker)
        for host, running in by_host.items():
            self._check_host(self.cluster.server.pools[host], running)

    def _check_host(self, pool: HostPool, running: Sequence[SimWorker]) -> None:
        written = dict(self._landing(pool.host))
        for worker in running:
            assert worker.executing is not None
            for part in worker.executing.slices:
                held, _ = pool.table(part.request_id)
                tables = (held, _before_spill(pool, part.request_id, held))
                known = any(table[: len(part.block_table)] == tuple(part.block_table) for table in tables)
                require(known, "INV-3", _lost_blocks(worker, part.request_id, part.block_table, held))
                _check_window(pool, part)
            _note_writes(worker.executing, pool.block_tokens, written)
        for worker in running:
            assert worker.executing is not None
            _check_readers(worker.executing, written, pool)
        self._check_wires(pool.host, written)
        kept = {block for write in self.cluster.stores.writing if write.host == pool.host for block in write.blocks}
        require(not kept & written.keys(), "INV-3", f"blocks {kept & written.keys()} are written while a store reads")

    def _check_wires(self, host: HostId, written: Mapping[BlockId, RequestId]) -> None:
        """INV-3: only the request of a copy may write the blocks that the copy reads."""
        for copy in self.cluster.wires.under_way:
            for block in copy.read if copy.source == host else ():
                writer = written.get(block, copy.request_id)
                what = f"a wire reads block {block} for {copy.request_id}, and {writer} writes it"
                require(writer == copy.request_id, "INV-3", what)

    def _landing(self, host: HostId) -> list[tuple[BlockId, RequestId]]:
        """Return the blocks of a host that wires and stores write now, each with its request."""
        copies = [copy for copy in self.cluster.wires.under_way if copy.target == host]
        reads = [load for load in self.cluster.stores.reading if load.host == host]
        return [(block, copy.request_id) for copy in (*copies, *reads) for block in copy.write]


def _before_spill(pool: HostPool, request_id: RequestId, table: tuple[BlockId, ...]) -> tuple[BlockId, ...]:
    """Return the table with the arena blocks that the worker will spill after its step."""
    holding = pool.grants.holdings.get(request_id)
    if holding is None or not holding.spilling:
        return table
    return table[: holding.behind - len(holding.spilling)] + holding.spilling + table[holding.behind :]


def _lost_blocks(worker: SimWorker, request_id: RequestId, table: Sequence[BlockId], held: Sequence[BlockId]) -> str:
    return f"{worker.id} computes {request_id} in blocks {list(table)}, but the request holds {list(held)}"


def _check_window(pool: HostPool, part: Slice) -> None:
    """INV-3: released blocks of a live request lie behind the model's window."""
    if pool.window is not None:
        seen_from, held_from = part.start - pool.window.tokens + 1, pool.held_from_tokens(part.request_id)
        what = f"{part.request_id} goes on at token {part.start} and sees from {seen_from}, but holds from {held_from}"
        require(held_from <= max(0, seen_from), "INV-3", what)


def _note_writes(step: Step, block_tokens: int, written: dict[BlockId, RequestId]) -> None:
    """INV-3: no two requests write into one block."""
    for part in step.slices:
        last = (part.start + part.count - 1) // block_tokens
        for block in part.block_table[part.start // block_tokens : last + 1]:
            writer = written.setdefault(block, part.request_id)
            require(writer == part.request_id, "INV-3", f"{writer} and {part.request_id} both write block {block}")


def _check_readers(step: Step, written: Mapping[BlockId, RequestId], pool: HostPool) -> None:
    """INV-3: no request reads a block that another one is writing. Blocks behind the window are never read."""
    for part in step.slices:
        for block in part.block_table[pool.behind(part.start) :]:
            writer = written.get(block, part.request_id)
            require(writer == part.request_id, "INV-3", f"{part.request_id} reads block {block}, {writer} writes it")


def check_end(watch: Watch, *, ended: bool, failures_allowed: bool) -> None:
    """Check the invariants at the end of a run. `ended`: the run finished within its limits of time and events."""
    cluster = watch.cluster
    journal = cluster.server.journal
    open_requests = [life.request.id for life in journal.lives.values() if not life.closes]
    require(
        ended, "INV-1", f"no end after {cluster.loop.events} events, {cluster.loop.now_s:.1f} s; open {open_requests}"
    )
    require(not open_requests, "INV-1", f"nothing is left to do, and {open_requests} never closed")
    for life in journal.lives.values():
        check_close(life, failures_allowed=failures_allowed)
        check_order(life)
    watch.check_pool()
    check_nothing_left(cluster)
    check_bounds(watch)
    check_replay(cluster, watch.policy)


def check_close(life: Life, *, failures_allowed: bool) -> None:
    """INV-1: a request closes exactly once, and fails only if the run has faults that kill workers."""
    request_id = life.request.id
    outcomes = [close.outcome for _, close in life.closes]
    require(len(outcomes) == 1, "INV-1", f"{request_id} closed {len(outcomes)} times: {outcomes}")
    if not failures_allowed:
        why = life.closes[0][1].reason
        require(outcomes[0] != "failed", "INV-1", f"{request_id} failed though no worker died: {why}")


def check_refusal(cluster: SimCluster, life: Life) -> None:
    """INV-9: a request is rejected with `queue_full` only if the queue is full. Call this when the request closes."""
    if life.closes[-1][1].reject == "queue_full":
        live, places = cluster.server.coordinator.live_requests, cluster.spec.queue_requests_max
        require(live >= places, "INV-9", f"{life.request.id} was refused with {live} of {places} places taken")


def check_order(life: Life) -> None:
    """INV-5: arrival <= prefill <= first token <= ... <= close; a handoff lies between prefill and close."""
    times = [("arrival", life.request.arrived_at_s)]
    if life.token_times_s and life.started_at_s is not None:
        times.append(("prefill", life.started_at_s))
    times += [(f"token {index}", time_s) for index, time_s in enumerate(life.token_times_s)]
    times += [("close", time_s) for time_s, _ in life.closes]
    _check_ascending(life, times)
    handoffs = [("arrival", life.request.arrived_at_s)]
    handoffs += [("handoff", time_s) for time_s in life.handoffs_s]
    handoffs += [("close", time_s) for time_s, _ in life.closes]
    _check_ascending(life, handoffs)
    if life.token_times_s:
        require(life.started_at_s is not None, "INV-5", f"{life.request.id} has tokens and never started")
    if life.handoffs_s and life.token_times_s and not life.leaves_first_token:
        first_s = life.token_times_s[0]
        require(first_s <= life.handoffs_s[0], "INV-5", f"{life.request.id} was handed off before its first token")


def _check_ascending(life: Life, times: Sequence[tuple[str, float]]) -> None:
    for (before, before_s), (after, after_s) in pairwise(times):
        what = f"{life.request.id}: {after} at {after_s} s is before {before} at {before_s} s"
        require(before_s <= after_s, "INV-5", what)


def check_bounds(watch: Watch) -> None:
    """INV-9: admission bounds the live requests, and their number bounds the commands in links and inboxes."""
    cluster = watch.cluster
    admitted_max = cluster.spec.queue_requests_max
    require(watch.live_max <= admitted_max, "INV-9", f"{watch.live_max} live requests, admission allows {admitted_max}")
    attempts = max((life.attempt for life in cluster.server.journal.lives.values()), default=0)
    ticks = sum(isinstance(decision.event, Tick) for decision in cluster.server.journal.decisions())
    losses = sum(isinstance(decision.event, HostLost) for decision in cluster.server.journal.decisions())
    # a tick moves a request once at most, and the loss of a host counts against no request
    attempts_max = cluster.server.coordinator.retries.rules.attempts_max + ticks + losses
    require(attempts <= attempts_max, "INV-9", f"{attempts} attempts of one request, {attempts_max} are allowed")
    cluster.note_queues()
    bound = WORDS_PER_REQUEST_MAX * (1 + len(cluster.server.journal.lives))
    require(
        cluster.inbound_max <= bound, "INV-9", f"{cluster.inbound_max} commands waited for one worker, bound {bound}"
    )


def check_replay(cluster: SimCluster, policy: str) -> None:
    """INV-7: a fresh cluster that receives the same events makes the same decisions, in pools and transfers too."""
    fresh = fresh_cluster(cluster.spec, play_policies(cluster.spec, policy))
    agreed, difference = replay(fresh, cluster.server.journal.turns)
    require(difference is None, "INV-7", f"after {agreed} events a replay decides otherwise: {difference}")


def check_text(life: Life, window: Window | None = None, *, layers: int = 1) -> None:
    """INV-8: the output equals that of the request computed alone. An unfinished output is a prefix of it."""
    prompt = life.tokens[: life.request.prompt_tokens].tolist()
    output = life.output
    expected = text_alone(life.request, prompt, window=window, layers=layers)
    finished = life.closes[0][1].outcome == "finished"
    wanted = expected if finished else expected[: len(output)]
    where = next((index for index, pair in enumerate(zip(output, wanted, strict=False)) if pair[0] != pair[1]), "end")
    require(output == wanted, "INV-8", f"{life.request.id}: {len(output)} tokens of {len(wanted)}, differs at {where}")
    if life.request.sampling.prompt_logprobs and output:
        told, asked = life.prompt_logprobs, life.request.prompt_tokens - 1
        require(told == asked, "INV-8", f"{life.request.id}: {told} log probabilities for {asked} prompt tokens")


def text_alone(
    request: Request,
    prompt: Sequence[int],
    *,
    block_tokens: int = 16,
    window: Window | None = None,
    layers: int = 1,
) -> list[int]:
    """Return the output of a request that is computed alone: no batch, no scheduler, no shared block.

    This is the oracle of INV-8. It computes the prompt in one step, then one token a step.
    """
    tokens_max = len(prompt) + request.output_tokens_max
    blocks = -(-tokens_max // block_tokens)
    engine = ContentEngine(blocks=blocks, block_tokens=block_tokens, window=window, layers=layers)
    table = [BlockId(block) for block in range(blocks)]
    tokens, start = list(prompt), 0
    while len(tokens) < tokens_max:
        part = Slice(
            request_id=request.id,
            tokens=tokens,
            start=start,
            count=len(tokens) - start,
            block_table=table,
            sample=True,
            sampling=request.sampling,
            prompt_tokens=len(prompt),
        )
        token = engine.execute(Step((part,))).slices[0].token
        assert token is not None
        start = len(tokens)
        tokens.append(token)
        if token in request.sampling.stop_token_ids:
            break
    return tokens[len(prompt) :]
