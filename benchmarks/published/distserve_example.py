"""DistServe's worked example (OSDI 2024, section 1, figure 1): what splitting prefill from decode gives per GPU.

    python benchmarks/published/distserve_example.py

OPT-13B on A100-80G, prompts of 512 and answers of 64 tokens, Poisson arrivals; 90 % of the requests within TTFT 0.4 s
and TPOT 0.04 s. Published, requests/s per GPU: colocated 1.6, prefill alone 5.6, decode alone 10, 2P1D 3.3. Writes
benchmarks/results/published-distserve-example.json.
"""

from __future__ import annotations

from random import Random

from msgspec.structs import replace
from outcome import CLUSTERS, store

from baton.core.config import Plugin, PolicyConfig
from baton.core.types import Slo
from baton.metrics.summary import SloTargets, summarize
from baton.policy.named import NAMED
from baton.sim.replay_trace import replay_trace
from baton.sim.spec import ClusterSpec, read_spec
from baton.workload.arrivals import PoissonArrivals
from baton.workload.lengths import UniformLengths, synthetic_trace

SLO = Slo(ttft_s=0.4, tpot_s=0.04)
ANY = 1e9
REQUESTS = 600
PUBLISHED_RPS = {"colocated": 1.6, "prefill alone": 5.6, "decode alone": 10.0, "2P1D": 3.3}
PROMPTS_FIRST = replace(NAMED["sarathi"], batching=Plugin(use="baton.policy.batching:PrefillFirst"))


def attained(spec: ClusterSpec, policy: PolicyConfig, rate_rps: float, slo: Slo, answer_tokens: int) -> bool:
    lengths = UniformLengths(input_tokens=(512, 512), output_tokens=(answer_tokens, answer_tokens))
    trace = synthetic_trace(REQUESTS, lengths, PoissonArrivals(rate_rps), Random(0))
    records = replay_trace(spec, trace, policy=policy, seed=0)
    results = summarize(records, slo=SloTargets(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s), wall_s=0.0)
    return (results.slo.attainment_ratio or 0.0) >= 0.9


def capacity_rps(spec: ClusterSpec, policy: PolicyConfig, slo: Slo, answer_tokens: int = 64) -> float:
    """Find the highest rate at which 90 % of the requests are in their SLO, to 2 %."""
    low, high = 0.1, 64.0
    while high / low > 1.02:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if attained(spec, policy, middle, slo, answer_tokens) else (low, middle)
    return low


def main() -> None:
    one = read_spec(CLUSTERS / "distserve-13b-colocated.yaml")
    three = read_spec(CLUSTERS / "distserve-13b-2p1d.yaml")
    prefill, decode = three.workers
    alone = replace(three, workers=(replace(prefill, count=1), decode))
    fed = replace(three, workers=(replace(prefill, count=16), decode))
    apart = NAMED["distserve"]
    simulated = {
        "colocated": capacity_rps(one, PROMPTS_FIRST, SLO),
        "prefill alone": capacity_rps(alone, apart, Slo(ttft_s=SLO.ttft_s, tpot_s=ANY), answer_tokens=1),
        "decode alone": capacity_rps(fed, apart, Slo(ttft_s=ANY, tpot_s=SLO.tpot_s)),
        "2P1D": capacity_rps(three, apart, SLO) / 3,
    }
    for name, rate_rps in simulated.items():
        print(f"{name:14} {rate_rps:6.2f} requests/s per GPU, published {PUBLISHED_RPS[name]:.1f}", flush=True)
    store(
        "distserve-example",
        {
            "slo": {"ttft_s": SLO.ttft_s, "tpot_s": SLO.tpot_s},
            "published_rps_per_gpu": PUBLISHED_RPS,
            "simulated_rps_per_gpu": {name: round(value, 2) for name, value in simulated.items()},
            "gain_published": round(3.3 / 1.6, 2),
            "gain_simulated": round(simulated["2P1D"] / simulated["colocated"], 2),
        },
    )


if __name__ == "__main__":
    main()
