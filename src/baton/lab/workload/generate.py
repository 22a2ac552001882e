"""From a workload file to its requests: one stream per tenant, merged in order of time."""

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
from baton.lab.workload.arrivals import Arrivals, scale_arrivals
from baton.lab.workload.describe import Conversation, SystemPrompts, Tenant, Workload
from baton.lab.workload.request import Trace, TraceRequest

BLOCK_TOKENS = 16
"""Shared prefixes are named in blocks of this many tokens."""


@dataclass(slots=True, kw_only=True)
class _Stream:
    """The requests of one tenant, without end."""

    name: str
    share: float
    """Of those who come at one instant."""
    arrivals: Arrivals
    input_tokens: Amount
    output_tokens: Amount
    system_prompts: SystemPrompts | None
    conversation: Conversation | None
    slo: Slo | None
    priority: int
    draw: Random
    ids: Iterator[int]
    """Names of prefix blocks, shared by all streams so that no two name different blocks alike."""
    texts: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """Blocks of the system prompts drawn so far."""

    def openings(self) -> Iterator[_Opening]:
        """Yield in order of time. Whoever takes one takes its first request before the next opening: both are drawn."""
        return (_Opening(at_s, number, self) for number, at_s in enumerate(self.arrivals.times_s(self.draw)))

    def session(self, number: int, at_s: float) -> Iterator[TraceRequest]:
        """The turns of one conversation; a single request where there are none."""
        system = self._system_blocks()
        first = self._request(at_s, len(system) * BLOCK_TOKENS + sample_count(self.input_tokens, self.draw), system)
        talk = self.conversation
        if talk is None:
            yield first
            return
        draw = Random(self.draw.getrandbits(64))  # its own, so that sessions may interleave
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
        """Name every block of the prompt: a later turn begins with the same."""
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


class _Opening(NamedTuple):
    """A session begins."""

    at_s: float
    number: int
    """Of the session in its stream."""
    stream: _Stream

    @property
    def order(self) -> tuple[float, float]:
        """By time; at one instant every stream has its share."""
        return self.at_s, self.number / self.stream.share


def _interleaved(openings: Iterable[_Opening]) -> Iterator[TraceRequest]:
    """Yield requests in order of `at_s`: turns of open conversations between the openings of new ones."""
    waiting: list[tuple[float, int, TraceRequest, Iterator[TraceRequest]]] = []
    for place, opening in enumerate(openings):
        while waiting and waiting[0][0] <= opening.at_s:
            yield _advance(waiting)
        turns = opening.stream.session(opening.number, opening.at_s)
        yield next(turns)
        _queue(waiting, place, turns)
    while waiting:
        yield _advance(waiting)


def _advance(waiting: list[tuple[float, int, TraceRequest, Iterator[TraceRequest]]]) -> TraceRequest:
    _, place, request, turns = heapq.heappop(waiting)
    _queue(waiting, place, turns)
    return request


def _queue(
    waiting: list[tuple[float, int, TraceRequest, Iterator[TraceRequest]]], place: int, turns: Iterator[TraceRequest]
) -> None:
    following = next(turns, None)
    if following is not None:
        heapq.heappush(waiting, (following.at_s, place, following, turns))


def generate(workload: Workload, *, seed: int, limit: int | None = None) -> Trace:
    """Draw a workload's requests, in order of time. The same seed gives the same requests.

    Only for workloads with neither `trace` nor `servegen`. A limit gives the first requests of what none gives.
    """
    merged = heapq.merge(*(stream.openings() for stream in _streams(workload, seed)), key=lambda opening: opening.order)
    requests = _interleaved(islice(merged, workload.sessions))
    return Trace(format="workload", timing="absolute", requests=tuple(limit_requests(requests, workload, limit)))


def limit_requests(requests: Iterable[TraceRequest], workload: Workload, limit: int | None) -> Iterator[TraceRequest]:
    """End where the workload, or the limit, says."""
    counts = [bound for bound in (workload.requests, limit) if bound is not None]
    duration_s = workload.duration_s
    if duration_s is not None:
        requests = takewhile(lambda request: request.at_s < duration_s, requests)
    return islice(requests, min(counts, default=None))


def _streams(workload: Workload, seed: int) -> list[_Stream]:
    tenants = workload.tenants or (Tenant(name=""),)
    shares = sum(tenant.share for tenant in tenants if tenant.arrivals is None)
    ids = count()
    return [_stream(workload, tenant, shares, Random(f"workload {seed} {tenant.name}"), ids) for tenant in tenants]


def _stream(workload: Workload, tenant: Tenant, shares: float, draw: Random, ids: Iterator[int]) -> _Stream:
    slo = tenant.slo if tenant.slo is not None else workload.slo
    own_or_all = tenant.conversation if tenant.conversation is not None else workload.conversation
    system = tenant.system_prompts if tenant.system_prompts is not None else workload.system_prompts
    return _Stream(
        name=tenant.name,
        share=tenant.share,
        arrivals=tenant.arrivals
        if tenant.arrivals is not None
        else scale_arrivals(workload.arrivals, tenant.share / shares),
        input_tokens=workload.input_tokens if tenant.input_tokens is None else tenant.input_tokens,
        output_tokens=workload.output_tokens if tenant.output_tokens is None else tenant.output_tokens,
        system_prompts=system,
        conversation=own_or_all,
        slo=None if slo is None else workload.slo_classes[slo],
        priority=tenant.priority,
        draw=draw,
        ids=ids,
    )
