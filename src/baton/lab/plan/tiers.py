"""Judge KV tiers below the arenas: added prefix hits in the trace, load time, and price."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Struct, structs

from baton.core.validation import Bandwidth, Range, Seconds
from baton.lab.plan.planned_fleet import PlannedFleet
from baton.lab.plan.search import Search, Shape
from baton.lab.workload.request import TraceRequest


class TierSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tier that keeps KV blocks evicted from the arenas: memory or a disk of each host, or one shared store."""

    name: str
    size_bytes: Annotated[float, Range(above=0.0, such_as="bytes, such as 512e9")]
    """Size per host, or in total if `shared`."""
    bytes_per_s: Bandwidth
    """Read bandwidth of one host."""
    latency_s: Seconds = 0.001
    usd_per_hour: Annotated[float, Range(least=0.0, such_as="USD of one tier and hour, such as 0.4")] = 0.0
    """Price of the tier per host. The plan gives every worker a host of its own."""
    shared: bool = False


class TierAdvice(Struct, frozen=True, kw_only=True):
    """Screening results of the plan with one tier, or without any."""

    tier: str
    """Name of the tier. Empty: no tier."""
    cached_ratio: float
    """Share of prompt tokens that need no prefill: the trace's hit ratio in a cache of this size."""
    load_s: float
    """Time to load a mean prompt's blocks from the tier. It is subtracted from the TTFT target."""
    rate_rps: float
    value: float
    """Value of the screened fleet in the objective's unit. 0: no fleet meets the SLO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holding:
    """Prefix cache of a fleet's hosts without a tier."""

    tokens: float
    hosts: int


def choose_tier(
    search: Search, shape: Shape, tiers: Sequence[TierSpec], requests: Sequence[TraceRequest]
) -> tuple[Search, list[TierAdvice]]:
    """Return the search with the best tier or none, and the results of all choices, best first."""
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
    """Return the search with the tier's hit ratio, its load time taken from the TTFT target, and its price added."""
    slo = structs.replace(search.demand.slo, ttft_s=search.demand.slo.ttft_s - load_s)
    return replace(
        search,
        demand=replace(search.demand, cached_ratio=ratio, slo=slo),
        options=[replace(option, tier_usd_per_hour=tier.usd_per_hour) for option in search.options],
        known_fleets={},
    )


def _holding(fleet: PlannedFleet, search: Search) -> _Holding:
    """Return the tokens that prefill and mixed arenas can cache beside running requests, and the number of hosts."""
    groups = [group for group in fleet.groups if group.role != "decode"]
    context_tokens = search.demand.context_tokens
    tokens = sum(
        group.workers * max(0.0, group.option.facts.kv_tokens_max - group.capacity.requests * context_tokens)
        for group in groups
    )
    return _Holding(tokens=tokens, hosts=sum(group.workers for group in groups))


def hit_ratio(requests: Sequence[TraceRequest], tokens: float) -> float:
    """Return the share of prompt tokens that hit an LRU cache of `tokens` tokens."""
    held: OrderedDict[int, None] = OrderedDict()
    hit_tokens = 0
    for request in requests:
        leading = 0
        while leading < len(request.prefix_ids) and request.prefix_ids[leading] in held:
            leading += 1
        hit_tokens += min(leading * request.prefix_block_tokens, request.input_tokens - 1)
        # A block is useful only with all blocks before it, so the last blocks are evicted first.
        for name in reversed(request.prefix_ids):
            held[name] = None
            held.move_to_end(name)
        while len(held) * request.prefix_block_tokens > tokens:
            held.popitem(last=False)
    return hit_tokens / max(1, sum(request.input_tokens for request in requests))


def describe_tiers(found: Sequence[TierAdvice]) -> list[str]:
    """Return one sentence per tier that gives its gain and whether to use it. Empty if no tier was tried."""
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
