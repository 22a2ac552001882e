"""Play a trace on a simulated cluster: what its clients would have seen."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from functools import partial

from baton.core.types import Request, RequestId, Sampling
from baton.kv.hashing import block_hashes
from baton.metrics.summary import RequestRecord
from baton.sim.checkers import check_nothing_left
from baton.sim.cluster import SimCluster, build_cluster
from baton.sim.engines import STOP_TOKEN, LengthEngine
from baton.sim.journal import Life
from baton.sim.policies import build_policies
from baton.sim.spec import ClusterSpec
from baton.workload.prompts import PromptMaker
from baton.workload.request import Trace, TraceRequest

_SAMPLING = Sampling(stop_token_ids=(STOP_TOKEN,))


@dataclass(slots=True, kw_only=True)
class _Replay:
    """Makes a prompt when its request arrives and forgets it when the request has closed."""

    spec: ClusterSpec
    prompts: PromptMaker
    output_tokens: dict[RequestId, int] = field(default_factory=dict[RequestId, int])
    """True lengths, for the engine alone."""
    records: list[RequestRecord] = field(default_factory=list[RequestRecord])

    def arrive(self, cluster: SimCluster, request: TraceRequest, index: int) -> None:
        room_tokens = self.spec.request_tokens_max - request.input_tokens
        if room_tokens < 1:
            self._refuse(request)
            return
        prompt = self.prompts.token_ids(request, index)
        request_id = RequestId(f"request-{index}")
        self.output_tokens[request_id] = request.output_tokens
        arriving = Request(
            id=request_id,
            prompt_tokens=len(prompt),
            block_hashes=block_hashes(prompt, block_tokens=self.spec.kv.block_tokens),
            output_tokens_max=min(self.spec.output_tokens_max, room_tokens),
            arrived_at_s=cluster.loop.now_s,
            sampling=_SAMPLING,
            tenant=request.tenant,
        )
        cluster.server.submit(arriving, prompt)

    def _refuse(self, request: TraceRequest) -> None:
        """What the HTTP edge does with a prompt that the whole arena cannot hold."""
        record = RequestRecord(
            arrival_s=request.at_s, end_s=request.at_s, outcome="rejected", input_tokens=request.input_tokens
        )
        self.records.append(record)

    def close(self, cluster: SimCluster, life: Life) -> None:
        ended_at_s, close = life.closes[0]
        record = RequestRecord(
            arrival_s=life.request.arrived_at_s,
            end_s=ended_at_s,
            outcome=close.outcome,
            input_tokens=life.request.prompt_tokens,
            token_times_s=life.token_times_s,
            cached_tokens=life.cached_tokens,
        )
        self.records.append(record)
        del cluster.server.journal.lives[life.request.id]
        del self.output_tokens[life.request.id]


def replay_trace(spec: ClusterSpec, trace: Trace, *, policy: str, seed: int) -> list[RequestRecord]:
    """Play a whole trace and return what happened to each request, in the order in which they closed.

    `seed` decides tokens of prompts and delays of messages. Raises ConfigError for an unknown policy.
    """
    replaying = _Replay(spec=spec, prompts=PromptMaker(seed=seed))
    clusters: list[SimCluster] = []
    cluster = build_cluster(
        spec,
        build_policies(policy, spec),
        LengthEngine(replaying.output_tokens),
        seed=seed,
        keep_log=False,
        closed=lambda life: replaying.close(clusters[0], life),
    )
    clusters.append(cluster)
    for index, request in enumerate(trace.requests):
        cluster.loop.at(request.at_s, partial(replaying.arrive, cluster, request, index))
    cluster.loop.run(until_s=math.inf, events_max=sys.maxsize, after_each=_nothing)
    check_nothing_left(cluster)
    return replaying.records


def _nothing() -> None:
    """Nobody watches: a replay is for its figures, the campaign for the invariants."""
