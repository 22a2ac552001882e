"""TetriInfer's gains (arXiv 2401.11181): OPT-13B on V100, five mixes of light and heavy requests, against vLLM.

    python benchmarks/published/tetriinfer.py [--requests N] [--rate-rps R ...] [--tp T ...] [--vllm-batch B ...]
        [--mix NAME ...]

Published, of light prompts with heavy answers, the best mix: TTFT -97 %, job completion time -47 %, resources -38 %;
those of the others are below. As in the paper there are four V100, a prompt is heavy above 512 tokens, an answer above
128, and TetriInfer computes prompts in chunks of 512. Real lengths of a chat service (traces/vtc_arena) stand for those
of ShareGPT. How fast requests came, how many engines vLLM had, how many requests it took at a time and how many GPUs an
engine has was not to be found. So: all at once (`--rate-rps 0`) or Poisson; one engine of vLLM or two against 1P1D;
engines of one V100, whose KV a few heavy answers fill, or of two. vLLM is that of 2023: whole prompts before any
decode, as many as find room, and whoever finds none later is computed again. Resources are the seconds from the first
arrival to the last work of each engine. Writes benchmarks/results/published-tetriinfer.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from random import Random
from statistics import fmean

from msgspec.structs import replace
from outcome import CLUSTERS, TRACES, store
from systems import PROMPTS_FIRST, with_cost

from baton.core.config import BatchLimits, PolicyConfig
from baton.core.types import Role
from baton.decide.policy.policy_sets import POLICY_SETS
from baton.lab.report.summary import RequestRecord
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import ClusterSpec, SimWorkers, read_spec
from baton.lab.workload.arrivals import PoissonArrivals
from baton.lab.workload.load import read_trace
from baton.lab.workload.request import Trace, TraceRequest
from baton.lab.workload.schedule import redraw_arrivals

PROMPT_LIGHT_TOKENS, ANSWER_LIGHT_TOKENS, CONTEXT_TOKENS = 512, 128, 2048
BATCHES = (24, 256)
"""Most requests in a step of vLLM: its default is 256. With 24 the mixes come nearest to what is published."""
AT_ONCE_RPS = 1e6
MIXES = {
    "light prompts, light answers": {(False, False)},
    "light prompts, heavy answers": {(False, True)},
    "heavy prompts, light answers": {(True, False)},
    "heavy prompts, heavy answers": {(True, True)},
    "mixed": {(False, False), (False, True), (True, False), (True, True)},
}
"""Whether prompt and answer are heavy."""
VLLM_ENGINES = (1, 2)
PUBLISHED = {
    "light prompts, light answers": {"TTFT": -0.44, "JCT": -0.40},
    "light prompts, heavy answers": {"TTFT": -0.97, "JCT": -0.47, "resources": -0.38},
    "heavy prompts, light answers": {"TTFT": -0.09, "JCT": -0.23, "resources": 0.43},
    "mixed": {"TTFT": -0.85, "JCT": -0.50, "resources": -0.21},
}
"""Section 5.1, as quoted in reading notes of the paper, which call the gain marginal where both are heavy."""


def mixed_load(mix: str, requests: int, rate_rps: float) -> Trace:
    """Draw requests of a mix from the chat service's, each kind as often as the others."""
    kinds: dict[tuple[bool, bool], list[TraceRequest]] = {kind: [] for kind in sorted(MIXES[mix])}
    for request in read_trace(TRACES / "vtc_arena" / "arena27.first80.csv.gz").requests:
        kind = request.input_tokens > PROMPT_LIGHT_TOKENS, request.output_tokens > ANSWER_LIGHT_TOKENS
        if kind in kinds and request.input_tokens + request.output_tokens <= CONTEXT_TOKENS:
            kinds[kind].append(replace(request, tenant=""))
    draw, choices = Random(0), list(kinds.values())
    drawn = tuple(draw.choice(draw.choice(choices)) for _ in range(requests))
    trace = Trace(format="made", timing="absolute", requests=drawn)
    return redraw_arrivals(trace, PoissonArrivals(rate_rps or AT_ONCE_RPS), draw)


def in_use_s(records: Sequence[RequestRecord], spec: ClusterSpec) -> float:
    """Add up each engine's seconds from the first arrival to its last work; prefill engines end with the prompts."""
    begin_s = min(record.arrival_s for record in records)
    prompts_end_s = max(record.token_times_s[0] for record in records)
    end_s = max(record.end_s for record in records)
    prefills = sum(view.role == "prefill" for view in spec.views())
    return prefills * (prompts_end_s - begin_s) + (len(spec.views()) - prefills) * (end_s - begin_s)


def play(spec: ClusterSpec, trace: Trace, policy: PolicyConfig) -> dict[str, float]:
    """Play one system. Returns mean TTFT, mean job completion time and the seconds that its engines are in use."""
    records = replay_trace(spec, trace, policy=policy, seed=0)
    lost = [record for record in records if record.outcome != "finished"]
    if lost:
        raise SystemExit(f"{len(lost)} of {len(records)} requests did not finish, the first: {lost[0].outcome}")
    return {
        "TTFT": fmean(record.ttft_s for record in records if record.ttft_s is not None),
        "JCT": fmean(record.e2e_s for record in records if record.e2e_s is not None),
        "resources": in_use_s(records, spec),
    }


def compare(spec: ClusterSpec, trace: Trace, batches: Sequence[int]) -> list[dict[str, object]]:
    """Play TetriInfer as 1P1D, and vLLM with one engine and with two."""

    def workers(*roles: Role, count: int = 1) -> tuple[SimWorkers, ...]:
        return tuple(SimWorkers(role=role, count=count, kind="v100", host="each") for role in roles)

    ours = play(replace(spec, workers=workers("prefill", "decode")), trace, POLICY_SETS["tetriinfer"])
    found: list[dict[str, object]] = []
    for engines, batch in product(VLLM_ENGINES, batches):
        limits = BatchLimits(step_tokens_max=CONTEXT_TOKENS, requests_max=batch)
        theirs = play(replace(spec, workers=workers("mixed", count=engines), batch=limits), trace, PROMPTS_FIRST)
        found.append(
            {
                "vllm engines": engines,
                "vllm batch": batch,
                "kv_tokens": spec.kv_of_kind("v100").blocks * spec.kv.block_tokens,
                "seconds, tetriinfer and vllm": {name: [round(ours[name], 3), round(theirs[name], 3)] for name in ours},
                **{name: round(ours[name] / theirs[name] - 1, 3) for name in ours},
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--rate-rps", type=float, action="append", help="0: all at once")
    parser.add_argument("--tp", type=int, action="append", choices=(1, 2), help="GPUs of an engine")
    parser.add_argument("--vllm-batch", type=int, action="append", help="most requests in a step of vLLM")
    parser.add_argument("--mix", action="append", choices=list(MIXES))
    args = parser.parse_args()
    base = read_spec(CLUSTERS / "tetriinfer-opt13b-v100.yaml")
    found: list[dict[str, object]] = []
    for mix in args.mix or MIXES:
        for rate_rps in args.rate_rps or (0.0, 2.0, 6.0):
            trace = mixed_load(mix, args.requests, rate_rps)
            for tp in args.tp or (1, 2):
                for figures in compare(with_cost(base, {"tp": tp}), trace, args.vllm_batch or BATCHES):
                    row = {"mix": mix, "rate_rps": rate_rps or "all at once", "gpus of an engine": tp, **figures}
                    found.append(row)
                    print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    store("tetriinfer", {"requests": args.requests, "published over vllm": PUBLISHED, "simulated over vllm": found})


if __name__ == "__main__":
    main()
