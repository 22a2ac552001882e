"""VTC's measured service (OSDI 2024, section 5): the same 1,500 requests of 27 clients, on one A10G and simulated.

    python benchmarks/published/vtc_curves.py [--limit N]

Its artefact holds what every request got under VTC and under first come first served. A step's prices (of itself, per
prompt token, decoding request and token of context) are fitted to the run under first come first served, through the
simulator; the run under VTC is then told, which the fit has not seen. Service is prompt tokens + 2 x output tokens; a
curve is what a client has got by each minute. Writes benchmarks/results/published-vtc-curves.json.
"""

from __future__ import annotations

import argparse
import csv
import gzip
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace
from outcome import CLUSTERS, TRACES, store
from scipy.optimize import least_squares

from baton.core.config import Plugin
from baton.decide.policy.policy_sets import POLICY_SETS
from baton.lab.report.summary import RequestRecord
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import ClusterSpec, SimKind, read_spec
from baton.lab.workload.request import Trace, TraceRequest

PROFILES = TRACES.parent / "profiles" / "vtc_a10g"
PRICES = ("step_overhead_s", "prefill_token_s", "decode_request_s", "context_token_s")
START = (0.03, 1.2e-4, 1e-4, 9e-7)
EVALUATIONS_MAX = 5
MINUTES = range(60, 661, 60)
OUTPUT_WEIGHT = 2.0
FCFS = replace(POLICY_SETS["vtc"], fairness=Plugin(use="fcfs"))
POLICIES = {"FCFS": FCFS, "VTC": POLICY_SETS["vtc"]}


@dataclass(frozen=True, slots=True)
class Served:
    """What one request got, and when."""

    client: str
    prompt_tokens: int
    output_tokens: int
    first_s: float
    last_s: float
    ttft_s: float

    def service_by(self, at_s: float) -> float:
        """The prompt with the first token; tokens evenly between that and the last."""
        if at_s < self.first_s:
            return 0.0
        share = min(1.0, (at_s - self.first_s) / max(1e-9, self.last_s - self.first_s))
        return self.prompt_tokens + OUTPUT_WEIGHT * self.output_tokens * share


def measured(name: str, limit: int | None) -> tuple[Trace, list[Served]]:
    with gzip.open(PROFILES / f"{name}.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))[:limit]
    requests, served = [], []
    for row in rows:
        at_s, prompt, answer = float(row["t_s"]), int(row["prompt_len"]), int(row["output_len"])
        requests.append(TraceRequest(at_s=at_s, input_tokens=prompt, output_tokens=answer, tenant=row["client"]))
        first, last = float(row["first_token_latency_s"] or -1), float(row["request_latency_s"] or -1)
        if first >= 0 and last >= 0:
            served.append(Served(row["client"], prompt, answer, at_s + first, at_s + last, first))
    return Trace(format="vtc", timing="absolute", requests=tuple(requests)), served


def simulated(trace: Trace, name: str, spec: ClusterSpec) -> list[Served]:
    return [_served(record) for record in replay_trace(spec, trace, policy=POLICIES[name], seed=0)]


def _served(record: RequestRecord) -> Served:
    times_s = record.token_times_s
    ttft_s = times_s[0] - record.arrival_s
    return Served(record.tenant, record.input_tokens, len(times_s), times_s[0], times_s[-1], ttft_s)


def priced(spec: ClusterSpec, prices: Sequence[float]) -> ClusterSpec:
    values = {name: float(price) for name, price in zip(PRICES, prices, strict=True)}
    kinds = {
        name: SimKind(cost={"model": "linear", **values}, kv=kind.kv, batch=kind.batch)
        for name, kind in spec.kinds.items()
    }
    return replace(spec, kinds=kinds)


def curves(served: Sequence[Served]) -> dict[str, np.ndarray]:
    """By client: the service got by each minute."""
    clients = sorted({one.client for one in served}, key=int)
    return {
        client: np.array([sum(one.service_by(at_s) for one in served if one.client == client) for at_s in MINUTES])
        for client in clients
    }


def fit(spec: ClusterSpec, trace: Trace, real: Sequence[Served]) -> np.ndarray:
    """Find the prices under which first come first served serves as much by each minute, and as late."""
    total = sum(curves(real).values())
    late = np.percentile([one.ttft_s for one in real], range(5, 100, 5))

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        found = simulated(trace, "FCFS", priced(spec, np.exp(logarithms)))
        waits = np.percentile([one.ttft_s for one in found], range(5, 100, 5))
        return np.concatenate((sum(curves(found).values()) / total - 1, (waits - late) / (late + 1.0)))

    return np.exp(least_squares(residuals, np.log(START), diff_step=0.02, max_nfev=EVALUATIONS_MAX).x)


def compare(real: Sequence[Served], made: Sequence[Served]) -> dict[str, float]:
    ours, theirs = curves(made), curves(real)
    clients = [client for client in theirs if client in ours and theirs[client][-1] > 0]
    last = np.array([[ours[client][-1], theirs[client][-1]] for client in clients])
    total, made_total = sum(theirs.values()), sum(ours.values())
    far = [float(np.abs(ours[client] - theirs[client]).mean()) / theirs[client][-1] for client in clients]
    return {
        "service by minute, mean error of the sum": float(np.mean(np.abs(made_total / total - 1))),
        "curve of a client, median distance / its total": float(np.median(far)),
        "totals by client, correlation": float(np.corrcoef(last.T)[0, 1]),
        "mean TTFT measured_s": float(np.mean([one.ttft_s for one in real])),
        "mean TTFT simulated_s": float(np.mean([one.ttft_s for one in made])),
    }


def spread_s(served: Sequence[Served]) -> dict[str, float]:
    """How evenly clients wait: mean TTFT of the eight that ask least, and of the four that ask most."""
    asked: dict[str, list[float]] = {}
    for one in served:
        asked.setdefault(one.client, []).append(one.ttft_s)
    by_use = sorted(asked, key=lambda client: len(asked[client]))
    return {
        "eight that ask least": float(np.mean([wait for client in by_use[:8] for wait in asked[client]])),
        "four that ask most": float(np.mean([wait for client in by_use[-4:] for wait in asked[client]])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, help="the first N requests only")
    args = parser.parse_args()
    spec = read_spec(CLUSTERS / "vtc-a10g.yaml")
    trace, real = measured("FCFS", args.limit)
    prices = fit(spec, trace, real)
    figures: dict[str, object] = {"prices": dict(zip(PRICES, map(float, prices), strict=True))}
    for name in POLICIES:
        trace, real = measured(name, args.limit)
        made = simulated(trace, name, priced(spec, prices))
        figures[name] = {
            "requests": len(trace.requests),
            **compare(real, made),
            "TTFT measured_s": spread_s(real),
            "TTFT simulated_s": spread_s(made),
        }
        print(name, figures[name], flush=True)
    store("vtc-curves", figures)


if __name__ == "__main__":
    main()
