"""TetriInfer's gains (arXiv 2401.11181): OPT-13B on V100, light and heavy requests mixed, against vLLM.

    python benchmarks/published/tetriinfer.py [--requests N]

Published: TTFT -97 %, job completion time -47 %, resources -38 %. The paper's baseline computes whole prompts before it
decodes; how many of its engines stand against TetriInfer's was not to be found, so both are played: as many GPUs (two
against 1P1D, four against 2P2D), and half as many (one against 1P1D), whose KV heavy answers fill. Resources are the
seconds for which engines are held, until the last answer. Writes benchmarks/results/published-tetriinfer.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from random import Random
from statistics import fmean

from msgspec.structs import replace
from outcome import CLUSTERS, store

from baton.core.config import BatchLimits, Plugin, PolicyConfig
from baton.core.types import Role
from baton.policy.named import NAMED
from baton.sim.replay_trace import replay_trace
from baton.sim.spec import ClusterSpec, SimWorkers, read_spec
from baton.workload.arrivals import PoissonArrivals
from baton.workload.request import Trace, TraceRequest
from baton.workload.schedule import with_arrivals

LIGHT, HEAVY = (128, 32), (1500, 600)
WHOLE = BatchLimits(step_tokens_max=2560, requests_max=128)
RATES_RPS = (2.0, 6.0, 14.0)
ENGINES = ((2, 1), (4, 2), (1, 1))
"""Engines of the baseline, and TetriInfer's of each side: as many GPUs, or half as many."""
PROMPTS_FIRST = replace(NAMED["sarathi"], batching=Plugin(use="baton.policy.batching:PrefillFirst"))
PUBLISHED = {"TTFT": -0.97, "JCT": -0.47, "resources": -0.38}


def light_and_heavy(requests: int, rate_rps: float, prompts: Sequence[int], answers: Sequence[int]) -> Trace:
    """TetriInfer's mixes: prompts and answers, each light or heavy, drawn from those given."""
    draw = Random(0)
    made: list[TraceRequest] = []
    for _ in range(requests):
        kind = draw.choice(prompts), draw.choice(answers)
        prompt, answer = (max(1, round(tokens * draw.uniform(0.6, 1.4))) for tokens in kind)
        made.append(TraceRequest(at_s=0.0, input_tokens=prompt, output_tokens=answer))
    trace = Trace(format="made", timing="absolute", requests=tuple(made))
    return with_arrivals(trace, PoissonArrivals(rate_rps), draw)


def compare(spec: ClusterSpec, trace: Trace, engines: int, each_side: int) -> dict[str, float]:
    """Compare mean TTFT and job completion time, and the GPU-seconds until the last answer."""
    sides: tuple[Role, ...] = ("prefill", "decode")
    split = tuple(SimWorkers(role=role, count=each_side, kind="v100", host="each") for role in sides)
    mixed = (SimWorkers(role="mixed", count=engines, kind="v100", host="each"),)
    systems: dict[str, tuple[ClusterSpec, PolicyConfig]] = {
        "tetriinfer": (replace(spec, workers=split), NAMED["tetriinfer"]),
        "vllm": (replace(spec, workers=mixed, batch=WHOLE), PROMPTS_FIRST),
    }
    found: dict[str, tuple[float, float, float]] = {}
    for name, (played, policy) in systems.items():
        records = replay_trace(played, trace, policy=policy, seed=0)
        ttft_s = fmean(record.ttft_s for record in records if record.ttft_s is not None)
        jct_s = fmean(record.e2e_s for record in records if record.e2e_s is not None)
        gpu_s = len(played.views()) * max(record.end_s for record in records)
        found[name] = ttft_s, jct_s, gpu_s
        print(f"{name:10} TTFT {ttft_s:.3f} s, JCT {jct_s:.2f} s, {gpu_s:.0f} engine-seconds", flush=True)
    more = (ours / theirs - 1 for ours, theirs in zip(found["tetriinfer"], found["vllm"], strict=True))
    return {name: round(ratio, 3) for name, ratio in zip(("TTFT", "JCT", "engine-seconds"), more, strict=True)}


def all_mixes(spec: ClusterSpec, requests: int) -> list[dict[str, object]]:
    """Play each mix at each rate, against as many engines and against half of them."""
    mixes = {
        "light prompts, heavy answers": (LIGHT[:1], HEAVY[1:]),
        "light and heavy": ((LIGHT[0], HEAVY[0]), (LIGHT[1], HEAVY[1])),
    }
    return [
        {"mix": name, "rate_rps": rate_rps, "vllm engines": engines, "tetriinfer": f"{each}P{each}D", **figures}
        for engines, each in ENGINES
        for name, (prompts, answers) in mixes.items()
        for rate_rps in RATES_RPS
        for figures in (compare(spec, light_and_heavy(requests, rate_rps, prompts, answers), engines, each),)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300)
    args = parser.parse_args()
    found = all_mixes(read_spec(CLUSTERS / "tetriinfer-opt13b-v100.yaml"), args.requests)
    store("tetriinfer", {"requests": args.requests, "published over vllm": PUBLISHED, "simulated over vllm": found})


if __name__ == "__main__":
    main()
