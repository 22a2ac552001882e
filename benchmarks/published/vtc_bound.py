"""VTC's fairness bound (OSDI 2024, theorem 4.4), with the batcher that serves, and its paper's 27 clients.

    python benchmarks/published/vtc_bound.py

Two clients that always have requests waiting, one with long and one with short ones, on one worker: the difference of
the service that they got must stay within 2 max(w_p L_input, w_q M), where M is what fits into memory at once. Under
first come first served the same difference grows without bound. Writes benchmarks/results/published-vtc-bound.json.
"""

from __future__ import annotations

from outcome import store

from baton.core.config import BatchLimits, Plugin, PolicyConfig, Topology
from baton.decide.policy.policy_sets import POLICY_SETS
from baton.lab.report.summary import RequestRecord
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import ClusterSpec, SimKV
from baton.lab.workload.request import Trace, TraceRequest

REQUESTS = 600
CLIENTS = {"short": (64, 64), "long": (256, 256)}
"""Prompt and answer tokens, as in the paper's synthetic loads: constant, and 4 times as long."""
MEMORY_TOKENS = 10_000
PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
FCFS = POLICY_SETS["vtc"].__class__(
    admission=POLICY_SETS["vtc"].admission,
    routing=POLICY_SETS["vtc"].routing,
    placement=POLICY_SETS["vtc"].placement,
    batching=POLICY_SETS["vtc"].batching,
    fairness=Plugin(use="fcfs"),
)


def load() -> Trace:
    """Both clients send far more than one worker serves: they are backlogged from the first second on."""
    made: list[TraceRequest] = []
    for place in range(REQUESTS):
        for name, (prompt, answer) in CLIENTS.items():
            every_s = 0.1 if name == "long" else 0.2
            made.append(TraceRequest(at_s=place * every_s, input_tokens=prompt, output_tokens=answer, tenant=name))
    made.sort(key=lambda request: request.at_s)
    return Trace(format="made", timing="absolute", requests=tuple(made))


def worst_gap(records: list[RequestRecord], until_s: float) -> float:
    """Return the largest difference of weighted service up to a time at which both still had requests waiting."""
    steps: list[tuple[float, str, float]] = []
    for record in records:
        if not record.token_times_s:
            continue
        steps.append((record.token_times_s[0], record.tenant, PROMPT_WEIGHT * record.input_tokens))
        steps += [(at_s, record.tenant, OUTPUT_WEIGHT) for at_s in record.token_times_s]
    served = dict.fromkeys(CLIENTS, 0.0)
    worst = 0.0
    for at_s, tenant, amount in sorted(steps):
        if at_s > until_s:
            break
        served[tenant] += amount
        worst = max(worst, abs(served["short"] - served["long"]))
    return worst


def backlogged_until_s(records: list[RequestRecord]) -> float:
    """When the first of the clients had its last request started."""
    last = {
        name: max(record.token_times_s[0] for record in records if record.tenant == name and record.token_times_s)
        for name in CLIENTS
    }
    return min(last.values())


def main() -> None:
    spec = ClusterSpec(
        topology=Topology(mixed=1),
        kv=SimKV(blocks=MEMORY_TOKENS // 16, block_tokens=16),
        batch=BatchLimits(step_tokens_max=512, requests_max=64),
        queue_requests_max=100_000,
        output_tokens_max=1024,
    )
    bound = 2 * max(PROMPT_WEIGHT * max(prompt for prompt, _ in CLIENTS.values()), OUTPUT_WEIGHT * MEMORY_TOKENS)
    trace = load()
    gaps: dict[str, float] = {}
    sets: dict[str, PolicyConfig] = {"vtc": POLICY_SETS["vtc"], "first-come-first-served": FCFS}
    for name, policy in sets.items():
        records = replay_trace(spec, trace, policy=policy, seed=0)
        gaps[name] = worst_gap(records, backlogged_until_s(records))
        print(f"{name:24} worst difference {gaps[name]:10.0f} weighted tokens, bound {bound:.0f}", flush=True)
    store(
        "vtc-bound",
        {
            "requests": len(trace.requests),
            "bound_weighted_tokens": bound,
            "worst_difference_weighted_tokens": gaps,
            "holds": gaps["vtc"] <= bound,
        },
    )


if __name__ == "__main__":
    main()
