"""The cells of `policy_matrix.py`: a fleet, a load and an SLO, each at 0.6, 0.9 and 1.2 of the fleet's capacity.

The two halves were fixed before options were chosen. Options are chosen by cells of the half `tuned` only. Cells of the
half `held-out` have other fleets, and the second half in time of their traces. A seed selects another part of a half,
or other random lengths and times. The requests of a row arrive for at least six times a mean answer
(`policy_matrix.py --find`), because fewer would measure how an empty fleet fills. Two rows have fewer: the trace of
arena has no more, and reasoning, with answers of over a minute, would take hours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal

import msgspec
from _policy_loads import CODE_FILE, CONV_FILE, MOON_FILE, TOOL_FILE, drawn_of, part, read_once
from msgspec.structs import replace

from baton.core.config import Topology
from baton.core.types import Slo
from baton.lab.sim.spec import ClusterSpec, load_spec, read_spec
from baton.lab.workload.request import Trace, TraceRequest
from baton.lab.workload.schedule import scale_rate

HERE = Path(__file__).resolve().parent
Half = Literal["tuned", "held-out"]
Load = Callable[[Half, int, int], Trace]
"""Returns at most so many requests of a half, by a seed, at any rate."""
LOADS = (0.6, 0.9, 1.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A fleet with a load and an SLO, whose rates make three cells."""

    name: str
    fleet: Callable[[], ClusterSpec]
    load: Load
    slo: Slo
    capacity_rps: float
    """Highest rate at which a published policy keeps 90 % of the SLO attainment of an idle fleet (`--find`)."""
    requests: int = 200

    def spec(self) -> ClusterSpec:
        return replace(self.fleet(), queue_requests_max=100_000, output_tokens_max=8192)

    def trace(self, half: Half, rate_rps: float, seed: int = 0) -> Trace:
        """Return the load of a half, played at this mean rate."""
        trace = self.load(half, self.requests, seed)
        return scale_rate(trace, rate_rps * trace.requests[-1].at_s / len(trace.requests))


# ---- fleets


def example(file: str, topology: Topology | None = None) -> Callable[[], ClusterSpec]:
    """Return the cluster of a file, with another topology if it is given."""

    def read() -> ClusterSpec:
        folders = (HERE.parent / "examples" / "clusters", HERE / "clusters")
        spec = next(read_spec(folder / file) for folder in folders if (folder / file).exists())
        return spec if topology is None else replace(spec, topology=topology)

    return read


def planned(
    roles: Mapping[str, int], cost: Mapping[str, Any], *, step_tokens_max: int = 2048, requests_max: int = 128
) -> Callable[[], ClusterSpec]:
    """Return a fleet as `baton plan` writes it: every worker has its own host, and the KV that its memory leaves."""
    cluster = {
        "workers": [{"role": role, "count": count, "kind": "gpu", "host": "each"} for role, count in roles.items()],
        "kinds": {
            "gpu": {
                "cost": {"model": "roofline", "engine": "vllm-v1", **cost},
                "batch": {"step_tokens_max": step_tokens_max, "requests_max": requests_max},
            }
        },
    }
    return partial(load_spec, msgspec.json.encode(cluster).decode(), form="json")


# ---- loads


def of_file(file: str, half: Half, requests_max: int, seed: int) -> Trace:
    """Return requests of half of a trace's time, from its start or from a sixth of the trace later for each seed.

    Where too few requests are left, those before the start follow.
    """
    start, end = (0.0, 0.5) if half == "tuned" else (0.5, 1.0)
    spread_s, middle = 3.0 if file == MOON_FILE else 0.0, start + seed % 3 / 6
    trace = part(file, 1.0, spread_s, (middle, end), requests_max)
    missing = requests_max - len(trace.requests)
    if not missing or middle == start:
        return trace
    moved_s = trace.requests[-1].at_s
    before = part(file, 1.0, spread_s, (start, middle), missing).requests
    after = tuple(replace(request, at_s=request.at_s + moved_s) for request in before)
    return replace(trace, requests=trace.requests + after)


