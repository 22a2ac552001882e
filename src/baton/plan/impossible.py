"""What to say when nothing meets the SLO: by how much it is missed, and the nearest thing that works."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from baton.plan.capacity import STEP_TOKENS, prompt_s
from baton.plan.demand import Demand
from baton.plan.frontier import fastest_tpot_s
from baton.plan.options import Option
from baton.plan.search import Search

LOOSEN = 1.25
"""TTFT and TPOT targets are loosened by this factor until something meets them."""
ROUNDS_MAX = 24


def why_impossible(search: Search) -> list[str]:
    """Name the target that cannot be met, the fastest option's time, and a target that works."""
    demand = search.demand
    tokens = demand.input_quantile(demand.attainment_ratio)
    ttft_s, fastest = min((_alone_s(option, demand, tokens), option.name) for option in search.options)
    tpot_s = fastest_tpot_s(search)
    found: list[str] = []
    if ttft_s > demand.slo.ttft_s:
        found.append(
            f"no hardware meets a TTFT of {demand.slo.ttft_s:g} s: the fastest option, {fastest}, takes {ttft_s:.3g} s "
            f"for a prompt of {tokens} tokens ({demand.attainment_ratio:.0%} are at most as long), with nobody waiting"
        )
    if tpot_s > demand.slo.tpot_s:
        found.append(
            f"no hardware meets a TPOT of {demand.slo.tpot_s:g} s: the fastest step of one request takes {tpot_s:.3g} s"
        )
    if not found:
        found.append(
            f"no fleet meets TTFT {demand.slo.ttft_s:g} s and TPOT {demand.slo.tpot_s:g} s for "
            f"{demand.attainment_ratio:.0%} of the requests: each is possible for one request alone, not under load"
        )
    return [*found, _nearest(search)]


def _alone_s(option: Option, demand: Demand, tokens: int) -> float:
    new = max(1, round(tokens * (1 - demand.cached_ratio)))
    return min(prompt_s(option.cost, new=new, cached=tokens - new, step_tokens=limit) for limit in STEP_TOKENS)


def _nearest(search: Search) -> str:
    """Loosen what is missed, then both, until a fleet meets it."""
    slo = search.demand.slo
    for name in ("ttft_s", "tpot_s", "both"):
        for rounds in range(1, ROUNDS_MAX):
            factor = LOOSEN**rounds
            ttft_s = slo.ttft_s * (factor if name != "tpot_s" else 1.0)
            tpot_s = slo.tpot_s * (factor if name != "ttft_s" else 1.0)
            looser = structs.replace(slo, ttft_s=ttft_s, tpot_s=tpot_s)
            fleet = replace(search, demand=replace(search.demand, slo=looser)).fleet("best")
            if fleet is not None:
                return f"nearest that works: --ttft-slo-s {ttft_s:.3g} --tpot-slo-s {tpot_s:.3g}, with {fleet.name}"
    return "nothing near works: take faster hardware, a smaller model, or shorter prompts"
