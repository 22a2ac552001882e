"""Whether a tier below the arenas pays: what it adds to the prefix hits of the trace, what loading costs, its price."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Struct, structs

from baton.core.validation import Bandwidth, Range, Seconds
from baton.lab.plan.search import PlannedFleet, Search, Shape
from baton.lab.workload.request import TraceRequest


class TierSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory or a disk of each host, or one store of all, that keeps KV blocks which the arenas gave up."""

    name: str
    size_bytes: Annotated[float, Range(above=0.0, such_as="bytes, such as 512e9")]
    """Of each host; of all together where it is `shared`."""
    bytes_per_s: Bandwidth
    """What one host reads from it."""
    latency_s: Seconds = 0.001
    usd_per_hour: Annotated[float, Range(least=0.0, such_as="USD of one tier and hour, such as 0.4")] = 0.0
    """Of each host's; every worker is taken to have a host of its own."""
    shared: bool = False


class TierAdvice(Struct, frozen=True, kw_only=True):
    """What one choice of tier, or none, makes of the plan."""

    tier: str
    """Empty: no tier."""
    cached_ratio: float
    """Share of the prompts' tokens that need no prefill: what the trace hits in a cache of this size."""
    load_s: float
    """Of a mean prompt's blocks out of the tier: TTFT has so much less left."""
    rate_rps: float
    value: float
    """In the objective's unit, as found by the screening. 0: the SLO cannot be met."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holding:
    """What the hosts of a fleet keep of prefixes by themselves."""

    tokens: float
    hosts: int


def choose_tier(
    search: Search, shape: Shape, tiers: Sequence[TierSpec], requests: Sequence[TraceRequest]
) -> tuple[Search, list[TierAdvice]]:
    """Search with each tier and with none. Returns the search with the best of them, and all of them, best first."""
    bare = search.fleet(shape)
    if bare is None or not tiers:
        return search, []
    holding = _holding(bare, search)
    token_bytes = max(group.option.facts.kv_token_bytes for group in bare.groups)
    alone_ratio = hit_ratio(requests, holding.tokens)
    found = [(replace(search, demand=replace(search.demand, cached_ratio=alone_ratio)), "", alone_ratio, 0.0)]
    for tier in tiers:
        kept_tokens = tier.size_bytes / token_bytes * (1 if tier.shared else holding.hosts)
        ratio = hit_ratio(requests, holding.tokens + kept_tokens)
        loaded_bytes = (ratio - alone_ratio) * search.demand.input_tokens * token_bytes
        load_s = tier.latency_s + loaded_bytes / tier.bytes_per_s
        found.append((_with(search, tier, ratio, load_s), tier.name, ratio, load_s))
    judged: list[tuple[Search, TierAdvice]] = []
    for tried, name, ratio, load_s in found:
        fleet = tried.fleet(shape) if tried.demand.slo.ttft_s > 0 else None
        rate_rps = fleet.rate_rps if fleet else 0.0
        value = fleet.value(search.objective) if fleet else 0.0
        judged.append((tried, TierAdvice(tier=name, cached_ratio=ratio, load_s=load_s, rate_rps=rate_rps, value=value)))
    judged.sort(key=lambda each: -each[1].value)
    return judged[0][0], [advice for _, advice in judged]


def _with(search: Search, tier: TierSpec, ratio: float, load_s: float) -> Search:
    """The search where prompts are shorter by what the tier holds, TTFT by its loading, and hosts are dearer by it."""
    slo = structs.replace(search.demand.slo, ttft_s=search.demand.slo.ttft_s - load_s)
    return replace(
        search,
        demand=replace(search.demand, cached_ratio=ratio, slo=slo),
        options=[replace(option, tier_usd_per_hour=tier.usd_per_hour) for option in search.options],
    )


def _holding(fleet: PlannedFleet, search: Search) -> _Holding:
    """Prefixes lie where prompts are computed, in what running requests leave of the arena."""
    groups = [group for group in fleet.groups if group.role != "decode"]
    context_tokens = search.demand.context_tokens
    tokens = sum(
        group.workers * max(0.0, group.option.facts.kv_tokens_max - group.capacity.requests * context_tokens)
        for group in groups
    )
    return _Holding(tokens=tokens, hosts=sum(group.workers for group in groups))


def hit_ratio(requests: Sequence[TraceRequest], tokens: float) -> float:
    """Share of all prompt tokens that a cache of so many tokens holds when their request comes, least recently used."""
    held: OrderedDict[int, None] = OrderedDict()
    hit_tokens = 0
    for request in requests:
        leading = 0
        while leading < len(request.prefix_ids) and request.prefix_ids[leading] in held:
            leading += 1
        hit_tokens += min(leading * request.prefix_block_tokens, request.input_tokens - 1)
        for name in reversed(request.prefix_ids):  # a block is of no use without those before it: they go last
            held[name] = None
            held.move_to_end(name)
        while len(held) * request.prefix_block_tokens > tokens:
            held.popitem(last=False)
    return hit_tokens / max(1, sum(request.input_tokens for request in requests))


def describe_tiers(found: Sequence[TierAdvice]) -> list[str]:
    """Which tier, and what it is worth. Nothing where none was asked about."""
    if not found:
        return []
    words: list[str] = []
    bare = next(advice for advice in found if not advice.tier)
    for advice in found:
        if not advice.tier:
            continue
        gain = advice.value / bare.value - 1 if bare.value else 0.0
        taken = "recommended" if advice is found[0] else "not recommended"
        words.append(
            f"tier {advice.tier} is {taken}: {advice.cached_ratio:.0%} of the prompt tokens are held instead of "
            f"{bare.cached_ratio:.0%}, loading takes {advice.load_s * 1e3:.0f} ms of a mean prompt's TTFT, "
            f"and the fleet gives {gain:+.0%} for its price"
        )
    return words
