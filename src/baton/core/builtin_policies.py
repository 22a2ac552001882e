"""Short public names of the built-in policies, used in configuration: `policy.batching.use = "slo-chunked"`.

A short name does not depend on the module in which a policy lies, so moving a module breaks no user's file.
Policies under `baton.lab` reproduce published systems. They are imported only when a configuration names them.
"""

from __future__ import annotations

_DECIDE = "baton.decide.policy"
_LAB = "baton.lab.policies"

BUILT_IN: dict[str, str] = {
    "slo-headroom": f"{_DECIDE}.slo_headroom:SloHeadroom",
    "bounded-queue": f"{_DECIDE}.admission:BoundedQueue",
    "admit-all": f"{_DECIDE}.admission:AdmitAll",
    "earliest-first-token": f"{_DECIDE}.routing:EarliestFirstToken",
    "fastest-step": f"{_DECIDE}.placement:FastestStep",
    "slo-order": f"{_DECIDE}.fairness:SloOrder",
    "fcfs": f"{_DECIDE}.fairness:FirstComeFirstServed",
    "mixed-chunked": f"{_DECIDE}.batching:MixedChunked",
    "prefill-first": f"{_DECIDE}.batching:PrefillFirst",
    "static-batching": f"{_DECIDE}.batching:StaticBatching",
    "slo-chunked": f"{_DECIDE}.batching:SloChunked",
    "lru": f"{_DECIDE}.eviction:LeastRecentlyUsed",
    "lfu": f"{_DECIDE}.eviction:LeastFrequentlyUsed",
    "cost-aware": f"{_DECIDE}.eviction:CostAware",
    "tenant-quota": f"{_DECIDE}.quota:TenantQuota",
    "static-roles": f"{_DECIDE}.roles:StaticRoles",
    "demand-roles": f"{_DECIDE}.demand:DemandRoles",
    "fixed-fleet": f"{_DECIDE}.scaling:FixedFleet",
    "forecast-scaling": f"{_DECIDE}.demand:ForecastScaling",
    "recent-demand": f"{_DECIDE}.forecast:RecentDemand",
    "time-of-day": f"{_DECIDE}.forecast:TimeOfDay",
    "arima": f"{_DECIDE}.forecast_series:Arima",
    "exponential-smoothing": f"{_DECIDE}.forecast_series:ExponentialSmoothing",
    "no-moves": f"{_DECIDE}.moves:NoMoves",
    "recent-mean": f"{_DECIDE}.lengths:RecentMean",
    "when-done": f"{_DECIDE}.streaming:WhenDone",
    "while-computing": f"{_DECIDE}.streaming:WhileComputing",
    "direct-handoff": f"{_DECIDE}.handoff:DirectHandoff",
    "pool-handoff": f"{_DECIDE}.handoff:PoolHandoff",
    "cheapest-handoff": f"{_DECIDE}.handoff:CheapestHandoff",
    "first-token-by-prefill": f"{_DECIDE}.handoff:FirstTokenByPrefill",
    "first-token-by-decode": f"{_DECIDE}.handoff:FirstTokenByDecode",
    "random": f"{_LAB}.baselines:RandomWorker",
    "round-robin": f"{_LAB}.baselines:RoundRobin",
    "least-load": f"{_LAB}.baselines:LeastLoad",
    "shortest-queue": f"{_LAB}.baselines:ShortestQueue",
    "colocated": f"{_LAB}.baselines:Colocated",
    "global-cache-aware": f"{_LAB}.cache_aware:GlobalCacheAware",
    "dynamo-router": f"{_LAB}.cache_aware:DynamoRouter",
    "sglang-router": f"{_LAB}.cache_aware:SglangRouter",
    "llm-d-scorer": f"{_LAB}.cache_aware:LlmdScorer",
    "splitwise-routing": f"{_LAB}.splitwise:SplitwiseRouting",
    "splitwise-placement": f"{_LAB}.splitwise:SplitwisePlacement",
    "tetriinfer-placement": f"{_LAB}.tetriinfer:TetriInferPlacement",
    "tetriinfer-roles": f"{_LAB}.tetriinfer:TetriInferRoles",
    "arrow-routing": f"{_LAB}.arrow:ArrowRouting",
    "arrow-roles": f"{_LAB}.arrow:ArrowRoles",
    "mooncake-rejection": f"{_LAB}.mooncake:PredictedRejection",
    "mooncake-rejection-by-load": f"{_LAB}.mooncake:EarlyRejection",
    "vtc": f"{_LAB}.vtc:VirtualTokenCounter",
    "llumnix-routing": f"{_LAB}.llumnix:LlumnixRouting",
    "llumnix-moves": f"{_LAB}.llumnix:LlumnixMoves",
}
"""The `module:Class` of each built-in policy, by its short name."""

SHORT_NAMES: dict[str, str] = {spec.partition(":")[2]: name for name, spec in BUILT_IN.items()}
"""The short name of each built-in policy, by its class name."""

RENAMED_CLASSES: dict[str, str] = {
    "LeastPressure": "slo-headroom",
    "PromisesKept": "slo-order",
    "TakeAll": "admit-all",
    "StayPut": "no-moves",
    "AlwaysDirect": "direct-handoff",
    "AlwaysCentral": "pool-handoff",
    "CheapestWay": "cheapest-handoff",
    "ByPrefill": "first-token-by-prefill",
    "ByDecode": "first-token-by-decode",
    "TwoChoices": "tetriinfer-placement",
    "IdleFlip": "tetriinfer-roles",
    "Freest": "llumnix-routing",
    "Rebalance": "llumnix-moves",
}
"""The short name of each built-in policy whose class had another name in earlier versions, for error messages."""
