"""DistServe's worked example (OSDI 2024, section 1, figure 1): what splitting prefill from decode gives per GPU.

    python benchmarks/published/distserve_example.py

OPT-13B on A100-80G, prompts of 512 and answers of 64 tokens, Poisson arrivals; 90 % of the requests within TTFT 0.4 s
and TPOT 0.04 s (set-up: the authors' blog, "Throughput is Not All You Need"). Published, requests/s per GPU: colocated
3 for TTFT and 1.6 for TPOT, so 1.6; prefill alone 5.6, decode alone 10, so 2P1D 3.3. Step times are the linear fits of
the artefact's simulator, colocated those of vLLM of 2023, split those of either engine: the figure does not say which
one ran. Writes benchmarks/results/published-distserve-example.json.
"""

from __future__ import annotations

from random import Random

from msgspec.structs import replace
from outcome import CLUSTERS, store
from systems import PROMPTS_FIRST, with_cost

from baton.core.config import PolicyConfig
from baton.core.types import Slo
from baton.decide.policy.policy_sets import POLICY_SETS
from baton.lab.report.summary import SloTargets, summarize
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import ClusterSpec, read_spec
from baton.lab.workload.arrivals import PoissonArrivals
from baton.lab.workload.generate import synthetic_trace

SLO = Slo(ttft_s=0.4, tpot_s=0.04)
ANY = 1e9
REQUESTS = 600
PUBLISHED_RPS = {
    "colocated, TTFT": 3.0,
    "colocated, TPOT": 1.6,
    "colocated": 1.6,
    "prefill alone": 5.6,
    "decode alone": 10.0,
    "2P1D": 3.3,
}
ENGINES = ("distserve", "vllm")


def attained(spec: ClusterSpec, policy: PolicyConfig, rate_rps: float, slo: Slo, answer_tokens: int) -> bool:
    trace = synthetic_trace(REQUESTS, (512, answer_tokens), PoissonArrivals(rate_rps), Random(0))
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


def colocated() -> dict[str, float]:
    """Find what one GPU serves within each SLO, and within both."""
    spec = read_spec(CLUSTERS / "distserve-13b-colocated.yaml")
    slos = {
        "colocated, TTFT": Slo(ttft_s=SLO.ttft_s, tpot_s=ANY),
        "colocated, TPOT": Slo(ttft_s=ANY, tpot_s=SLO.tpot_s),
        "colocated": SLO,
    }
    return {name: capacity_rps(spec, PROMPTS_FIRST, slo) for name, slo in slos.items()}


def split(engine: str) -> dict[str, float]:
    """Find what each phase serves alone, and 2P1D per GPU."""
    three = with_cost(read_spec(CLUSTERS / "distserve-13b-2p1d.yaml"), {"engine": engine})
    prefill, decode = three.workers
    alone = replace(three, workers=(replace(prefill, count=1), decode))
    own = {name: replace(kind, kv=three.kv_of_kind(name)) for name, kind in three.kinds.items()}
    fed = replace(three, workers=(replace(prefill, count=16), decode), kinds=own)  # one that decodes has its own room
    apart = POLICY_SETS["distserve"]
    return {
        "prefill alone": capacity_rps(alone, apart, Slo(ttft_s=SLO.ttft_s, tpot_s=ANY), answer_tokens=1),
        "decode alone": capacity_rps(fed, apart, Slo(ttft_s=ANY, tpot_s=SLO.tpot_s)),
        "2P1D": capacity_rps(three, apart, SLO) / 3,
    }


def main() -> None:
    together = colocated()
    simulated = {engine: {**together, **split(engine)} for engine in ENGINES}
    for engine, figures in simulated.items():
        for name, rate_rps in figures.items():
            print(f"{engine:10} {name:16} {rate_rps:6.2f} requests/s per GPU, published {PUBLISHED_RPS[name]:.1f}")
    store(
        "distserve-example",
        {
            "slo": {"ttft_s": SLO.ttft_s, "tpot_s": SLO.tpot_s},
            "published_rps_per_gpu": PUBLISHED_RPS,
            "simulated_rps_per_gpu": {
                engine: {name: round(value, 2) for name, value in figures.items()}
                for engine, figures in simulated.items()
            },
            "gain_published": round(PUBLISHED_RPS["2P1D"] / PUBLISHED_RPS["colocated"], 2),
            "gain_simulated": {
                engine: round(figures["2P1D"] / figures["colocated"], 2) for engine, figures in simulated.items()
            },
        },
    )


if __name__ == "__main__":
    main()
