"""Goodput of every named policy on equal hardware: real traces near and above capacity, and a load that shifts.

    python benchmarks/policies.py [--half first|second] [--best-split] [--requests N] [--case NAME] [--policy NAME]

Four accelerators of one host (examples/clusters/one-gpu-host.toml), two that prefill and two that decode. With
--best-split a policy that keeps its workers' roles is given the best of 1P3D, 2P2D and 3P1D, found by trying.
Options were chosen on the first half (in time) of each trace; the second half was held out. Writes
benchmarks/results/policies-HALF.json: the share of all requests that met both TTFT and TPOT, and that times the offered
rate, which is the goodput.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

from msgspec.structs import replace
from record import write

from baton.core.config import Topology
from baton.core.types import Slo
from baton.metrics.summary import SloTargets, summarize
from baton.policy.named import NAMED
from baton.sim.replay_trace import replay_trace
from baton.sim.spec import ClusterSpec, read_spec
from baton.workload.load import read_trace
from baton.workload.request import Trace, TraceRequest
from baton.workload.schedule import cut, scale_rate, spread

ROOT = Path(__file__).resolve().parent.parent
TRACES = ROOT.parent / "shared" / "traces"
CLUSTER = ROOT / "examples" / "clusters" / "one-gpu-host.toml"
SPLITS = ((1, 3), (2, 2), (3, 1))
FREE = ("baton", "sarathi", "llumnix")
"""Their choices do not depend on roles, or change them."""


@dataclass(frozen=True, slots=True)
class Case:
    """A load, and what its clients were promised."""

    name: str
    trace: Callable[[str, int], Trace]
    """Makes it, of the first or the second half in time, with at most so many requests."""
    slo: Slo


def from_file(file: str, rate_scale: float, spread_s: float, half: str, requests_max: int) -> Trace:
    """Take half of a trace, played faster so that the four accelerators are near their capacity or above."""
    trace = read_trace(TRACES / file)
    middle_s = trace.requests[-1].at_s / 2
    start_s, duration_s = (0.0, middle_s) if half == "first" else (middle_s, None)
    trace = cut(trace, start_s=start_s, duration_s=duration_s, skip=0)
    if spread_s:
        trace = spread(trace, spread_s)
    return scale_rate(replace(trace, requests=trace.requests[:requests_max]), rate_scale)


def shifting(half: str, requests_max: int) -> Trace:
    """Long prompts with short answers, then short prompts with long answers, in turns of 8 s.

    The first keeps three of the four accelerators busy with prompts, the second three with answers.
    """
    turn_s, requests, at_s = 8.0, [], 0.0
    offset = 0 if half == "first" else 1
    while len(requests) < requests_max:
        heavy = int(at_s / turn_s + offset) % 2 == 0
        place = len(requests)
        prompt, answer, gap_s = (6000, 20, 0.085) if heavy else (250, 500, 0.020)
        jitter = 0.5 + ((place * 7919) % 1000) / 1000
        at_s += gap_s * jitter
        wide = 0.6 + ((place * 104_729) % 800) / 1000
        requests.append(TraceRequest(at_s=at_s, input_tokens=int(prompt * wide), output_tokens=int(answer * wide)))
    return Trace(format="made", timing="absolute", requests=tuple(requests))


CHAT, CODE, LONG = Slo(ttft_s=1.0, tpot_s=0.03), Slo(ttft_s=1.5, tpot_s=0.03), Slo(ttft_s=5.0, tpot_s=0.05)
CONV_FILE, CODE_FILE = "azure2023/conv.first80.csv.gz", "azure2023/code.first80.csv.gz"
MOON_FILE, TOOL_FILE = "mooncake/conversation.first80.jsonl.gz", "mooncake/synthetic.first80.jsonl.gz"
CASES = (
    Case("azure-conv", partial(from_file, CONV_FILE, 9.0, 0.0), CHAT),
    Case("azure-conv-tight", partial(from_file, CONV_FILE, 9.0, 0.0), Slo(ttft_s=0.5, tpot_s=0.015)),
    Case("azure-conv-over", partial(from_file, CONV_FILE, 13.0, 0.0), CHAT),
    Case("azure-code", partial(from_file, CODE_FILE, 9.0, 0.0), CODE),
    Case("mooncake-conversation", partial(from_file, MOON_FILE, 1.5, 3.0), LONG),
    Case("mooncake-synthetic", partial(from_file, TOOL_FILE, 1.5, 0.0), LONG),
    Case("rtp-llm", partial(from_file, "rtpllm/online_pd.first80.jsonl.gz", 1.0, 0.0), LONG),
    Case("shifting", shifting, Slo(ttft_s=1.5, tpot_s=0.03)),
)


def attainment(spec: ClusterSpec, split: tuple[int, int], trace: Trace, slo: Slo, policy: str) -> tuple[float, float]:
    """Return the share of requests that met both targets, and the seconds that the run took."""
    shaped = replace(spec, topology=Topology(prefill=split[0], decode=split[1]))
    started_s = perf_counter()
    records = replay_trace(shaped, trace, policy=policy, seed=0, slo=slo)
    targets = SloTargets(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s)
    results = summarize(records, slo=targets, wall_s=0.0)
    return results.slo.attainment_ratio or 0.0, perf_counter() - started_s


def run_case(
    case: Case, policies: Sequence[str], splits: Sequence[tuple[int, int]], half: str, requests_max: int
) -> dict[str, object]:
    spec = replace(read_spec(CLUSTER), queue_requests_max=100_000, output_tokens_max=8192)
    trace = case.trace(half, requests_max)
    offered_rps = len(trace.requests) / trace.requests[-1].at_s
    rows: dict[str, dict[str, object]] = {}
    for policy in policies:
        tries = ((2, 2),) if policy in FREE else splits
        tried = {f"{x}P{y}D": attainment(spec, (x, y), trace, case.slo, policy) for x, y in tries}
        best = max(tried, key=lambda split: tried[split][0])
        ratio = tried[best][0]
        rows[policy] = {
            "attainment_ratio": round(ratio, 4),
            "goodput_rps": round(ratio * offered_rps, 3),
            "split": best,
        }
        print(f"{case.name:22} {policy:24} {ratio:.4f} {best} {tried[best][1]:.1f} s", flush=True)
    return {
        "requests": len(trace.requests),
        "offered_rps": round(offered_rps, 3),
        "slo": {"ttft_s": case.slo.ttft_s, "tpot_s": case.slo.tpot_s},
        "policies": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=("first", "second"), default="second")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--best-split", action="store_true", help="try 1P3D, 2P2D and 3P1D for each static policy")
    parser.add_argument("--name", default="", help="of the result file, after the half")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES])
    parser.add_argument("--policy", action="append", choices=sorted(NAMED))
    args = parser.parse_args()
    cases = [case for case in CASES if not args.case or case.name in args.case]
    policies = args.policy or list(NAMED)
    splits = SPLITS if args.best_split else ((2, 2),)
    name = "-".join(part for part in ("policies", args.half, args.name) if part)
    figures: dict[str, dict[str, object]] = {}
    for case in cases:
        figures[case.name] = run_case(case, policies, splits, args.half, args.requests)
        write(name, {"half": args.half, "cluster": CLUSTER.name, "cases": figures})


if __name__ == "__main__":
    main()