def of_sessions(file: str, half: Half, requests_max: int, seed: int) -> Trace:
    """Return requests of half of a file's sessions, in the order of their first requests.

    Few sessions last long, so that hardly any request is in the second half of the time.
    """
    requests = read_once(file).requests
    sessions = list(dict.fromkeys(request.session for request in requests))
    middle = len(sessions) // 2
    chosen = set(sessions[:middle] if half == "tuned" else sessions[middle:])
    kept = [request for request in requests if request.session in chosen]
    kept = kept[seed * requests_max % len(kept) :][:requests_max]
    start_s = kept[0].at_s
    return Trace(
        format="made", timing="absolute",
        requests=tuple(replace(request, at_s=request.at_s - start_s) for request in kept),
    )  # fmt: skip


def timeless(file: str, half: Half, requests_max: int, seed: int) -> Trace:
    """Return requests of a file that has no times, at Poisson times."""
    requests = read_once(file).requests
    middle = len(requests) // 2
    kept = requests[:middle] if half == "tuned" else requests[middle:]
    kept = kept[seed * requests_max % middle :][:requests_max]
    return _poisson([(request.input_tokens, request.output_tokens) for request in kept], seed)


def made(input_tokens: int, output_tokens: int, sigma: float, _: Half, requests_max: int, seed: int) -> Trace:
    """Return requests with lognormal lengths of these means at Poisson times. `sigma` 0: equal lengths."""
    draw = Random(7 + seed)

    def length(mean: int) -> int:
        return max(4, min(6 * mean, round(mean * draw.lognormvariate(-sigma * sigma / 2, sigma))))

    return _poisson([(length(input_tokens), length(output_tokens)) for _ in range(requests_max)], seed)


def reasoning(half: Half, requests_max: int, seed: int) -> Trace:
    return drawn_of("deepseek-r1", 1.0, "first" if half == "tuned" else "second", requests_max, seed)


def _poisson(lengths: list[tuple[int, int]], seed: int) -> Trace:
    draw, at_s, requests = Random(11 + seed), 0.0, list[TraceRequest]()
    for input_tokens, output_tokens in lengths:
        at_s += draw.expovariate(1.0)
        requests.append(TraceRequest(at_s=at_s, input_tokens=input_tokens, output_tokens=output_tokens))
    return Trace(format="made", timing="absolute", requests=tuple(requests))


CONV, CODE, MOON, TOOL = (partial(of_file, file) for file in (CONV_FILE, CODE_FILE, MOON_FILE, TOOL_FILE))
RTP, ARENA = partial(of_file, "rtpllm/online_pd.first80.jsonl.gz"), partial(of_file, "vtc_arena/arena27.first80.csv.gz")
AGENTS = partial(of_sessions, "agentic_coding/sessions.first150.jsonl.gz")
ARTICLES = partial(timeless, "lengths/arxiv_summarization.first80.csv.gz")

OWN = "one-gpu-host.toml"
L40S = {"llm": "llama3.1-8b", "hardware": "L40S-48G"}
H100 = {"llm": "llama3.1-8b", "hardware": "H100-80G-SXM"}
H200_70B = {"llm": "llama3.1-70b", "hardware": "H200-141G-SXM", "tp": 4, "weights": "fp8"}
V3 = {"llm": "deepseek-v3", "hardware": "H200-141G-SXM", "tp": 8, "ep": 8, "weights": "fp8"}
A100 = {"llm": "llama3.1-8b", "hardware": "A100-80G-SXM"}


def row(
    name: str, fleet: Callable[[], ClusterSpec], load: Load, slo: tuple[float, float], capacity_rps: float,
    requests: int = 200,
) -> Row:  # fmt: skip
    targets = Slo(ttft_s=slo[0], tpot_s=slo[1])
    return Row(name=name, fleet=fleet, load=load, slo=targets, capacity_rps=capacity_rps, requests=requests)


