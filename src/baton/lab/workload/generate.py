"""Draw the requests of a workload file: one stream per tenant, merged in order of time."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice, takewhile
from random import Random
from typing import NamedTuple

from msgspec.structs import replace

from baton.core.types import Slo
from baton.lab.workload.amounts import Amount, sample, sample_count
from baton.lab.workload.arrivals import Arrivals, draw_times_s, scale_arrivals
from baton.lab.workload.describe import Conversation, SystemPrompts, Tenant, Workload
from baton.lab.workload.request import Trace, TraceRequest

BLOCK_TOKENS = 16
"""Tokens of a prefix block."""


@dataclass(slots=True, kw_only=True)
class _TenantStream:
    """The endless requests of one tenant."""

    name: str
    share: float
    """Weight of the tenant, which orders sessions that start at the same time."""
    arrivals: Arrivals
    input_tokens: Amount
    output_tokens: Amount
    system_prompts: SystemPrompts | None
    conversation: Conversation | None
    slo: Slo | None
    priority: int
    draw: Random
    ids: Iterator[int]
    """Unused ids of prefix blocks. All streams share them, so that different blocks have different ids."""
    texts: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """Block ids of the system prompts drawn so far."""

    def starts(self) -> Iterator[_SessionStart]:
        """Yield session starts in order of time.

        Take a session's first request before the next start: both draw from the same random numbers.
        """
        return (_SessionStart(at_s, number, self) for number, at_s in enumerate(self.arrivals.times_s(self.draw)))

    def session(self, number: int, at_s: float) -> Iterator[TraceRequest]:
        """Yield the turns of one conversation, or a single request if the tenant has no conversations."""
        system = self._system_blocks()
        first = self._request(at_s, len(system) * BLOCK_TOKENS + sample_count(self.input_tokens, self.draw), system)
        talk = self.conversation
        if talk is None:
            yield first
            return
        draw = Random(self.draw.getrandbits(64))  # one generator per session, because sessions interleave
        session = f"{self.name or 'session'}-{number}"
        followup = self.input_tokens if talk.followup_tokens is None else talk.followup_tokens
        request = self._named(first, session, 0)
        for turn in range(1, sample_count(talk.turns, draw) + 1):
            yield request
            think_s = max(0.0, sample(talk.think_s, draw))
            input_tokens = request.input_tokens + request.output_tokens + sample_count(followup, draw)
            output_tokens = sample_count(self.output_tokens, draw)
            if talk.context_tokens is not None and input_tokens + output_tokens > talk.context_tokens:
                return
            request = self._named(
                replace(
                    request,
                    at_s=request.at_s + think_s,
                    input_tokens=input_tokens,
                    output_tokens=output_tokens,
                    think_s=think_s,
                ),
                session,
                turn,
            )

    def _request(self, at_s: float, input_tokens: int, blocks: tuple[int, ...]) -> TraceRequest:
        return TraceRequest(
            at_s=at_s,
            input_tokens=input_tokens,
            output_tokens=sample_count(self.output_tokens, self.draw),
            prefix_ids=blocks,
            prefix_block_tokens=BLOCK_TOKENS if blocks else 0,
            tenant=self.name,
            priority=self.priority,
            slo=self.slo,
        )

    def _named(self, request: TraceRequest, session: str, turn: int) -> TraceRequest:
        """Return the request with ids for all blocks of its prompt, because the next turn begins with these blocks."""
        missing = -(-request.input_tokens // BLOCK_TOKENS) - len(request.prefix_ids)
        blocks = (*request.prefix_ids, *islice(self.ids, missing))
        return replace(request, session=session, turn=turn, prefix_ids=blocks, prefix_block_tokens=BLOCK_TOKENS)

    def _system_blocks(self) -> tuple[int, ...]:
        if self.system_prompts is None:
            return ()
        text = self.draw.randrange(self.system_prompts.texts)
        if text not in self.texts:
            self.texts[text] = tuple(islice(self.ids, -(-self.system_prompts.tokens // BLOCK_TOKENS)))
        return self.texts[text]


class _SessionStart(NamedTuple):
    at_s: float
    number: int
    """Number of the session in its stream."""
    stream: _TenantStream

    @property
    def order(self) -> tuple[float, float]:
        """Sort key: time, then the session's number over the tenant's share, so that tenants mix by their shares."""
        return self.at_s, self.number / self.stream.share


def _interleave(starts: Iterable[_SessionStart]) -> Iterator[TraceRequest]:
    """Yield the requests of all sessions in order of `at_s`."""
    waiting: list[tuple[float, int, TraceRequest, Iterator[TraceRequest]]] = []
    """Heap of the next turn of every open session, with the later turns."""

    def push_next(place: int, turns: Iterator[TraceRequest]) -> None:
        request = next(turns, None)
        if request is not None:
            heapq.heappush(waiting, (request.at_s, place, request, turns))

    def pop() -> TraceRequest:
        _, place, request, turns = heapq.heappop(waiting)
        push_next(place, turns)
        return request

    for place, start in enumerate(starts):
        while waiting and waiting[0][0] <= start.at_s:
            yield pop()
        turns = start.stream.session(start.number, start.at_s)
        yield next(turns)
        push_next(place, turns)
    while waiting:
        yield pop()


def generate(workload: Workload, *, seed: int, limit: int | None = None) -> Trace:
    """Draw the requests of a workload with neither `trace` nor `servegen`, in order of time.

    The same seed gives the same requests; `limit` keeps the first of them.
    """
    starts = heapq.merge(*(stream.starts() for stream in _streams(workload, seed)), key=lambda start: start.order)
    requests = _interleave(islice(starts, workload.sessions))
    return Trace(format="workload", timing="absolute", requests=tuple(limit_requests(requests, workload, limit)))


def synthetic_trace(count: int, lengths: tuple[int, int], arrivals: Arrivals, draw: Random) -> Trace:
    """Draw `count` requests of equal (input, output) tokens that share no prefix."""
    requests = tuple(
        TraceRequest(at_s=at_s, input_tokens=lengths[0], output_tokens=lengths[1])
        for at_s in draw_times_s(arrivals, count, draw)
    )
    return Trace(format="synthetic", timing="absolute", requests=requests)


def limit_requests(requests: Iterable[TraceRequest], workload: Workload, limit: int | None) -> Iterator[TraceRequest]:
    """Yield the requests up to the end that the workload or the limit sets, whichever comes first."""
    counts = [bound for bound in (workload.requests, limit) if bound is not None]
    duration_s = workload.duration_s
    if duration_s is not None:
        requests = takewhile(lambda request: request.at_s < duration_s, requests)
    return islice(requests, min(counts, default=None))


def _streams(workload: Workload, seed: int) -> list[_TenantStream]:
    tenants = workload.tenants or (Tenant(name=""),)
    shares = sum(tenant.share for tenant in tenants if tenant.arrivals is None)
    ids = count()
    return [_stream(workload, tenant, shares, Random(f"workload {seed} {tenant.name}"), ids) for tenant in tenants]


def _stream(workload: Workload, tenant: Tenant, shares: float, draw: Random, ids: Iterator[int]) -> _TenantStream:
    slo = tenant.slo if tenant.slo is not None else workload.slo
    return _TenantStream(
        name=tenant.name,
        share=tenant.share,
        arrivals=tenant.arrivals or scale_arrivals(workload.arrivals, tenant.share / shares),
        input_tokens=workload.input_tokens if tenant.input_tokens is None else tenant.input_tokens,
        output_tokens=workload.output_tokens if tenant.output_tokens is None else tenant.output_tokens,
        system_prompts=tenant.system_prompts or workload.system_prompts,
        conversation=tenant.conversation or workload.conversation,
        slo=None if slo is None else workload.slo_classes[slo],
        priority=tenant.priority,
        draw=draw,
        ids=ids,
    )
