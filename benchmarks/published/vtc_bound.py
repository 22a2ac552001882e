"""VTC's fairness bound (OSDI 2024, theorem 4.4) on the fleets that the paper does not have: disaggregated ones.

    python benchmarks/published/vtc_bound.py

Two tenants that always have requests waiting, one with long and one with short ones. Over any period, the difference
of their service must stay within 2 max(w_p L_input, w_q M), where M is what fits into memory at once. Under first come
first served the same difference grows without bound. Writes benchmarks/results/published-vtc-bound.json.
"""

from __future__ import annotations

from outcome import store

from baton.core.config import BatchLimits, Plugin, PolicyConfig, Topology
from baton.core.types import WorkerId
from baton.decide.policy.policy_sets import POLICY_SETS
from baton.lab.report.service_gap import gap_bound, largest_gap
from baton.lab.sim.cells import CellJob
from baton.lab.sim.faults import Flip, TimedFault
from baton.lab.sim.replay_trace import play_cell
from baton.lab.sim.spec import ClusterSpec, SimKV
from baton.lab.workload.request import Trace, TraceRequest

REQUESTS = 600
TENANTS = {"short": (64, 64), "long": (256, 256)}
"""Prompt and answer tokens, as in the paper's synthetic loads: constant, and 4 times as long."""
MEMORY_TOKENS = 10_000
FLIP_S = 10.0
VTC = POLICY_SETS["vtc"]
FCFS = VTC.__class__(
    admission=VTC.admission,
    routing=VTC.routing,
    placement=VTC.placement,
    batching=VTC.batching,
    fairness=Plugin(use="fcfs"),
)
FLEETS = {
    "mixed": Topology(mixed=1),
    "1P1D": Topology(prefill=1, decode=1),
    "2P2D": Topology(prefill=2, decode=2),
    "2P2D with role flips": Topology(prefill=2, decode=2),
}


def load() -> Trace:
    """Both tenants send far more than any of the fleets serves: they are backlogged from the first second on."""
    made: list[TraceRequest] = []
    for place in range(REQUESTS):
        for name, (prompt, answer) in TENANTS.items():
            every_s = 0.02 if name == "long" else 0.04
            made.append(TraceRequest(at_s=place * every_s, input_tokens=prompt, output_tokens=answer, tenant=name))
    made.sort(key=lambda request: request.at_s)
    return Trace(format="made", timing="absolute", requests=tuple(made))


def flips() -> tuple[TimedFault, ...]:
    """A prefill and a decode worker change their roles, back and forth."""
    return tuple(
        Flip(worker=WorkerId(name), at_s=FLIP_S * count, role=roles[count % 2])
        for count in range(1, 20)
        for name, roles in (("prefill-1", ("prefill", "decode")), ("decode-1", ("decode", "prefill")))
    )


def gap(fleet: str, policy: PolicyConfig) -> float:
    spec = ClusterSpec(
        topology=FLEETS[fleet],
        kv=SimKV(blocks=MEMORY_TOKENS // 16, block_tokens=16),
        batch=BatchLimits(step_tokens_max=512, requests_max=64),
        queue_requests_max=100_000,
        output_tokens_max=1024,
    )
    faults = flips() if "flips" in fleet else ()
    return largest_gap(
        play_cell(CellJob(spec=spec, trace=load(), policy=policy, seed=0, slo=None, faults=faults)), *TENANTS
    )


def main() -> None:
    bound = gap_bound(max(prompt for prompt, _ in TENANTS.values()), MEMORY_TOKENS)
    gaps: dict[str, dict[str, float]] = {}
    for name, policy in {"vtc": VTC, "first-come-first-served": FCFS}.items():
        gaps[name] = {fleet: gap(fleet, policy) for fleet in FLEETS}
        for fleet, found in gaps[name].items():
            print(f"{name:24} {fleet:22} largest gap {found:10.0f} weighted tokens, bound {bound:.0f}", flush=True)
    store(
        "vtc-bound",
        {
            "requests": len(load().requests),
            "bound_weighted_tokens": bound,
            "worst_difference_weighted_tokens": gaps,
            "holds": max(gaps["vtc"].values()) <= bound,
        },
    )


if __name__ == "__main__":
    main()