HALVES: dict[Half, tuple[Row, ...]] = {
    "tuned": (
        row("own-2p2d conv", example(OWN), CONV, (1.0, 0.03), 38.4, 700),
        row("own-2p2d code, tight TPOT", example(OWN), CODE, (1.5, 0.012), 2.34),
        row("own-2p2d synthetic", example(OWN), TOOL, (5.0, 0.05), 4),
        row("own-4-mixed conv", example(OWN, Topology(mixed=4)), CONV, (1.0, 0.03), 37.4, 700),
        row("own-4-mixed articles", example(OWN, Topology(mixed=4)), ARTICLES, (1.5, 0.03), 22.4, 800),
        row("opt13b-1p1d made", example("distserve-13b-4xa100-optimum.yaml"), partial(made, 755, 200, 0.6), (0.2, 0.1),
            5.51, 300),
        row("opt13b-2p1d made", example("distserve-13b-2p1d.yaml"), partial(made, 512, 64, 0.0), (0.4, 0.04), 14.3,
            300),
        row("70b-3p1d made", example("llama70b-3p1d-a100-tp8.yaml"), partial(made, 3000, 300, 0.0), (0.5, 0.03), 3.64),
        row("70b-2-mixed made", example("dynamo-llama70b-8xh100-mixed.yaml"), partial(made, 3000, 150, 0.6),
            (3.0, 0.04), 6.9),
        row("8b-1p3d-l40s conv", planned({"prefill": 1, "decode": 3}, L40S), CONV, (2.0, 0.06), 11.8, 600),
        row("70b-2p2d-h200 articles", planned({"prefill": 2, "decode": 2}, H200_70B, requests_max=64), ARTICLES,
            (1.0, 0.03), 15.5, 600),
        row("v3-2p2d-h200 conversation", planned({"prefill": 2, "decode": 2}, V3, step_tokens_max=8192), MOON,
            (5.0, 0.05), 2.69),
        row("8b-3p1d-h100 agents", planned({"prefill": 3, "decode": 1}, H100, step_tokens_max=8192), AGENTS,
            (2.0, 0.03), 0.643),
        row("7b-16-mixed-a10 conv", example("llumnix-16xa10.yaml"), CONV, (1.0, 0.08), 9.43, 1000),
    ),
    "held-out": (
        row("own-1p3d conv, tight TTFT", example(OWN, Topology(prefill=1, decode=3)), CONV, (0.25, 0.03), 35.2, 700),
        row("own-3p1d articles", example(OWN, Topology(prefill=3, decode=1)), ARTICLES, (1.0, 0.02), 18, 1000),
        row("own-4-mixed code", example(OWN, Topology(mixed=4)), CODE, (1.0, 0.02), 7.63),
        row("70b-2p1d made", example("dynamo-llama70b-8xh100-disagg.yaml"), partial(made, 3000, 150, 0.6), (3.0, 0.03),
            8.34, 300),
        row("8b-4p4d-h800 conv, tight TTFT", example("arrow-llama8b-8xh800.yaml"), CONV, (0.3, 0.03), 126,
            1400),
        row("8b-4p4d-h800 rtp-llm", example("arrow-llama8b-8xh800.yaml"), RTP, (5.0, 0.03), 13.7, 1400),
        row("34b-1-mixed conv", example("sarathi-yi34b-2xa100.yaml"), CONV, (3.0, 0.1), 2.9),
        row("opt13b-2p1d conv", example("distserve-13b-2p1d.yaml"), CONV, (0.8, 0.08), 5.69, 400),
        row("8b-2p2d-l40s arena", planned({"prefill": 2, "decode": 2}, L40S, requests_max=64), ARENA, (0.5, 0.04), 29.2,
            597),
        row("8b-4-mixed-h100 code", planned({"mixed": 4}, H100, requests_max=256), CODE, (1.0, 0.02), 12.5),
        row("8b-4-mixed-h100 conv, tight TPOT", planned({"mixed": 4}, H100, requests_max=256), CONV, (2.0, 0.012),
            26.9, 400),
        row("8b-2p2d-a100 reasoning", planned({"prefill": 2, "decode": 2}, A100), reasoning, (2.0, 0.04), 3.9, 600),
        row("v3-3p1d-h200 synthetic", planned({"prefill": 3, "decode": 1}, V3, step_tokens_max=8192), TOOL, (4.0, 0.06),
            5.18, 300),
        row("70b-1p3d-h200 agents", planned({"prefill": 1, "decode": 3}, H200_70B, step_tokens_max=8192), AGENTS,
            (10.0, 0.05), 0.291, 100),
    ),
}  # fmt: skip
